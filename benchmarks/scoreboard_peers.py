"""Rows of an earlier page, so that trials in it need not run again. No input or output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scoreboard_outcome import BUSY, UNKNOWN
from scoreboard_trials import BY_NAME, WELL

_SECTION = re.compile(r"^## .*?(?:\(`(?P<fault>[\w-]+)`\))?$")
_COMMAND = re.compile(r"^    \S*python (?P<words>benchmarks/scoreboard\.py .*)$")
HEADS = ("launcher", "hang")
"""First words of the heads of tables."""
NOTHING = "## Nothing is wrong"
"""Beginning of the headings of healthy runs."""
HEADINGS = {f"{NOTHING}: {BY_NAME[name].what.partition(': ')[2]}": name for name in WELL}
"""Fault of each heading of a healthy run."""
SUMMARY = "## All faults together"
"""Heading of the summaries, which end before the healthy runs."""
_LOAD = re.compile(r"^(\| [^|]+ \| [^|]+ \|) (\d+) \|")
"""Number of busy processes, which older pages have in place of the machine."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Rows, notes and tables of an earlier page."""

    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of each fault's table, by fault."""
    notes: Sequence[str] = ()
    """Settings of each launcher."""
    commands: Sequence[str] = ()
    summaries: str = ""
    """Tables of all faults and hangs, for a page for which no hang was run again."""

    def left(self, fault: str, mine: Sequence[str]) -> list[str]:
        """Return the rows of a fault whose launcher, program or machine is not in `mine`."""
        known = {_key(row) for row in mine}
        launchers = {key[:2] for key in known}
        replaced = known | {(*launcher, UNKNOWN) for launcher in launchers}
        return [row for row in self.rows.get(fault, ()) if _key(row) not in replaced]


NO_PEERS = Peers()


def peers(page: str) -> Peers:
    """Parse the page."""
    rows: dict[str, list[str]] = {}
    notes: list[str] = []
    commands: list[str] = []
    fault = ""
    for line in page.splitlines():
        if found := _COMMAND.match(line):
            commands.append(line)
        elif found := _SECTION.match(line):
            fault = found["fault"] or ""
            fault = HEADINGS.get(line, fault)
        elif line.startswith("| ") and fault and line.split()[1] not in HEADS:
            rows.setdefault(fault, []).append(_with_machine(line))
        elif line.startswith("- `"):
            notes.append(line)
    _, heading, after = page.partition(SUMMARY)
    summaries = f"{heading}{after.partition(NOTHING)[0]}" if heading else ""
    return Peers(rows, notes, commands, summaries)


def _key(row: str) -> tuple[str, ...]:
    return tuple(row.split(" | ")[:3])


def _with_machine(line: str) -> str:
    """Return the row of an older page with QUIET or BUSY for its number of busy processes."""
    return _LOAD.sub(lambda found: f"{found[1]} {BUSY if int(found[2]) else UNKNOWN} |", line)
