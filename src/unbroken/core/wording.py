"""Wording of texts for people: counts, plurals."""

from __future__ import annotations

import re

_VERBS = re.compile(r"^(\w+)s\b(?: or (\w+)s\b)?")
_IRREGULAR = {"is": "are", "has": "have"}


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 agent`, `2 agents`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def all_of(number: int, noun: str) -> str:
    """Return all of a number of things: `the only agent`, `all 2 agents`."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun)}"


def size_text(number: float) -> str:
    """Return a number of bytes with three digits at most: `12.3 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.6g} TB"


def plural(said: str) -> str:
    """Return the plural of a sentence about one thing: `waits in all_reduce` becomes `wait in
    all_reduce`."""
    first, space, rest = said.partition(" ")
    if first in _IRREGULAR:
        return f"{_IRREGULAR[first]}{space}{rest}"
    return _VERBS.sub(lambda match: " or ".join(group for group in match.groups() if group), said)
