"""Lines that `unbroken top` shows, made from the contents of the live page.  Pure.

Texts of the contents come from outside: each line shows their control characters as text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.cli.job.views import ENDED, age, cause_text, share_text, span
from unbroken.cli.nodes.views import TITLES as NODE_TITLES
from unbroken.cli.nodes.views import cells as node_cells
from unbroken.cli.terminal import visible
from unbroken.core.page.heat_map import LATE_SHARE
from unbroken.core.wording import counted
from unbroken.spec.times import time_seconds

Contents = Mapping[str, Any]
Target = tuple[str, ...]
"""A screen, as a path of the live page."""
OVERVIEW: Target = ("jobs",)
CELL_WIDEST = 200
"""Characters of a cell; the terminal's width cuts a line earlier."""
NARROWEST = 12
NAMES_SHARE = 3
"""A column takes at most this part of the width (one third), so that the others are seen."""
GAP = 2
RANKS_LISTED = 16
"""Ranks, or groups of neighbouring ranks, that have a row although they do not differ."""
MAP_WIDEST = 64
TOO_LATE_SHARE = 1.0
"""Silence, as a share of the allowed one, above which the map marks a rank as too quiet."""
MAP_KEY = ". fine   - behind   o quiet   O too quiet   ! alarm"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a screen."""

    text: str
    style: str = ""
    target: Target | None = None
    """The screen that this line opens; None: none."""


def clean(text: object) -> str:
    """A text from outside in one line, with its control characters as visible escapes."""
    return visible(" ".join(str(text).split()))[:CELL_WIDEST]


def prose(text: object, width: int | None, style: str = "") -> Iterator[Line]:
    """Lines of a text from outside, which is wrapped and not cut at the terminal's width."""
    found = clean(text)
    for line in [found] if width is None else textwrap.wrap(found, max(width, NARROWEST)):
        yield Line(line, style)


def width_of(text: str) -> int:
    """The number of columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # slow to load

    return cell_len(text)


def fitted(text: str, width: int) -> str:
    """The text in exactly this many columns; a longer text ends with three dots."""
    if width_of(text) <= width:
        return text + " " * (width - width_of(text))
    if text.isascii():
        return text[: max(width - 3, 0)] + "..."[:width]
    from rich.cells import set_cell_size  # slow to load

    return set_cell_size(text, max(width - 3, 0)) + "..."[:width]


Row = tuple[Sequence[object], str, Target | None]
"""Cells, style and target of a line."""


def table(titles: Sequence[str], rows: Iterable[Row], width: int | None) -> Iterator[Line]:
    """Lines of a table; `width` None: no cell is shortened."""
    found = [([clean(cell) for cell in cells], style, target) for cells, style, target in rows]
    every = [list(titles), *(cells for cells, _, _ in found)]
    widths = [max(width_of(cells[index]) for cells in every) for index in range(len(titles))]
    if width is not None:
        most = max(width // NAMES_SHARE, NARROWEST)
        widths = [*(min(one, most) for one in widths[:-1]), widths[-1]]

    def line(cells: Sequence[str]) -> str:
        each = zip(cells, widths, strict=True)
        text = (" " * GAP).join(fitted(cell, columns) for cell, columns in each)
        return (text if width is None else fitted(text, width)).rstrip()

    yield Line(line(titles), "bold")
    for cells, style, target in found:
        yield Line(line(cells), style, target)


def lines(target: Target, contents: Contents, now: float, width: int | None) -> list[Line]:
    """All lines of a screen."""
    match target:
        case ("jobs",):
            return list(overview_lines(contents, now, width))
        case ("nodes", name):
            return list(node_lines(name, contents))
        case (_, _, _, "incidents", _):
            return [Line(visible(line)) for line in contents["lines"]]
        case _:
            return list(job_lines(contents, now, width))


def overview_lines(contents: Contents, now: float, width: int | None) -> Iterator[Line]:
    """The jobs, those that run first, and the nodes, those with a fault first."""
    jobs = sorted(contents["jobs"], key=lambda one: one["state"] in ENDED)
    yield Line(_jobs_headline(jobs), "bold")
    if jobs:
        titles = ("JOB", "STATE", "RANKS", "STEP", "STEPS/S", "RESTARTS", "GOODPUT", "LAST FAULT")
        yield from table((*titles, "AGE"), (_job_row(one, now) for one in jobs), width)
    if contents["resumed"]:
        yield Line("")
        rows = (_resumed_row(one, now) for one in contents["resumed"])
        others = ("JOB OF ANOTHER KIND", "STATE", "RESTARTS", "LAST FAULT", "AGE")
        yield from table(others, rows, width)
    yield Line("")
    for one in contents["missing"]:
        yield from prose(one, width, "yellow")
    nodes = sorted(contents["nodes"], key=lambda one: (_is_sound(one), one["name"]))
    ready = sum(one["ready"] for one in nodes)
    yield Line(f"{ready} of {counted(len(nodes), 'node')} ready", "bold")
    yield from table((*NODE_TITLES, "FAULT"), (_node_row(one) for one in nodes), width)


def _jobs_headline(jobs: Sequence[Contents]) -> str:
    if not jobs:
        return "no jobs; start one with: unbroken run train.py"
    counts: dict[str, int] = {}
    for one in jobs:
        counts[clean(one["state"])] = counts.get(clean(one["state"]), 0) + 1
    states = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{counted(len(jobs), 'job')}: {states}"


def _name(one: Contents) -> str:
    space = one["namespace"]
    return str(one["name"]) if space == "default" else f"{space}/{one['name']}"


def _style(state: str) -> str:
    """The colour of a state; the state is written beside it."""
    return {"Running": "green", "Completed": "dim", "Failed": "red"}.get(state, "yellow")


def _or_dash(value: object) -> object:
    return "-" if value is None or value == "" else value


def _seconds(value: float | None) -> str:
    """Seconds that change at each look, so with one digit only."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 60 else span(value)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _job_row(one: Contents, now: float) -> Row:
    cells = (
        *(_name(one), one["state"], _or_dash(one["worldSize"]), _or_dash(one["step"])),
        *(_rate(one["stepsPerSecond"]), one["restarts"], share_text(one["goodput"]["share"])),
        *(_or_dash(one["lastFault"]), age(one["created"], now)),
    )
    return cells, _style(one["state"]), ("jobs", one["namespace"], one["name"])


