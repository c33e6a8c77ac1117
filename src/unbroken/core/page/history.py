"""The past of a job's training in bounded memory: steps, steps per second, metrics.

When the points are used up, every second one is left out, and from then on the points are twice as
far apart.  So the whole past is kept, and the newest is as coarse as the oldest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unbroken.wire.observation import RankWatch

POINTS_MAX = 600
"""Points of a job; two for each pixel of a narrow chart."""
METRICS_MAX = 4
"""Metrics of a job that are kept."""
NAME_CHARACTERS = 60
RATE_SECONDS = 10.0
"""Seconds over which steps per second are counted: a step may take longer than a sample."""
EARLY_SECONDS = 1.0
"""Seconds that a sample may come early: samples do not come at exact times."""
LOSS = "loss"
"""Metrics with this word in their name come first."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of training."""

    at: float
    """Seconds since the epoch."""
    step: int | None
    """Newest step of any rank."""
    rate: float | None
    """Steps per second; None: not known, as after a restart that repeats steps."""
    metrics: Mapping[str, float]
    """By name, of the lowest rank that reports them; finite numbers only."""


class MetricHistory:
    """The points of one job, oldest first."""

    def __init__(
        self, seconds: float, points: Iterable[Point] = (), names: tuple[str, ...] = ()
    ) -> None:
        """`seconds`: least distance of two points. `points`, `names`: of an earlier program."""
        self.points = list(points)
        self.names = names
        """Names of the metrics that are kept, in the order in which they are shown."""
        self.seconds = seconds
        """Least distance of two points by now."""
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, at: float, watches: Sequence[RankWatch]) -> None:
        """Take what the ranks report now."""
        step = max((one.step for one in watches if one.step is not None), default=None)
        rate = self._rate(at, step)
        metrics = _metrics(watches)
        self._name(metrics)
        if self.points and at - self.points[-1].at < self.seconds - EARLY_SECONDS:
            return
        kept = {name: metrics[name] for name in self.names if name in metrics}
        self.points.append(Point(at, step, rate, kept))
        if len(self.points) > POINTS_MAX:
            del self.points[1::2]
            self.seconds *= 2

    @property
    def rate(self) -> float | None:
        """Steps per second at the newest point."""
        return self.points[-1].rate if self.points else None

    @property
    def step(self) -> int | None:
        """The step at the newest point."""
        return self.points[-1].step if self.points else None

    def _rate(self, at: float, step: int | None) -> float | None:
        recent = self._recent
        if step is None or (recent and (step < recent[-1][1] or at <= recent[-1][0])):
            recent.clear()
        if step is None:
            return None
        recent.append((at, step))
        while len(recent) > 2 and at - recent[1][0] >= RATE_SECONDS:
            recent.popleft()
        began, first = recent[0]
        return (step - first) / (at - began) if at > began else None

    def _name(self, metrics: Iterable[str]) -> None:
        known = dict.fromkeys(self.names) | dict.fromkeys(metrics)
        ordered = sorted(known, key=lambda name: LOSS not in name.lower())
        self.names = tuple(ordered[:METRICS_MAX])


def _metrics(watches: Iterable[RankWatch]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in sorted(watches, key=lambda watch: watch.rank):
        for name, value in one.metrics.items():
            if math.isfinite(value):
                found.setdefault(name[:NAME_CHARACTERS], value)
    return found
