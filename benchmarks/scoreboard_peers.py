"""Rows of an earlier page, so that what they tell need not be run again.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scoreboard_trials import HEALTHY

_SECTION = re.compile(r"^## .*?(?:\(`(?P<fault>[\w-]+)`\))?$")
_COMMAND = re.compile(r"^    \S*python (?P<words>benchmarks/scoreboard\.py .*)$")
HEADS = ("launcher", "hang")
"""First words of the heads of tables."""
NOTHING = "## Nothing is wrong"
"""Beginning of the heading of healthy runs."""
_LOAD = re.compile(r"^(\| [^|]+ \| [^|]+ \|) (?!\d+ \|)")


@dataclass(frozen=True, slots=True)
class Peers:
    """What an earlier page says."""

    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of each fault's table, by the fault."""
    notes: Sequence[str] = ()
    """How each was set."""
    commands: Sequence[str] = ()

    def left(self, fault: str, mine: Sequence[str]) -> list[str]:
        """Rows of a fault that `mine` do not replace: of another launcher, program or load."""
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
            fault = found["fault"] or (HEALTHY if line.startswith(NOTHING) else "")
        elif line.startswith("| ") and fault and line.split()[1] not in HEADS:
            rows.setdefault(fault, []).append(_with_load(line))
        elif line.startswith("- `"):
            notes.append(line)
    return Peers(rows, notes, commands)


def _key(row: str) -> tuple[str, ...]:
    return tuple(row.split(" | ")[:3])


def _with_load(line: str) -> str:
    """The row with the column of the load, which older pages do not have."""
    return _LOAD.sub(r"\1 0 | ", line)
