"""Usual silence of a rank, learned from the gaps between its signs of life.

An unseen kind of pause (the first evaluation, a stall of storage) cannot be distinguished from a
hang by time alone. So the allowed silence is never shorter than a multiple of the longest gap seen,
however rare that gap was. Few gaps make the multiple larger, and a short history raises the least
allowed silence. A silence that was taken for a hang and was none is remembered with a margin.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

FACTOR = 4.0
"""Multiple of the longest gap: the bound is never tighter than this."""
FEW_GAPS = 8
"""With so few the factor is doubled, with many it nears FACTOR."""
FEW_VISITS = 3
"""After so many visits of a phase their lengths teach, however few gaps were in them."""
STEADY_GAPS, STEADY_SECONDS = 30, 60.0
"""In its first visit a phase must show this to be no mere pause."""
CAUTION_SECONDS = 120.0
"""With a history of this length floors are doubled."""
MISTAKES_MAX = 6
START_GAPS = 12
REGULAR_FACTOR = 5.0
"""Multiple of its longest gap for which a source other than steps must have given signs, to have a
rhythm."""


class SignSource(Enum):
    """Source of the signs of life: the first that the rank gives."""

    STEP = "step"
    OUTPUT = "output"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Limits for the silence of one source.

    During it the rank is idle, or spins (about whole cores, steadily, nothing read or written), or
    works at something. A rank that seems to work needs a longer silence, and so does a weak
    source."""

    floor_seconds: float
    gaps: int
    """Learned at the earliest with so many of them, in `history_seconds`."""
    history_seconds: float
    firm_gaps: int
    """Needed before silence despite work means anything, in `firm_seconds`; those of the start are
    then forgotten."""
    firm_seconds: float
    spin_factor: float
    spin_floor_seconds: float
    work_factor: float
    work_floor_seconds: float
    forgets_start: bool = False
    """The first gaps are those of the start-up: they count until the rhythm is firm."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Silences in seconds; infinite: never judged."""

    idle: float
    spinning: float
    working: float


STEP_FLOOR_SECONDS = 5.0
_NEVER = float("inf")
LIMITS: Mapping[SignSource, SilenceLimits] = {
    SignSource.STEP: SilenceLimits(STEP_FLOOR_SECONDS, 8, 30, 8, 30, 2, 20, 6, 600),
    SignSource.OUTPUT: SilenceLimits(15, 12, 60, 50, 600, 5, 120, 10, 900, True),
    SignSource.WORK: SilenceLimits(30, 12, 60, 50, 600, _NEVER, _NEVER, _NEVER, _NEVER, True),
}


class Rhythm:
    """The gaps between signs of one source, in one phase of one rank."""

    __slots__ = (
        "_longest_seconds",
        "_start_seconds",
        "_taken_seconds",
        "gaps",
        "history_seconds",
        "is_main",
        "mistakes",
        "visits",
    )

    def __init__(self, is_main: bool = True) -> None:
        self.is_main = is_main
        """The phase that is the rule, to which others are pauses."""
        self.gaps = 0
        self.history_seconds = 0.0
        self._longest_seconds = self._start_seconds = 0.0
        self._taken_seconds = 0.0
        """Seconds of the history that come from attempts before."""
        self.visits = 0
        """Visits of the phase that have ended."""
        self.mistakes = 0

    def taken(self) -> Rhythm:
        """For the next attempt, in which floors are high again at first."""
        rhythm = copy.copy(self)
        rhythm._taken_seconds = self.history_seconds
        return rhythm

    def learn(self, gap_seconds: float, seconds: float | None = None) -> None:
        """The longest gap between signs in some time; `seconds`: this time, if it had several."""
        gap_seconds = max(0.0, gap_seconds)
        self.gaps += 1
        self.history_seconds += gap_seconds if seconds is None else max(gap_seconds, seconds)
        if self.gaps <= START_GAPS:
            self._start_seconds = max(self._start_seconds, gap_seconds)
        else:
            self._longest_seconds = max(self._longest_seconds, gap_seconds)

    def end_visit(self, gap_seconds: float) -> None:
        """The phase was left, so long after its last sign."""
        self.learn(gap_seconds)
        self.visits += 1

    def excuse(self) -> None:
        """Note that a suspected hang was none."""
        self.mistakes = min(MISTAKES_MAX, self.mistakes + 1)

    def longest_seconds(self, limits: SilenceLimits) -> float:
        """Gap that counts."""
        if limits.forgets_start and self._is_firm(limits):
            return self._longest_seconds
        return max(self._longest_seconds, self._start_seconds)

    def is_learned(self, limits: SilenceLimits) -> bool:
        """Enough was seen to judge a silence."""
        if self.visits >= FEW_VISITS:
            return True
        gaps, seconds = limits.gaps, limits.history_seconds
        if not self.visits and not self.is_main:
            gaps, seconds = max(gaps, _first_visit_gaps(self)), max(seconds, STEADY_SECONDS)
        longest = self.longest_seconds(limits)
        if limits.forgets_start and self.history_seconds < REGULAR_FACTOR * longest:
            return False
        return self.gaps >= gaps and self.history_seconds >= seconds

    def allowed(self, limits: SilenceLimits, floor_seconds: float = 0.0) -> Allowed | None:
        """None: still learning.  No floor is below `floor_seconds`."""
        if not self.is_learned(limits):
            return None
        few = FEW_GAPS / max(1, self.gaps)
        if self.visits >= FEW_VISITS:
            few = min(few, FEW_VISITS / self.visits)
        margin = 1 + self.mistakes / 2
        own_seconds = self.history_seconds - self._taken_seconds
        known_seconds = own_seconds + min(self._taken_seconds, CAUTION_SECONDS)
        caution = margin * (1 + CAUTION_SECONDS / max(1.0, known_seconds))
        floor = max(limits.floor_seconds * caution, floor_seconds)
        idle = max(floor, self.longest_seconds(limits) * FACTOR * (1 + few) * margin)
        if not self._is_firm(limits):
            return Allowed(idle, _NEVER, _NEVER)
        return Allowed(
            idle,
            max(limits.spin_floor_seconds * caution, idle * limits.spin_factor),
            max(limits.work_floor_seconds * caution, idle * limits.work_factor),
        )

    def _is_firm(self, limits: SilenceLimits) -> bool:
        return self.gaps >= limits.firm_gaps and self.history_seconds >= limits.firm_seconds


def _first_visit_gaps(rhythm: Rhythm) -> int:
    """Long steps make for a long history, in which few of them are enough."""
    is_long = rhythm.history_seconds >= STEADY_GAPS * STEP_FLOOR_SECONDS
    return 0 if is_long else STEADY_GAPS
