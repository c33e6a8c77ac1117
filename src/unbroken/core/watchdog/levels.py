"""Levels that a rank keeps, and whether it has left them for good: step time, loss, checkpoints,
finite metrics.

Medians and their deviations: single outliers move neither.  A level is learned before anything is
judged, and is not taught by what is under suspicion.  All memory is of fixed size.

Other parts of a rank are what it learns in a phase, excused time, and a judged silence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from unbroken.core.patience import Allowed, SignSource
from unbroken.spec.job.detectors import Detector
from unbroken.wire.worker import Page

from .rhythm import Rhythm

DEVIATION = 1.4826
"""Median deviation to standard deviation, of normal noise."""
BLOCK_LOOKS, BLOCK_SECONDS = 5, 5.0
"""At least, in one block of which the median counts: a pause in it does not."""
BLOCKS_MIN, BLOCKS_MAX = 12, 48
SLOW_FACTOR, WELL_FACTOR = 1.5, 1.25
SLOW_BLOCKS, SLOW_BLOCKS_SECONDS = 6, 30.0
NEW_LEVEL_SECONDS = 1800.0
"""Seconds after which a changed step time counts as the usual one."""
LOSSES_MIN, LOSSES_MAX = 32, 64
SPIKE_LOOKS, CALM_LOOKS = 5, 3
NEW_LOSS_LOOKS = 600
SCALE_CALLS, SCALE_BAD_CALLS, BAD_CALLS = 30, 12, 3
"""Mixed precision begins with a scale that is too large, and halves it until gradients are
finite."""
CHECKPOINTS_MIN, CHECKPOINT_FACTOR, CHECKPOINT_FLOOR_SECONDS = 3, 3.0, 60.0


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and a robust standard deviation."""
    middle = median(values)
    return middle, DEVIATION * median([abs(value - middle) for value in values])


