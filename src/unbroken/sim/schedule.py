"""Simulated time: one queue of what happens next and one source of chance."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which every world begins."""


class Schedule:
    """Runs actions in order of their time; the seed decides everything that is left to chance."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = EPOCH
        self.probes: Counter[str] = Counter()
        """Situations that the world reached; a simulation that never reaches one proves nothing
        about it."""
        self.events = 0
        self._tell = tell
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    @property
    def is_traced(self) -> bool:
        """Texts for `trace` need only be made if somebody reads them."""
        return self._tell is not None

    def trace(self, who: str, what: object) -> None:
        """Record an event, for a person who replays the seed."""
        if self._tell is not None:
            self._tell(f"{self.now - EPOCH:9.3f} {who:<14} {what}")

    def after(self, seconds: float, action: Callable[..., None], *args: object) -> None:
        """Run `action(*args)` in so many seconds; at one time, in the order of the calls."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, action, args))

    def chance(self, probability: float) -> bool:
        """True that often."""
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        """Any number from the range."""
        return low + (high - low) * self.random.random()

    def run(self, until: float) -> None:
        """Let everything happen that is due up to then."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, action, args = heapq.heappop(queue)
            self.events += 1
            action(*args)
        self.now = max(self.now, until)


RINGS_MAX = 20
"""A machine that wants to be woken so often in one moment goes round in circles."""


class Spinning(AssertionError):
    """Time does not advance."""


class Alarm:
    """Calls back at the time that was set last; set again, the former time is forgotten."""

    def __init__(self, schedule: Schedule, ring: Callable[[], None]) -> None:
        self._schedule = schedule
        self._ring = ring
        self._at: float | None = None
        self._queued_at: float | None = None
        self._rung_at, self._rings = 0.0, 0

    def set(self, at: float | None) -> None:
        """Ring at that time; None: not at all."""
        self._at = at
        if at is not None and (self._queued_at is None or at < self._queued_at):
            self._queued_at = max(at, self._schedule.now)
            self._schedule.after(max(0.0, at - self._schedule.now), self._due, self._queued_at)

    def _due(self, queued_at: float) -> None:
        if queued_at != self._queued_at:
            return  # an earlier ring was asked for meanwhile, and it looked after the rest
        self._queued_at = None
        if self._at is None:
            return
        if self._at <= self._schedule.now:
            self._at = None
            self._count()
            self._ring()
        else:
            self.set(self._at)

    def _count(self) -> None:
        now = self._schedule.now
        self._rings = self._rings + 1 if self._rung_at == now else 0
        self._rung_at = now
        if self._rings > RINGS_MAX:
            raise Spinning("a machine's deadline does not move on")
