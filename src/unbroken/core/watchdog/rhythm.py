"""Usual silence of a rank, learned from the gaps between its signs of life.

An unseen kind of pause (the first evaluation, a stall of storage) cannot be distinguished from a
hang by time alone. So the allowed silence is never shorter than a multiple of the longest gap seen,
however rare that gap was. Few gaps make the multiple larger, and a short history raises the least
allowed silence. A silence that was taken for a hang and was none is remembered with a margin.

A late rank has limits of its own: when a look at all ranks is due, and when it may act. Lateness is
no alarm. It begins much earlier than a silence that is judged by time alone, since what the look
shows decides (`core.job.watch.still_ranks`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from unbroken.wire.observation import Bound

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


START_SECONDS = 600.0
"""Silence of a rank that still starts or learns, at most; one that works shows signs."""
START_SPIN_SECONDS = 1800.0
PHASE_SECONDS = 1800.0
"""The same in a reported phase that is new: the first checkpoint may take ten minutes and more."""
STEPS_MIN, GAPS_MIN = 15, 3
"""Steps, and looks with steps in them, from which on the usual step is known."""
STEP_SECONDS, STEP_FACTOR = 2.5, 2.5
"""Late after so many seconds, and so many usual steps."""
PAUSE_FACTOR = 1.25
"""Multiple of the longest gap so far: a certain look acts no earlier."""
PAUSE_SECONDS = 10.0
"""Longer gaps of the past make nobody late later than this."""
LINES_MIN, LINES_SECONDS = 5, 25.0
"""Gaps between lines, in a history of so many seconds, that make output regular."""
LINE_SECONDS, LINE_FACTOR = 10.0, 3.0
LINE_ACT_SECONDS = 15.0
SPIN_SECONDS = 60.0
"""A rank that reports and prints nothing and spins so long is worth a look."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of a rank's silence."""

    bound: Bound
    look_seconds: float
    act_seconds: float


def by_steps(rhythm: Rhythm, longest: float, steps: int, usual: float | None) -> Patience | None:
    """Return the limits of a rank that reports steps of `usual` seconds; None: too few so far."""
    if steps < STEPS_MIN or rhythm.gaps < GAPS_MIN or usual is None:
        return None
    pause = PAUSE_FACTOR * longest * (1 + rhythm.mistakes / 2)
    look = max(STEP_SECONDS, STEP_FACTOR * usual, min(pause, PAUSE_SECONDS))
    return Patience(Bound.STEPS, look, max(look, pause))


def by_output(rhythm: Rhythm, longest: float) -> Patience | None:
    """For a rank that only prints; None: not regularly so far."""
    is_long = rhythm.history_seconds >= max(LINES_SECONDS, REGULAR_FACTOR * longest)
    if rhythm.gaps < LINES_MIN or not is_long:
        return None
    look = max(LINE_SECONDS, LINE_FACTOR * longest * (1 + rhythm.mistakes / 2))
    return Patience(Bound.OUTPUT, look, max(look, LINE_ACT_SECONDS))


class Lateness:
    """Lateness of one rank."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None
        """Last sign of life of a rank that is late; None: it is not."""

    def see(self, patience: Patience | None, sign_at: float, now: float) -> bool:
        """Judge it by its last sign of life; whether that changes anything."""
        before = self.since
        is_late = patience is not None and now - sign_at >= patience.look_seconds
        self.since = sign_at if is_late else None
        return (before is None) != (self.since is None)