class Pace:
    """Seconds a step takes, over all visits of a phase."""

    __slots__ = ("_block", "_block_at", "_level", "_well", "newest", "slow", "slow_since", "why")

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=16)
        self._block: list[float] = []
        self._block_at: float | None = None
        self._level: deque[float] = deque(maxlen=BLOCKS_MAX)
        self._well = 0
        self.slow = 0
        """Slow blocks without one between that was not."""
        self.slow_since = 0.0
        self.why = ""

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, by the newest of them."""
        return median(self.newest) if self.newest else None

    def add(self, seconds: float, now: float) -> None:
        """Steps took so long each since the last look."""
        self.newest.append(seconds)
        if self._block_at is None:
            self._block_at = now
        if len(self._block) < 64:
            self._block.append(seconds)
        if len(self._block) >= BLOCK_LOOKS and now - self._block_at >= BLOCK_SECONDS:
            self._judge(median(self._block), self._block_at, now)
            self._block, self._block_at = [], now

    def interrupt(self) -> None:
        """End the block: the next value begins a new one."""
        self._block, self._block_at = [], None

    def is_slow(self, now: float) -> bool:
        """Persistently slower than it was."""
        return self.slow >= SLOW_BLOCKS and now - self.slow_since >= SLOW_BLOCKS_SECONDS

    def _judge(self, seconds: float, since: float, now: float) -> None:
        if len(self._level) < BLOCKS_MIN:
            self._level.append(seconds)
            return
        usual, noise = spread(self._level)
        if seconds >= SLOW_FACTOR * usual and seconds > usual + 6 * noise:
            self.slow_since = self.slow_since if self.slow else since
            self.slow, self._well = self.slow + 1, 0
            self.why = f"{seconds:.3g} s a step, was {usual:.3g} s"
            if now - self.slow_since >= NEW_LEVEL_SECONDS and self.slow > BLOCKS_MAX:
                self._level.clear()
                self.slow = 0
            return
        if self.is_slow(now):
            self._well += seconds < WELL_FACTOR * usual
            self.slow = 0 if self._well >= 2 else self.slow
            return
        self.slow = 0
        self._level.append(seconds)


class LossLevel:
    """The metric `loss`, one value a look."""

    __slots__ = ("_calm", "_level", "high", "since", "why")

    def __init__(self) -> None:
        self._level: deque[float] = deque(maxlen=LOSSES_MAX)
        self._calm = 0
        self.high = 0
        """Values out of range without enough between that were not."""
        self.since = 0.0
        self.why = ""

    @property
    def is_high(self) -> bool:
        """True if enough looks in a row were too high."""
        return self.high >= SPIKE_LOOKS

    def add(self, value: float, at: float) -> None:
        """A finite one."""
        if len(self._level) >= LOSSES_MIN:
            usual, noise = spread(self._level)
            if value > usual + 8 * noise and value > usual + abs(usual):
                self._rise(value, usual, at)
                return
        self._calm += 1
        if not self.is_high or self._calm >= CALM_LOOKS:
            self.high = 0
        self._level.append(value)

    def _rise(self, value: float, usual: float, at: float) -> None:
        self.since = self.since if self.high else at
        self.high, self._calm = self.high + 1, 0
        self.why = f"loss {value:.4g}, was {usual:.4g}"
        if self.high > NEW_LOSS_LOOKS:
            self._level.clear()
            self.high = 0


class Finiteness:
    """Calls in a row whose metrics were no finite numbers."""

    __slots__ = ("bad", "since", "step", "why")

    def __init__(self) -> None:
        self.bad = 0
        self.since = 0.0
        self.step: int | None = None
        """Step of the first of them; None: not known."""
        self.why = ""

    def add(self, old: Page, new: Page) -> None:
        """A look at the page, with calls since the one before."""
        calls, bad = new.calls - old.calls, new.bad_calls - old.bad_calls
        names = [name for name, value in new.metrics.items() if not math.isfinite(value)]
        was = self.bad
        if bad >= calls:
            self.bad += bad
        else:
            # Which of them came last is not known, but for the newest.
            self.bad = 1 if bad and names else 0
        if self.bad:
            if not was:
                self.since, self.step = new.step_at, _first_bad(old, new, bad)
            self.why = f"{', '.join(names) or 'a metric'} not finite"
            self.why += f" in {self.bad} calls in a row" if self.bad > 1 else ""

    def is_bad(self, calls: int) -> bool:
        """True if `calls` so far make it bad; the first ones may be bad for long."""
        return self.bad >= (SCALE_BAD_CALLS if calls <= SCALE_CALLS else BAD_CALLS)


def _first_bad(old: Page, new: Page, bad: int) -> int | None:
    """Return the step of the first of the newest `bad` calls, if each call reported the next
    step."""
    if new.step is None or old.step is None or new.step - old.step != new.calls - old.calls:
        return None
    return new.step - bad + 1


class Checkpoints:
    """Seconds and steps from one checkpoint to the next."""

    __slots__ = ("_at", "_count", "_longest_seconds", "_longest_steps", "_step")

    def __init__(self) -> None:
        self._count = 0
        self._at = 0.0
        self._step: int | None = None
        self._longest_seconds = 0.0
        self._longest_steps = 0

    def add(self, at: float, step: int | None, excused_seconds: float) -> None:
        """One was written."""
        if self._count:
            self._longest_seconds = max(self._longest_seconds, at - self._at - excused_seconds)
            if step is not None and self._step is not None:
                self._longest_steps = max(self._longest_steps, step - self._step)
        self._count, self._at, self._step = self._count + 1, at, step

    @property
    def at(self) -> float:
        """Time of the last checkpoint."""
        return self._at

    def missing(self, now: float, step: int | None) -> str:
        """Why one is missed; empty: it is not.  Time and steps must both be over: where steps have
        become slow, checkpoints have too."""
        if self._count < CHECKPOINTS_MIN:
            return ""
        if now - self._at < max(
            CHECKPOINT_FACTOR * self._longest_seconds, CHECKPOINT_FLOOR_SECONDS
        ):
            return ""
        made = self._step is not None and step is not None and step - self._step
        if made is not False and made < CHECKPOINT_FACTOR * self._longest_steps:
            return ""
        return f"no checkpoint for {now - self._at:.0f} s, was one in {self._longest_seconds:.0f} s"


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
