"""Rows of other launchers out of an earlier page, so that they need not be run again.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scoreboard_trials import HEALTHY

_SECTION = re.compile(r"^## .*?(?:\(`(?P<fault>[\w-]+)`\))?$")
_COMMAND = re.compile(r"^    \S*python (?P<words>benchmarks/scoreboard\.py .*)$")
_OURS = "unbroken"
NOTHING = "## Nothing is wrong"
"""Beginning of the heading of healthy runs."""
_LOAD = re.compile(r"^(\| [^|]+ \| [^|]+ \|) (?!\d+ \|)")


@dataclass(frozen=True, slots=True)
class Peers:
    """What an earlier page says of launchers that are not ours."""

    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of each fault's table, by the fault."""
    notes: Sequence[str] = ()
    """How each was set."""
    commands: Sequence[str] = ()


NO_PEERS = Peers()


def peers(page: str) -> Peers:
    """Read the page."""
    rows: dict[str, list[str]] = {}
    notes: list[str] = []
    commands: list[str] = []
    fault = ""
    for line in page.splitlines():
        if found := _COMMAND.match(line):
            if _is_of_others(found["words"]):
                commands.append(line)
        elif found := _SECTION.match(line):
            fault = found["fault"] or (HEALTHY if line.startswith(NOTHING) else "")
        elif line.startswith("| ") and fault and _is_other(line.split()[1]):
            rows.setdefault(fault, []).append(_with_load(line))
        elif line.startswith("- `") and _is_other(line[3:].partition("`")[0]):
            notes.append(line)
    return Peers(rows, notes, commands)


def _with_load(line: str) -> str:
    """The row with the column of the load, which older pages do not have."""
    return _LOAD.sub(r"\1 0 | ", line)


def _is_of_others(command: str) -> bool:
    named = re.search(r"--launchers[ =](\S+)", command)
    return named is None or any(map(_is_other, named[1].split(",")))


def _is_other(launcher: str) -> bool:
    return not launcher.startswith((_OURS, "launcher", "---", "|"))
