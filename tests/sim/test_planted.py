"""Bugs planted in the real machines: the simulator must find each of them, and nothing else.

A planted bug that survives shows that the worlds, or the rules, are too kind. `planted.txt` has the
bugs, and says how they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.sim.mutations import Change, mutated
from unbroken.sim.simulation import Simulation

SEEDS = 3000
"""Worlds in which a planted bug must show."""
FILE = Path(__file__).with_name("planted.txt")


@dataclass
class Bug:
    """A planted bug."""

    name: str
    seed: int
    """The world that showed it last; it is tried first."""
    changes: list[Change] = field(default_factory=list)


def read(text: str) -> list[Bug]:
    """Return the bugs of the file, whose first paragraphs say how it is written."""
    bugs: list[Bug] = []
    for part in re.split(r"\n\n(?=\[\d)", text)[1:]:
        head, *lines = part.splitlines()
        seed, _, name = head[1:].partition("] ")
        bug, function, before = Bug(name, int(seed)), "", ""
        for line in filter(None, lines):
            sign, rest = line[0], line[2:]
            if sign not in "-+":
                function = line
            elif sign == "-" and before != "-":
                bug.changes.append(Change(function, [rest]))
            else:
                change = bug.changes[-1]
                (change.lines if sign == "-" else change.instead).append(rest)
            before = sign
        bugs.append(bug)
    return bugs


BUGS = read(FILE.read_text())


def first_breach(seeds: Iterable[int]) -> int | None:
    """The first world in which a rule is broken; None: there is none."""
    for seed in seeds:
        try:
            Simulation(seed).run()
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_and_nothing_else(bug: Bug) -> None:
    with mutated(bug.changes):
        seed = first_breach((bug.seed, *range(SEEDS)))
    assert seed is not None, "no world shows it"
    Simulation(seed).run()


def test_a_change_of_lines_that_are_not_there_is_an_error() -> None:
    bugs = read(FILE.read_text().replace("- effects += self._events +", "- effects += self.gone +"))
    (lost,) = (bug for bug in bugs if bug.name == "an incident is not written")
    with pytest.raises(LookupError, match=r"JobState\.flush has these lines 0 times"):
        mutated(lost.changes).__enter__()
