"""The scoreboard as text: a line for each trial, a table at the end, a Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from scoreboard_outcome import BUSY, BUSY_LOAD, QUIET, Outcome, Row, rows, totals
from scoreboard_peers import HEADINGS, NO_PEERS, Peers
from scoreboard_trials import (
    BY_NAME,
    FAULTS,
    LONG_SECONDS,
    LONG_SEED,
    MORE_SEED,
    PAUSE_SECONDS,
    PAUSED,
    PAUSED_LONG,
    WELL,
)


def line(one: Outcome) -> str:
    """Return an outcome as a line."""
    head = f"{one.launcher:21}{one.program:6}{one.fault:13}seed {one.seed:<3}rank {one.rank:<3}"
    if one.not_run:
        return f"{head}not run: {one.not_run}"
    ending = "survived" if one.survived else one.ending[:60]
    found = f"{seconds(one.detected_seconds)} " + ("acted" if one.acted else "reported")
    blame = "nobody" if one.blamed is None else f"rank {one.blamed}"
    blame = f"the pod of ranks {list(one.blamed_pod)}" if one.blamed_pod else blame
    found = found if one.detected_seconds is not None else "not found"
    if one.fault in WELL:
        return f"{head}{ending}, {one.restarts} restarts; {one.said[:120]}"
    costs = f"stall {seconds(one.stall_seconds)}, {one.lost_steps} steps"
    early = f"; {one.early} before the fault" if one.early else ""
    return f"{head}{ending}; {found}, blames {blame}; {costs}{early}; {one.said[:120]}"


def seconds(value: float | None) -> str:
    """Return seconds as short text."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def share(part: int, whole: int) -> str:
    """Return a fraction as text."""
    return f"{part}/{whole}" if whole else "-"


def percent(value: float | None) -> str:
    """Return a percentage as a whole number."""
    return "-" if value is None else f"{100 * value:.0f} %"


CELLS = ("survived", "found", "after", "at most", "blames right", "named", "stall", "steps lost")


def cells(row: Row) -> list[str]:
    """Return the figures of a row, in the order of CELLS."""
    found = share(row.detected, row.trials)
    if row.detected and row.acted < row.detected:
        found += f" ({row.detected - row.acted} reported only)" if row.acted else " (reported only)"
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
    """Return the table for a terminal."""
    names = f"{'fault':13}{'launcher':22}{'program':8}{'machine':8}"
    lines = [names + "".join(f"{c:>14}" for c in CELLS)]
    for row in found:
        head = f"{row.fault:13}{row.launcher:22}{row.program:8}{row.machine:8}"
        if not row.trials:
            lines.append(f"{head}not run: {'; '.join(row.not_run)}")
        elif row.fault in WELL:
            fine = share(row.survived, row.trials)
            lines.append(f"{head}{fine:>14}  touched {share(row.touched, row.trials)}")
        else:
            lines.append(head + "".join(f"{cell:>14}" for cell in cells(row)))
    for (launcher, program, machine), row in totals(found).items():
        lines.append(
            f"{'all':13}{launcher:22}{program:8}{machine:8}"
            f"survived {share(row.survived, row.trials)}, found "
            f"{share(row.detected, row.trials)}, blame: precision {percent(row.precision)},"
            f" recall {percent(row.recall)}"
        )
    return "\n".join(lines)