def _resumed_row(one: Contents, now: float) -> Row:
    cells = (f"{one['kind']} {_name(one)}", one["state"], one["restarts"])
    return (*cells, _or_dash(one["lastFault"]), age(one["created"], now)), "", None


def _is_sound(node: Contents) -> bool:
    return node["status"] == "Ready" and not node["faults"] and node["repair"] is None


def _node_row(node: Contents) -> Row:
    fault = next(iter(node["faults"]), node["repairNow"] or "-")
    cells = (*node_cells(node, is_wide=False), fault)
    return cells, "" if _is_sound(node) else "red", ("nodes", node["name"])


def node_lines(name: str, contents: Contents) -> Iterator[Line]:
    """A node with its faults and repairs."""
    node = next((one for one in contents["nodes"] if one["name"] == name), None)
    if node is None:
        yield Line(f"node {clean(name)} is gone", "red")
        return
    yield Line(f"node {clean(name)}: {node['status']}", "bold")
    for title, text in (
        ("health", node["health"]),
        ("type", f"{node['instanceType']} {node['instanceGroup']}".strip()),
        ("pods", ", ".join(node["jobPods"])),
        ("score", node["scoreText"]),
        ("repair", node["repairNow"]),
        *(("fault", one) for one in node["faults"]),
        *(("earlier", one) for one in node["repairs"]),
    ):
        if text:
            yield Line(f"{title:<8}  {clean(text)}", "red" if title == "fault" else "")


def job_lines(job: Contents, now: float, width: int | None) -> Iterator[Line]:
    """A job with its ranks, incidents, pods and latest events."""
    yield Line(f"job {clean(job['namespace'])}/{clean(job['name'])}: {clean(job['state'])}", "bold")
    yield Line("   ".join(_training(job)))
    yield Line("   ".join(_past(job, now)))
    if job["state"] != "Running" and job["message"]:
        yield from prose(job["message"], width, _style(job["state"]))
    for one in (*job["missing"], *(f"waits: {reason}" for reason in job["waiting"])):
        yield from prose(one, width, "yellow")
    yield Line("")
    yield from rank_lines(job, now, width)
    if job["incidents"]:
        yield Line("")
        hidden = job["incidentCount"] - len(job["incidents"])
        yield Line("incidents, newest first" + (f" ({hidden} older)" if hidden else ""), "bold")
        titles = ("INCIDENT", "AGO", "FAULT", "CULPRIT", "REMEDY", "COST")
        rows = (_incident_row(job, one, now) for one in reversed(job["incidents"]))
        yield from table(titles, rows, width)
    if job["pods"]:
        yield Line("")
        titles = ("POD", "NODE", "PHASE", "AGENT", "RESTARTS", "REASON")
        yield from table(titles, map(_pod_row, job["pods"]), width)
    if job["events"]:
        yield Line("")
        yield Line("latest events", "bold")
    for one in reversed(job["events"]):
        ago = _seconds(max(now - time_seconds(one["time"]), 0.0))
        yield Line(f"{ago} ago  {clean(one['reason'])}: {clean(one['message'])}")


def _training(job: Contents) -> Iterator[str]:
    yield f"step {_or_dash(job['step'])}"
    yield f"{_rate(job['stepsPerSecond'])} steps/s"
    yield f"ranks {_or_dash(job['worldSize'])}"
    yield f"pods ready {job['ready']}/{job['replicas']}"


