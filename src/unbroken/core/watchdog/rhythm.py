"""Usual silence of a rank, learned from the gaps between its signs of life.

An unseen kind of pause (the first evaluation, a stall of storage) cannot be distinguished from a
hang by time alone. So the allowed silence is never shorter than a multiple of the longest gap seen,
however rare that gap was. Few gaps make the multiple larger, and a short history raises the least
allowed silence. A silence that was taken for a hang and was none is remembered with a margin.

A late rank has limits of its own: when a look at all ranks is due, and when it may act. Lateness is
no alarm. It begins much earlier than a silence that is judged by time alone, since what the look
shows decides (`core.job.watch.looks`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from unbroken.core.patience import (
    CAUTION_SECONDS,
    FEW_GAPS,
    FEW_VISITS,
    LATE_LINES,
    LATE_PAUSE_SECONDS_MAX,
    LATE_STEPS,
    LATE_STEPS_MIN,
    MISTAKES_MAX,
    NEVER,
    REGULAR_TIMES,
    START_GAPS,
    STEADY,
    STEP_FLOOR_SECONDS,
    Allowed,
    SignLimits,
)
from unbroken.wire.observation import Bound


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

    @property
    def margin(self) -> float:
        """Factor of limits after alarms that were wrong."""
        return 1 + self.mistakes / 2

    def longest_seconds(self, limits: SignLimits) -> float:
        """Gap that counts."""
        if limits.forgets_start and self._is_firm(limits):
            return self._longest_seconds
        return max(self._longest_seconds, self._start_seconds)

    def is_learned(self, limits: SignLimits) -> bool:
        """Enough was seen to judge a silence."""
        if self.visits >= FEW_VISITS:
            return True
        gaps, seconds = limits.learned.gaps, limits.learned.seconds
        if not self.visits and not self.is_main:
            gaps, seconds = max(gaps, _first_visit_gaps(self)), max(seconds, STEADY.seconds)
        longest = self.longest_seconds(limits)
        if limits.forgets_start and self.history_seconds < REGULAR_TIMES * longest:
            return False
        return self.gaps >= gaps and self.history_seconds >= seconds

    def allowed(self, limits: SignLimits, floor_seconds: float = 0.0) -> Allowed | None:
        """None: still learning.  No floor is below `floor_seconds`."""
        if not self.is_learned(limits):
            return None
        few = FEW_GAPS / max(1, self.gaps)
        if self.visits >= FEW_VISITS:
            few = min(few, FEW_VISITS / self.visits)
        own_seconds = self.history_seconds - self._taken_seconds
        known_seconds = own_seconds + min(self._taken_seconds, CAUTION_SECONDS)
        caution = self.margin * (1 + CAUTION_SECONDS / max(1.0, known_seconds))
        usual = self.longest_seconds(limits) * (1 + few) * self.margin
        allowed = limits.silence.allowed(usual, caution, floor_seconds)
        return allowed if self._is_firm(limits) else Allowed(allowed.idle, NEVER, NEVER)

    def _is_firm(self, limits: SignLimits) -> bool:
        return self.gaps >= limits.firm.gaps and self.history_seconds >= limits.firm.seconds


def _first_visit_gaps(rhythm: Rhythm) -> int:
    """Long steps make for a long history, in which few of them are enough."""
    is_long = rhythm.history_seconds >= STEADY.gaps * STEP_FLOOR_SECONDS
    return 0 if is_long else STEADY.gaps


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of a rank's silence."""

    bound: Bound
    look_seconds: float
    act_seconds: float


def by_steps(rhythm: Rhythm, longest: float, steps: int, usual: float | None) -> Patience | None:
    """Return the limits of a rank that reports steps of `usual` seconds; None: too few so far."""
    if steps < LATE_STEPS_MIN or rhythm.gaps < LATE_STEPS.known.gaps or usual is None:
        return None
    longest *= rhythm.margin
    look = min(LATE_STEPS.act.times * longest, LATE_PAUSE_SECONDS_MAX)
    look = max(LATE_STEPS.look.of(usual), look)
    return Patience(Bound.STEPS, look, max(look, LATE_STEPS.act.of(longest)))


def by_output(rhythm: Rhythm, longest: float) -> Patience | None:
    """For a rank that only prints; None: not regularly so far."""
    known = LATE_LINES.known
    is_long = rhythm.history_seconds >= max(known.seconds, REGULAR_TIMES * longest)
    if rhythm.gaps < known.gaps or not is_long:
        return None
    usual = longest * rhythm.margin
    look = LATE_LINES.look.of(usual)
    return Patience(Bound.OUTPUT, look, max(look, LATE_LINES.act.of(usual)))
