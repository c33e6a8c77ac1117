"""A watchdog with ranks that a test controls; the driver looks when the machine asks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace

from unbroken.core.tick import Tick
from unbroken.core.watchdog.events import (
    Ended,
    PageRead,
    RankStarted,
    Sampled,
    WatchdogEvent,
    Wrote,
)
from unbroken.core.watchdog.machine import Watchdog
from unbroken.spec.job.detectors import DEFAULTS, Detector, Mode
from unbroken.wire.worker import Page

START = 1000.0
GOOD: Mapping[str, float] = {"loss": 2.0}


class Drive:
    """One rank, unless the test steps more itself."""

    def __init__(
        self, modes: Mapping[Detector, Mode] = DEFAULTS, ranks: int = 1, floor: float = 5.0
    ) -> None:
        self.dog = Watchdog(range(ranks), modes, floor)
        self.now = START
        self.page = Page()
        self.cpu = self.io = self.waited = 0.0
        self.cores, self.rate, self.state = 1.0, 0.0, "R"
        self.queued = 0.0
        """Number of processors that the rank waits for."""
        self.looks = 0
        self.raised: list[tuple[str, float]] = []
        """Alarms in order, with the time since the start."""
        self._open: set[str] = set()
        self._writes: list[float] = []
        self._wrote_at = START
        for rank in range(ranks):
            self.give(RankStarted(rank))

    def restart(self) -> None:
        """Start another attempt, with a new worker of the rank."""
        ranks = [view.rank for view in self.dog.views()]
        for rank in ranks:
            self.give(Ended(rank))
        self.dog = Watchdog(range(len(ranks)), DEFAULTS, taught=self.dog.taught())
        self.page, self.cpu, self.io, self.waited = Page(), 0.0, 0.0, 0.0
        self._open, self.raised = set(), []
        self._wrote_at = self.now
        for rank in ranks:
            self.give(RankStarted(rank))

    @property
    def alarms(self) -> set[str]:
        return {alarm.detector for alarm in self.dog.views()[0].alarms}

    @property
    def allowed(self) -> float | None:
        return self.dog.views()[0].allowed_seconds

    def give(self, event: WatchdogEvent) -> None:
        """Give the machine an event, carry out its requests, and note the alarms after them."""
        self._feed(event)
        views = self.dog.views()
        found = {alarm.detector for alarm in views[0].alarms} if views else set[str]()
        self.raised += [(name, self.now - START) for name in sorted(found - self._open)]
        self._open = found

    def wait(self, seconds: float) -> None:
        """Show no sign of progress for a time."""
        end = self.now + seconds
        while (due := self.dog.deadline()) is not None and due <= end:
            self._pass(due)
            self.give(Tick())
            after = self.dog.deadline()
            assert after is None or after > self.now, "a busy loop"
        self._pass(end)

    def freeze(self, seconds: float) -> None:
        """Freeze the whole machine, with the agent."""
        self.now += seconds

    def be(self, cores: float = 0.0, rate: float = 0.0, state: str = "S") -> None:
        """Set the activity that /proc shows."""
        self.cores, self.rate, self.state = cores, rate, state

    def step(self, seconds: float, metrics: Mapping[str, float] = GOOD) -> None:
        """Make one step that takes `seconds`."""
        self.wait(seconds)
        page = self.page
        gap = self.now - page.step_at if page.visit_calls else 0.0
        bad = sum(value != value or abs(value) == float("inf") for value in metrics.values())
        self.page = replace(
            page,
            step=(page.step or 0) + 1,
            calls=page.calls + 1,
            step_at=self.now,
            visit_calls=page.visit_calls + 1,
            longest_gap=max(page.longest_gap, gap),
            metrics=metrics,
            bad_calls=page.bad_calls + bool(bad),
        )

    def steps(self, count: int, seconds: float = 0.5, loss: Collection[float] = (2.0,)) -> None:
        """Make steps, with the losses in turn."""
        values = list(loss)
        for i in range(count):
            self.step(seconds, {"loss": values[i % len(values)]})

    def phase(self, name: str) -> None:
        """Report a phase, as the script does."""
        visit, now = self.page.visit + 1, self.now
        page = replace(self.page, phase=name, visit=visit, phase_at=now, visit_calls=0)
        self.page = replace(page, longest_gap=0.0)

    def save(self) -> None:
        """Report a written checkpoint."""
        self.page = replace(self.page, checkpoint_at=self.now, checkpoint_step=self.page.step)

    def write(self, seconds: float) -> None:
        """Write output after a time."""
        self.wait(seconds)
        self._writes.append(self.now)

    def _pass(self, until: float) -> None:
        seconds, self.now = max(0.0, until - self.now), max(until, self.now)
        self.cpu += self.cores * seconds
        self.io += self.rate * seconds
        self.waited += self.queued * seconds

    def _feed(self, event: WatchdogEvent) -> None:
        for effect in self.dog.step(event, self.now):
            assert effect.ranks
            if 0 in effect.ranks:
                self._look(effect.with_processes)

    def _look(self, is_deep: bool) -> None:
        self.looks += 1
        self._feed(PageRead(0, self.page))
        if self._writes:
            times = [self._wrote_at, *self._writes]
            gap = max(after - before for before, after in itertools.pairwise(times))
            self._feed(Wrote(0, self._writes[-1], gap, len(self._writes)))
            self._wrote_at = self._writes.pop()
            self._writes.clear()
        if is_deep:
            self._feed(Sampled(0, self.state, self.cpu, int(self.io), self.waited))
