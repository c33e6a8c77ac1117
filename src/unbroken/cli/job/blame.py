"""`unbroken blame`: finds the ranks that kept others waiting, from the files of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from unbroken.cli.options import Form, Output
from unbroken.cli.show import Paper, note, paper
from unbroken.core.diagnosis.flight_analysis import WAITS_MAX, Analysis, Cause, analyse
from unbroken.core.diagnosis.flight_waits import Wait
from unbroken.core.diagnosis.job_logs import judge_logs
from unbroken.core.diagnosis.stacks import CERTAIN, LIKELY, UNSURE, Blame, blame, name_ranks
from unbroken.core.wording import counted
from unbroken.errors import SpecError

from .blame_files import Found, find, read
from .story import COLOURS, group_lines

SHOWN_WAITS = 8
SHOWN_NOTES = 8
SourcedCause = tuple[str, Cause]
"""The kind of files that show a cause, and the cause."""


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Files and folders of one job.",
            show_default=False,
        ),
    ],
    output: Form = Output.TEXT,
) -> None:
    """Find the ranks that kept others waiting, from the files that a job has left.

    Reads flight recorder dumps of torch (pickle or JSON), output of `py-spy dump` (text or
    `--json`) and logs, and judges them together.  It runs no code of the files and needs no
    cluster.

    Example: `unbroken blame /tmp/nccl_trace_rank_*`
    """
    found = Found()
    read(find([str(one) for one in paths], found), found)
    if not (found.dumps or found.stacks or found.log_files):
        raise SpecError(_nothing(found))
    analysis = analyse(found.dumps)
    stacks = blame(tuple(found.stacks.values()), 0.0) if found.stacks else None
    causes = _causes(found, analysis, stacks)
    if output.is_data:
        output.print(_value(found, analysis, stacks, causes))
        return
    for line in _lines(found, analysis, stacks, causes, paper()):
        print(line)
    for path, why in found.refused[:SHOWN_NOTES]:
        note(f"not read: {path}: {why}")
    if len(found.refused) > SHOWN_NOTES:
        note(f"not read: {counted(len(found.refused) - SHOWN_NOTES, 'more file')}; -o json has all")
    for text in found.notes[:SHOWN_NOTES]:
        note(text)


def _nothing(found: Found) -> str:
    if not found.refused:
        return "no flight recorder dump, py-spy dump or log found"
    path, why = found.refused[0]
    more = len(found.refused) - 1
    return f"nothing can be read: {path}: {why}" + (f", and {more} more" if more else "")


def _causes(found: Found, analysis: Analysis, stacks: Blame | None) -> list[SourcedCause]:
    """All causes, the surest first; a failed rank comes before the ranks that waited for it."""
    from_logs = [("log", one) for one in judge_logs(found.logs)]
    errors = [one for one in from_logs if one[1].kind == "error"]
    others = [one for one in from_logs if one[1].kind != "error"]
    others[:0] = [("flight recorder", one) for one in analysis.causes]
    if stacks is not None and stacks.confidence:
        others.append(("stacks", Cause("stacks", stacks.ranks, stacks.confidence, stacks.why)))
    order = (CERTAIN, LIKELY, UNSURE)
    return sorted(errors + others, key=lambda one: order.index(one[1].confidence))


def _culprits(causes: list[SourcedCause]) -> tuple[int, ...]:
    """Ranks of the surest cause and of equally sure causes from the same kind of files."""
    if not causes:
        return ()
    source, first = causes[0]
    alike = (
        one.ranks
        for where, one in causes
        if where == source and one.confidence == first.confidence
        and (one.kind == "error") == (first.kind == "error")
    )  # fmt: skip
    return tuple(sorted({rank for ranks in alike for rank in ranks}))


def _lines(
    found: Found, analysis: Analysis, stacks: Blame | None, causes: list[SourcedCause], page: Paper
) -> Iterator[str]:
    yield _read_line(found, analysis)
    if not causes:
        yield from page.wrap(_healthy(found), 0, "green", first="")
    culprits = _culprits(causes)
    if culprits:
        yield page.paint(f"{causes[0][1].confidence}: {name_ranks(culprits)}", "red")
    elif causes:
        yield page.paint("no culprit found", "yellow")
    for source, one in causes:
        text = f"{one.confidence}, by the {source}: {one.why}"
        yield from page.wrap(text, 4, COLOURS[one.confidence], first="  ")
    if analysis.waits:
        yield "\nwho waits for whom"
        for wait in analysis.waits[:SHOWN_WAITS]:
            yield from page.wrap(_wait_line(wait), 4, first="  ")
        if len(analysis.waits) > SHOWN_WAITS:
            yield f"  and {len(analysis.waits) - SHOWN_WAITS} more; -o json has them"
    if stacks is not None:
        yield from group_lines(stacks.groups, page)


def _read_line(found: Found, analysis: Analysis) -> str:
    parts = []
    if found.dumps:
        text = f"{counted(len(found.dumps), 'flight recorder dump')} ("
        text += f"{name_ranks(analysis.ranks)} by {found.how()}"
        text += f"; none of {name_ranks(analysis.absent)}" if analysis.absent else ""
        text += f"; {counted(len(analysis.groups), 'process group')})"
        parts.append(text)
    if found.stacks:
        parts.append(f"stacks of {name_ranks(sorted(found.stacks))}")
    if found.log_files:
        parts.append(f"{counted(found.log_files, 'log')} of {found.logs.lines} lines")
    return ", ".join(parts)


def _healthy(found: Found) -> str:
    if found.dumps:
        return (
            "no hang in the dumps: every operation that was called has completed, and all ranks "
            "have called as many. A hung rank hangs outside of any collective: look "
            "at stacks (py-spy dump) and at logs"
        )
    return "no error and no timeout of a collective in the logs"


def _wait_line(wait: Wait) -> str:
    does = "waits" if len(wait.waiting) == 1 else "wait"
    text = f"{name_ranks(wait.waiting)} {does} in {wait.name()}"
    if wait.call.where:
        text += f", called by {wait.call.where}"
    if wait.late:
        text += f" for {name_ranks(wait.late)}"
    elif wait.absent:
        text += f" perhaps for {name_ranks(wait.absent)}, without a dump"
    else:
        text += ", which all have called"
    if wait.lasted_seconds is not None and wait.lasted_seconds >= 1:
        text += f"; {wait.lasted_seconds:.0f} s"
    return text


def _value(
    found: Found, analysis: Analysis, stacks: Blame | None, causes: list[SourcedCause]
) -> dict[str, Any]:
    """The whole answer as JSON."""
    return {
        "culprits": list(_culprits(causes)),
        "confidence": causes[0][1].confidence if causes else "",
        "why": causes[0][1].why if causes else "",
        "causes": [
            {
                "by": source, "kind": one.kind, "ranks": list(one.ranks),
                "confidence": one.confidence, "why": one.why,
            }
            for source, one in causes
        ],
        "waits": [_wait_value(one) for one in analysis.waits[:WAITS_MAX]],
        "ranks": {
            "dumps": list(analysis.ranks), "withoutDump": list(analysis.absent),
            "stacks": sorted(found.stacks), "logs": sorted(found.logs.ranks),
            "knownBy": found.how(),
        },
        "groups": [
            {
                "name": one.name, "description": one.description, "ranks": list(one.members),
                "lastCalled": {str(rank): calls.enqueued for rank, calls in one.calls.items()},
            }
            for one in analysis.groups
        ],
        "notRead": [{"file": path, "why": why} for path, why in found.refused],
        "notes": found.notes,
    }  # fmt: skip


def _wait_value(wait: Wait) -> dict[str, Any]:
    return {
        "group": wait.group.name,
        "description": wait.group.description,
        "operation": wait.call.operation,
        "sequence": wait.call.sequence,
        "waiting": list(wait.waiting),
        "notCalled": list(wait.late),
        "withoutDump": list(wait.absent),
        "completed": list(wait.done),
        "seconds": wait.lasted_seconds,
        "calledBy": wait.call.where,
    }