def _past(job: Contents, now: float) -> Iterator[str]:
    yield f"age {age(job['created'], now)}"
    yield f"restarts {job['restarts']}"
    yield f"goodput {share_text(job['goodput']['share'])}"
    lost = job["goodput"]["lostSeconds"]
    if lost:
        cause = max(lost, key=lambda name: lost[name])
        yield f"lost most to {clean(cause_text(cause))} ({span(lost[cause])})"


def rank_lines(job: Contents, now: float, width: int | None) -> Iterator[Line]:
    """The ranks that differ, a map if there are many ranks, and the other ranks in groups."""
    cells = job["heatMap"]
    if cells is None:
        yield from prose(job["unreached"] or "no rank reports yet", width)
        return
    count, differ = len(cells["reported"]), job["differentCount"]
    yield Line(f"{counted(cells['ranks'], 'rank')}, of which {differ} differ", "bold")
    if count > RANKS_LISTED:
        yield from _map_lines(cells, width)
    shown = {one["rank"] for one in job["different"]}
    rows = [_different_row(one, now) for one in job["different"]]
    size = cells["ranksPerCell"]
    others = [index for index in range(count) if size > 1 or index not in shown]
    others = [index for index in others if cells["reported"][index]]
    # The worst groups first, if not all have a row.
    if len(others) > RANKS_LISTED:
        others.sort(key=lambda index: _mark(cells, index)[0], reverse=True)
    rows += [_cell_row(cells, index) for index in others[:RANKS_LISTED]]
    titles = ("RANK", "STEP", "STEP TIME", "SILENCE", "ALLOWED", "PHASE", "POD, ALARMS")
    yield from table(titles, rows, width)
    if hidden := differ - len(shown):
        yield Line(f"{hidden} more that differ have no row", "yellow")
    if (hidden := len(others) - RANKS_LISTED) > 0:
        yield Line(f"{hidden} other {'groups of ranks' if size > 1 else 'ranks'} have no row")


def _different_row(one: Contents, now: float) -> Row:
    sign, step, allowed = one["lastSign"], one["stepSeconds"], one["allowedSeconds"]
    silence = None if sign is None else max(now - time_seconds(sign), 0.0)
    cells = (
        *(one["rank"], _or_dash(one["step"]), "-" if step is None else span(step)),
        *(_seconds(silence), "learning" if allowed is None else _seconds(allowed)),
        *(one["phase"] or "-", "; ".join((one["pod"], *one["alarms"]))),
    )
    return cells, "red" if one["alarms"] else "yellow", None


def _cell_row(cells: Contents, index: int) -> Row:
    step, silence = cells["stepSeconds"][index], cells["silenceSeconds"][index]
    share = cells["silenceShares"][index]
    first = index * cells["ranksPerCell"]
    last = min(first + cells["ranksPerCell"], cells["ranks"]) - 1
    found = (
        *(first if first == last else f"{first}-{last}", _or_dash(cells["steps"][index])),
        *("-" if step is None else span(step), _seconds(silence)),
        "learning" if not share or silence is None else _seconds(silence / share),
        *(cells["phases"][index] or "-", ""),
    )
    return found, "", None


def _map_lines(cells: Contents, width: int | None) -> Iterator[Line]:
    """One character for each cell of the heat map."""
    columns = min(max((width or MAP_WIDEST) - GAP, 1), MAP_WIDEST)
    marks = "".join(_mark(cells, index)[1] for index in range(len(cells["reported"])))
    size = cells["ranksPerCell"]
    yield Line(f"{MAP_KEY}   (each: {counted(size, 'rank')})", "dim")
    for start in range(0, len(marks), columns):
        yield Line(f"{' ' * GAP}{marks[start : start + columns]}")


def _mark(cells: Contents, index: int) -> tuple[int, str]:
    """How bad the worst rank of a cell is, and its character in the map."""
    if not cells["reported"][index]:
        return -1, " "
    share, behind = cells["silenceShares"][index] or 0.0, cells["behind"][index] or 0
    if cells["alarms"][index]:
        return 4, "!"
    if share > TOO_LATE_SHARE:
        return 3, "O"
    if share > LATE_SHARE:
        return 2, "o"
    return (1, "-") if behind > cells["stepsApart"] else (0, ".")


def _incident_row(job: Contents, one: Contents, now: float) -> Row:
    ago = _seconds(max(now - one["began"], 0.0))
    did = " ".join(filter(None, (one["remedy"], one["outcome"])))
    cells = (one["number"], ago, one["fault"], one["culprit"], did, one["cost"])
    is_over = one["outcome"] == "recovered"
    target = ("jobs", job["namespace"], job["name"], "incidents", str(one["number"]))
    return cells, "" if is_over else "yellow", target


def _pod_row(pod: Contents) -> Row:
    cells = (pod["name"], _or_dash(pod["node"]), pod["phase"], _or_dash(pod["agentState"]))
    return (*cells, pod["restarts"], _or_dash(pod["reason"])), "", None
