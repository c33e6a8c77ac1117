"""The scoreboard as text: a line while it goes, a table at the end, a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scoreboard_outcome import Outcome, Row, rows, totals
from scoreboard_trials import BY_NAME, HEALTHY


def line(one: Outcome) -> str:
    """An outcome in a line."""
    head = f"{one.launcher:21}{one.program:6}{one.fault:11}seed {one.seed:<3}rank {one.rank:<3}"
    if one.not_run:
        return f"{head}not run: {one.not_run}"
    ending = "survived" if one.survived else one.ending[:60]
    found = f"{seconds(one.detected_seconds)} " + ("acted" if one.acted else "told")
    blame = "nobody" if one.blamed is None else f"rank {one.blamed}"
    found = found if one.detected_seconds is not None else "not found"
    if one.fault == HEALTHY:
        return f"{head}{ending}, {one.restarts} restarts; {one.said[:120]}"
    costs = f"stall {seconds(one.stall_seconds)}, {one.lost_steps} steps"
    early = f"; {one.early} before the fault" if one.early else ""
    return f"{head}{ending}; {found}, blames {blame}; {costs}{early}; {one.said[:120]}"


def seconds(value: float | None) -> str:
    """Short."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def share(part: int, whole: int) -> str:
    """As a fraction."""
    return f"{part}/{whole}" if whole else "-"


def percent(value: float | None) -> str:
    """As a whole number."""
    return "-" if value is None else f"{100 * value:.0f} %"


CELLS = ("survived", "found", "after", "at most", "blames right", "named", "stall", "steps lost")


def cells(row: Row) -> list[str]:
    """The figures of a row, as CELLS names them."""
    found = share(row.detected, row.trials)
    if row.detected and row.acted < row.detected:
        found += f" ({row.detected - row.acted} told)" if row.acted else " (told)"
    lost = "-" if row.lost_p50 is None else f"{row.lost_p50:g}"
    return [
        share(row.survived, row.trials),
        found,
        seconds(row.detect_p50),
        seconds(row.detect_max),
        share(row.correct, row.trials),
        share(row.blamed, row.trials),
        seconds(row.stall_p50),
        lost,
    ]


def table(found: Sequence[Row]) -> str:
    """For a terminal."""
    lines = [f"{'fault':11}{'launcher':22}{'program':8}" + "".join(f"{c:>14}" for c in CELLS)]
    for row in found:
        head = f"{row.fault:11}{row.launcher:22}{row.program:8}"
        if not row.trials:
            lines.append(f"{head}not run: {'; '.join(row.not_run)}")
        elif row.fault == HEALTHY:
            fine = share(row.survived, row.trials)
            lines.append(f"{head}{fine:>14}  touched {share(row.touched, row.trials)}")
        else:
            lines.append(head + "".join(f"{cell:>14}" for cell in cells(row)))
    for (launcher, program), row in totals(found).items():
        lines.append(
            f"{'all':11}{launcher:22}{program:8}survived {share(row.survived, row.trials)}, found"
            f" {share(row.detected, row.trials)}, blame: precision {percent(row.precision)},"
            f" recall {percent(row.recall)}"
        )
    return "\n".join(lines)


def read_outcomes(documents: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """All trials of several files."""
    return [Outcome(**one) for document in documents for one in document["trials"]]


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    found = rows(read_outcomes(documents))
    parts = [HEAD.format(commands=_commands(documents)), _summary(found), _healthy(found)]
    parts += [_fault(name, found) for name in BY_NAME if name != HEALTHY]
    parts.append(_notes(documents, found))
    return "\n".join(part for part in parts if part)


HEAD = """# What is detected, after how long, and whom it blames

Written by a script, never by hand; this repeats it:

{commands}

Every fault is really injected into a job of four ranks (two agents or pods of two); which rank,
which step and which moment is a function of the seed. One judge looks at all launchers from
outside. *survived*: all ranks came to the last step with the right result. *found*: the launcher
said so or did something, and *after* how long (median, and at most); *(told)*: it only said so.
*blames right*: the first rank that it named is the one that was broken; *named*: it named any.
*stall*: longest time without a step, of those that survived. *steps lost*: made twice.
"""


def _commands(documents: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"    .venv/bin/python {one['command']}    # {len(one['trials'])} trials; {one['machine']}"
        for one in documents
    )


def _summary(found: Sequence[Row]) -> str:
    lines = ["## All faults together", ""]
    names = ("survived", "found", "precision", "recall", "false alarms")
    lines += _heading("launcher", "program", *names)
    for (launcher, program), row in totals(found).items():
        some = [share(row.survived, row.trials), share(row.detected, row.trials)]
        some += [percent(row.precision), percent(row.recall), share(row.touched, row.trials)]
        lines.append(_line(launcher, program, *some))
    text = "Precision: of the ranks that were blamed, so many rightly. Recall: of all trials. False"
    text += (
        "\nalarms: something was said or done before the fault. Each launcher over the faults that"
    )
    text += " it was given, as the\ntables below have them: compare there."
    return "\n".join([*lines, "", text, ""])


def _healthy(found: Sequence[Row]) -> str:
    mine = [row for row in found if row.fault == HEALTHY]
    if not mine:
        return ""
    lines = [f"## Nothing is wrong: {BY_NAME[HEALTHY].what.partition(': ')[2]}", ""]
    lines += _heading("launcher", "program", "came to its end", "false alarms")
    for row in mine:
        fine, touched = share(row.survived, row.trials), share(row.touched, row.trials)
        lines.append(_line(row.launcher, row.program, fine, touched))
    return "\n".join([*lines, ""])


def _fault(name: str, found: Sequence[Row]) -> str:
    mine = [row for row in found if row.fault == name]
    if not mine:
        return ""
    lines = [f"## {BY_NAME[name].what[0].upper()}{BY_NAME[name].what[1:]} (`{name}`)", ""]
    lines += _heading("launcher", "program", *CELLS)
    for row in mine:
        if row.trials:
            lines.append(_line(row.launcher, row.program, *cells(row)))
        else:
            why = f"not run: {'; '.join(row.not_run)}"
            lines.append(_line(row.launcher, row.program, why, *[""] * (len(CELLS) - 1)))
    return "\n".join([*lines, ""])


def _notes(documents: Sequence[Mapping[str, Any]], found: Sequence[Row]) -> str:
    lines = ["## How each was set", ""]
    names = dict.fromkeys(row.launcher for row in found)
    settings = {key: text for one in documents for key, text in one["settings"].items()}
    lines += [f"- `{name}`: {settings[name]}." for name in names]
    skipped = {key: text for one in documents for key, text in one["skipped"].items()}
    lines += [f"- `{name}`: not run: {why}." for name, why in skipped.items()]
    bound = max(one["bound_seconds"] for one in documents)
    lines.append(
        f"- A job that makes no step for {bound:g} s is given up. `plain`: workers without"
    )
    lines[-1] += " torch that speak over sockets and wait as gloo does; `torch`: DDP on gloo."
    return "\n".join([*lines, ""])


def _heading(*names: str) -> list[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*found: str) -> str:
    return "| " + " | ".join(found) + " |"
