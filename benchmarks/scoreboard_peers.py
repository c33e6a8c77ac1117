"""Rows of an earlier page, so that what they tell need not be run again.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scoreboard_outcome import BUSY, QUIET
from scoreboard_trials import BY_NAME, WELL

_SECTION = re.compile(r"^## .*?(?:\(`(?P<fault>[\w-]+)`\))?$")
_COMMAND = re.compile(r"^    \S*python (?P<words>benchmarks/scoreboard\.py .*)$")
HEADS = ("launcher", "hang")
"""First words of the heads of tables."""
NOTHING = "## Nothing is wrong"
"""Beginning of the headings of healthy runs."""
HEADINGS = {f"{NOTHING}: {BY_NAME[name].what.partition(': ')[2]}": name for name in WELL}
"""The fault of each of them."""
SUMMARY = "## All faults together"
"""Heading of the summaries, which end before the healthy runs."""
_LOAD = re.compile(r"^(\| [^|]+ \| [^|]+ \|) (\d+) \|")
"""What older pages have instead of the machine: busy processes beside the trials."""


@dataclass(frozen=True, slots=True)
class Peers:
    """What an earlier page says."""

    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of each fault's table, by the fault."""
    notes: Sequence[str] = ()
    """How each was set."""
    commands: Sequence[str] = ()
    summaries: str = ""
    """Tables of all faults and hangs, for a page on which no hang was run again."""

    def left(self, fault: str, mine: Sequence[str]) -> list[str]:
        """Rows of a fault that `mine` do not replace: of another launcher, program or machine."""
        known = {_key(row) for row in mine}
        return [row for row in self.rows.get(fault, ()) if _key(row) not in known]


NO_PEERS = Peers()


def peers(page: str) -> Peers:
    """Read the page."""
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
    """The row with the machine that an older page means by its number of busy processes."""
    return _LOAD.sub(lambda found: f"{found[1]} {BUSY if int(found[2]) else QUIET} |", line)