def read_outcomes(documents: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Return all trials of several files."""
    return [Outcome(**one) for document in documents for one in document["trials"]]


def markdown(
    documents: Sequence[Mapping[str, Any]], earlier: Peers = NO_PEERS, note: str = ""
) -> str:
    """Return the page. Rows that were not run again come from an earlier page."""
    outcomes = read_outcomes(documents)
    found = rows(outcomes)
    before = ["", "Rows of faults and launchers that were not run again are from:", ""]
    mine = _commands(documents)
    others = [command for command in earlier.commands if command not in mine]
    parts = [mine, *(before if others else []), *others]
    commands = "\n".join(parts)
    head = f"{TITLE}\n{_result(found)}\n{HEAD}" + (f"\n{fill(note, 100)}\n" if note else "")
    has_hangs = any(BY_NAME[row.fault].is_hang for row in found)
    parts = [head, _summary(found), _modes(found, outcomes)]
    if earlier.summaries and not has_hangs:
        parts[1:] = [earlier.summaries]
    parts += [_healthy(name, found, earlier) for name in WELL]
    parts += [_fault(fault.name, found, earlier) for fault in FAULTS if fault.name not in WELL]
    parts.append(_notes(documents, found, earlier))
    parts.append(REPEAT.format(commands=commands))
    return "\n".join(part for part in parts if part)


TITLE = """# What is detected, after how long, and whom it blames
"""


def _result(found: Sequence[Row]) -> str:
    """Return the result of the newest runs in three sentences: hangs, healthy runs, the limits."""
    ours = [row for row in found if row.launcher in MODES]
    hangs = [row for row in ours if BY_NAME[row.fault].is_hang]
    well = [row for row in ours if row.fault in WELL]
    parts = []
    if trials := sum(row.trials for row in hangs):
        parts.append(
            f"{sum(row.detected for row in hangs)} of {trials} injected hangs were found without "
            f"rules or timeouts, and {sum(row.correct for row in hangs)} of the blames were right."
        )
    if trials := sum(row.trials for row in well):
        alarms = sum(row.touched for row in well)
        parts.append(f"Of {trials} healthy runs, {alarms} had a false alarm.")
    return fill(" ".join([*parts, LIMITS]), 100) + "\n"


LIMITS = (
    "The jobs have four ranks on one machine, without GPUs and NCCL; on an overloaded machine "
    "hangs may be missed."
)
HEAD = """\
Every fault is really injected into a job of four ranks (two agents or pods of two); which rank,
which step and which moment is a function of the seed. One judge looks at all launchers from
outside. *survived*: all ranks came to the last step with the right result. *found*: the launcher
said so or did something, and *after* how long (median, and at most); *(reported only)*: it
only said so. *blames right*: the first rank that it named is the one that was broken; *named*: it
named any. *stall*: longest time without a step, of those that survived. *steps lost*: made twice.
"""
REPEAT = """## How to repeat it

A script writes this page, never a hand. These commands made its trials:

{commands}
"""


def _commands(documents: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"    .venv/bin/python {one['command']}    # {len(one['trials'])} trials; {one['machine']}"
        for one in documents
    )


def _summary(found: Sequence[Row]) -> str:
    lines = ["## All faults together", ""]
    names = ("survived", "found", "precision", "recall", "false alarms")
    lines += _heading("launcher", "program", "machine", *names)
    for (launcher, program, machine), row in totals(found).items():
        some = [share(row.survived, row.trials), share(row.detected, row.trials)]
        some += [percent(row.precision), percent(row.recall), share(row.touched, row.trials)]
        lines.append(_line(launcher, program, machine, *some))
    text = "Precision: of the ranks that were blamed, so many rightly. Recall: of all trials. False"
    text += (
        "\nalarms: something was said or done before the fault. Each launcher over the faults that"
    )
    text += " it was given, as the\ntables below have them: compare there. Only of the newest"
    text += " runs."
    return "\n".join([*lines, "", text, ""])


MODES = {"unbroken": "reported", "unbroken-output": "output", "unbroken-silence": "silence"}
"""Signs of progress that the script of each launcher gives."""


def _modes(found: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """Return a row for each hang.

    It has a column for each sign of progress, on a quiet and on a busy machine.
    """
    mine = {
        (row.fault, row.launcher, row.machine): row
        for row in found
        if row.program == "plain" and row.launcher in MODES and BY_NAME[row.fault].is_hang
    }
    columns = sorted({(machine, launcher) for _, launcher, machine in mine}, key=_column)
    if len(columns) < 2:
        return ""
    lines = ["## Hangs by what the script shows: found, named right, after (median)", ""]
    heads = [f"{MODES[launcher]}, {machine}" for machine, launcher in columns]
    lines += _heading("hang", *heads)
    for fault in FAULTS:
        if any(name == fault.name for name, _, _ in mine):
            cells_ = [_short(mine.get((fault.name, who, machine))) for machine, who in columns]
            lines.append(_line(f"`{fault.name}`", *cells_))
    return "\n".join([*lines, "", MODES_TEXT, _loads(outcomes), ""])


MODES_TEXT = """\
reported: the script calls `unbroken.worker.progress` each step; output: it only prints,
a line a second on each rank; silence: neither."""


def _loads(outcomes: Sequence[Outcome]) -> str:
    """Return the load average of the machine during the trials, as list items."""
    lines = []
    for machine, words in ((QUIET, "below"), (BUSY, "at least")):
        loads = [one.load_average for one in outcomes if one.machine == machine]
        known = sorted(load for load in loads if load is not None)
        text = f"{machine}: a load average of {words} {BUSY_LOAD:g} in the minute before the fault"
        if known:
            text += f" (median {statistics.median(known):.1f}, at most {known[-1]:.1f})"
        lines.append(f"- {text}")
    return "\n".join(["", *lines])


def _column(column: tuple[str, str]) -> tuple[bool, int]:
    return column[0] == BUSY, [*MODES].index(column[1])


def _short(row: Row | None) -> str:
    if row is None or not row.trials:
        return "-"
    found, right = share(row.detected, row.trials), share(row.correct, row.trials)
    return f"{found}, {right}, {seconds(row.detect_p50)}"


def _healthy(name: str, found: Sequence[Row], earlier: Peers) -> str:
    mine = [row for row in found if row.fault == name]
    if not mine and not earlier.rows.get(name):
        return ""
    lines = [next(heading for heading, fault in HEADINGS.items() if fault == name), ""]
    lines += _heading("launcher", "program", "machine", "came to its end", "false alarms")
    for row in mine:
        fine, touched = share(row.survived, row.trials), share(row.touched, row.trials)
        lines.append(_line(row.launcher, row.program, row.machine, fine, touched))
    others = earlier.left(name, lines)
    text = [TEXTS[name], ""] if name in TEXTS else []
    return "\n".join([*lines, *others, "", *text])


PAUSE_TEXT = """The pause comes after 45 to 55 s of steps and lasts {:g} to {:g} s: an evaluation
of all ranks, a checkpoint that rank 0 writes to slow storage, a compiler that rank 0 waits for, a
data set that rank 0 prepares. Seeds from {} on have rank 0 ask each second for something that
another program makes, send a checkpoint with a thread, compute in one function, or wait for a
program that copies files. The ranks that have nothing to do wait at a barrier. Nothing is printed.
Of each kind, half of the seeds report a phase where the script calls `unbroken.worker`. Bounds are
the real ones.""".format(*PAUSE_SECONDS, MORE_SEED)
LONG_TEXT = """The same, with pauses of all eight kinds of {:g} to {:g} s (seeds of `paused` from {}
on).""".format(*LONG_SECONDS, LONG_SEED)
TEXTS = {PAUSED: PAUSE_TEXT, PAUSED_LONG: LONG_TEXT}


def _fault(name: str, found: Sequence[Row], earlier: Peers) -> str:
    mine = [row for row in found if row.fault == name]
    if not mine and not earlier.rows.get(name):
        return ""
    lines = [f"## {BY_NAME[name].what[0].upper()}{BY_NAME[name].what[1:]} (`{name}`)", ""]
    lines += _heading("launcher", "program", "machine", *CELLS)
    for row in mine:
        if row.trials:
            lines.append(_line(row.launcher, row.program, row.machine, *cells(row)))
        else:
            why = f"not run: {'; '.join(row.not_run)}"
            empty = [""] * (len(CELLS) - 1)
            lines.append(_line(row.launcher, row.program, row.machine, why, *empty))
    others = earlier.left(name, lines)
    return "\n".join([*lines, *others, ""])


def _notes(documents: Sequence[Mapping[str, Any]], found: Sequence[Row], earlier: Peers) -> str:
    lines = ["## How each was set", ""]
    names = dict.fromkeys(row.launcher for row in found)
    settings = {key: text for one in documents for key, text in one["settings"].items()}
    lines += [f"- `{name}`: {settings[name]}." for name in names]
    lines += [note for note in earlier.notes if note[3:].partition("`")[0] not in names]
    skipped = {key: text for one in documents for key, text in one["skipped"].items()}
    known = "\n".join(lines)
    more = [f"- `{name}`: not run: {why}." for name, why in skipped.items()]
    lines += [line for line in more if line not in known]
    bounds = " or ".join(
        f"{bound:g}" for bound in sorted({one["bound_seconds"] for one in documents})
    )
    lines.append(f"- A job that makes no step for {bounds} s is given up. `plain`: workers without")
    lines[-1] += " torch that speak over sockets and wait as gloo does; `torch`: DDP on gloo."
    return "\n".join([*lines, ""])


def _heading(*names: str) -> list[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*found: str) -> str:
    return "| " + " | ".join(found) + " |"
