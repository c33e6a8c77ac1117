"""Parts of a rank under the watchdog: what it learns in a phase, excused time, a judged silence."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.spec.job.detectors import Detector

from .levels import LossLevel, Pace
from .rhythm import Allowed, Rhythm, SignSource

STARTUP, TRAIN = "startup", "train"
EARLY_SECONDS = 0.1
"""Signs from before the end of an excuse end no gap, but for so much."""


class PhaseRhythm:
    """Knowledge from one phase."""

    def __init__(self, name: str, taught: Rhythm | None = None) -> None:
        self.rhythm = taught or Rhythm(name == TRAIN)
        self.pace = Pace()
        self.loss = LossLevel()


class Excuse:
    """Time that is no part of a gap: the agent was paused, or the worker was stopped."""

    __slots__ = ("_seconds", "_until")

    def __init__(self) -> None:
        self._seconds = self._until = 0.0

    def add(self, seconds: float, until: float) -> None:
        """It ended just now."""
        self._seconds, self._until = self._seconds + seconds, until

    def take(self, at: float) -> float:
        """Length of the gap that the sign at this time has ended; signs from before it end none."""
        if not self._seconds or at < self._until - EARLY_SECONDS:
            return 0.0
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True, slots=True)
class SilenceVerdict:
    """A silence as judged now."""

    source: SignSource
    rhythm: Rhythm
    allowed: Allowed
    since: float
    is_early: bool = False
    """The rank still learns: this is a bound and no rhythm."""

    def limits(
        self, wrote_at: float, work_at: float, calm_at: float
    ) -> tuple[tuple[float, Detector, str], ...]:
        """Return when each kind of silence becomes too long without another sign of life."""
        busy_at = max(self.since, wrote_at)
        what = {SignSource.STEP: "step", SignSource.OUTPUT: "output", SignSource.WORK: "work"}[
            self.source
        ]
        spin_at = max(busy_at, calm_at) + self.allowed.spinning
        return (
            (max(busy_at, work_at) + self.allowed.idle, Detector.SILENT, f"no {what}"),
            (spin_at, Detector.SPINNING, f"no {what}, the processor spins"),
            (self.since + self.allowed.working, Detector.SILENT, f"no {what}, though it works"),
        )
