"""The watchdog of an attempt: it gets the signs of the training workers, and reports its findings.

It is not loaded before workers start, and reads nothing that the watchdog has not requested.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from unbroken.agent.workers.output import WriteTimes
from unbroken.core.agent.events import WatchRead
from unbroken.core.tick import Tick
from unbroken.core.watchdog import events
from unbroken.core.watchdog.events import Taught
from unbroken.core.watchdog.machine import Watchdog
from unbroken.runtime.drive import Alarm
from unbroken.spec.job.detectors import from_command
from unbroken.wire.agent import StartCommand
from unbroken.wire.worker import Page

from . import procfs
from .pages import PageSource

NEWS_SECONDS = 1.0
"""Seconds between two reports in which only steps and similar values are new."""
_WORST_FIRST = "TtDR"


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """Sources of signs of one worker."""

    pid: int
    page: PageSource | None
    rhythm: WriteTimes


class AttemptWatch:
    """Feeds the watchdog; reports alarms and phases at once, and other news at intervals."""

    def __init__(
        self,
        attempt: int,
        watchdog: Watchdog,
        clock: Callable[[], float],
        send: Callable[[WatchRead], None],
    ) -> None:
        self._attempt = attempt
        self._watchdog = watchdog
        self._clock = clock
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, WatchedWorker] = {}
        self._alarm = Alarm(clock, lambda: self._take(Tick()))
        self._news: asyncio.Handle | None = None
        self._reported = (-1, -1)
        """Hits and turns of the watchdog at the last report."""
        self._reported_at = 0.0

    @classmethod
    def make(
        cls,
        command: StartCommand,
        nproc: int,
        clock: Callable[[], float],
        send: Callable[[WatchRead], None],
        before: AttemptWatch | None = None,
    ) -> AttemptWatch:
        """Make the watch for a start; what an earlier attempt's watch has learned about its ranks
        is kept."""
        first = command.rank * nproc
        taught = before.taught() if before is not None else None
        watchdog = Watchdog(
            range(first, first + nproc), from_command(command.detectors), taught=taught
        )
        return cls(command.attempt, watchdog, clock, send)

    def begin(self, workers: Mapping[int, WatchedWorker]) -> None:
        """Note the running workers, by rank."""
        self._watched.update(workers)
        self._take(*map(events.RankStarted, workers))

    def halted(self, rank: int, is_continued: bool) -> None:
        """Note that a signal has stopped the worker, or continued it."""
        if rank in self._watched:
            self._take(events.Continued(rank) if is_continued else events.Halted(rank))

    def end(self, rank: int) -> None:
        """Note the end of the worker; its page is read once more."""
        watched = self._watched.pop(rank, None)
        if watched is not None:
            self._take(*self._signs(rank, watched), events.Ended(rank))

    def taught(self) -> Mapping[int, Taught]:
        """Return the lessons about each rank, for the next attempt."""
        return self._watchdog.taught()

    def close(self) -> None:
        """Stop watching."""
        self._watched.clear()
        if self._news is not None:
            self._news.cancel()
            self._news = None
        self._arm()

    def _take(self, *taken: events.WatchdogEvent) -> None:
        inbox = list(taken)
        for event in inbox:
            for effect in self._watchdog.step(event, self._clock()):
                inbox += self._sample(effect)
        # All workers of a node may end at once: one report has them all.
        if self._news is None:
            self._news = self._loop.call_soon(self._report)

    def _sample(self, wanted: events.Sample) -> list[events.WatchdogEvent]:
        result: list[events.WatchdogEvent] = []
        below = _families() if wanted.with_processes else {}
        for rank in wanted.ranks:
            watched = self._watched.get(rank)
            if watched is not None:
                result += self._signs(rank, watched)
                if wanted.with_processes:
                    result.append(_sampled(rank, watched.pid, below))
        return result

    def _signs(self, rank: int, watched: WatchedWorker) -> list[events.WatchdogEvent]:
        result: list[events.WatchdogEvent] = []
        if watched.page is not None:
            page = watched.page.look()
            if watched.page.is_written:
                result.append(events.PageRead(rank, self._translated(page)))
        written = watched.rhythm.take()
        if written is not None:
            result.append(events.Wrote(rank, *written))
        return result

    def _translated(self, page: Page) -> Page:
        """Return the sample with times of this side's clock; the loop's clock is the workers'."""
        now = self._clock()
        offset = now - self._loop.time()

        def moved(at: float) -> float:
            return min(now, at + offset)

        saved_at, first_at = page.checkpoint_at, page.first_step_at
        return replace(
            page,
            first_step_at=None if first_at is None else moved(first_at),
            step_at=moved(page.step_at) if page.calls else 0.0,
            phase_at=moved(page.phase_at),
            checkpoint_at=None if saved_at is None else moved(saved_at),
        )

    def _report(self) -> None:
        self._news = None
        watchdog, now = self._watchdog, self._clock()
        told = (watchdog.hits, watchdog.turns)
        is_due = not self._watched or now >= self._reported_at + NEWS_SECONDS
        if told[1] != self._reported[1] or (is_due and told != self._reported):
            self._reported, self._reported_at = told, now
            self._send(WatchRead(self._attempt, watchdog.views()))
        self._arm()

    def _arm(self) -> None:
        due = self._watchdog.deadline()
        if self._watchdog.hits != self._reported[0]:
            news = self._reported_at + NEWS_SECONDS
            due = news if due is None else min(due, news)
        self._alarm.set(due if self._watched else None)


def _families() -> dict[int, list[int]]:
    """Return processes by their parent.

    They come from one look at all: a process that trains has a hundred threads, and each may have
    children.
    """
    result: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := procfs.stat(int(name))) is not None:
            result.setdefault(stat.parent, []).append(int(name))
    return result


def _sampled(rank: int, pid: int, below: Mapping[int, list[int]]) -> events.Sampled:
    family = [pid]
    for one in family:
        family += below.get(one, ())
    stats = {one: stat for one in family if (stat := procfs.stat(one)) is not None}
    states = [stat.state for stat in stats.values()]
    return events.Sampled(
        rank,
        next((state for state in _WORST_FIRST if state in states), "S"),
        sum(stat.cpu_seconds for stat in stats.values()),
        # For a process in state D this may wait, like the process itself.
        sum(procfs.io_bytes(one) or 0 for one, stat in stats.items() if stat.state != "D"),
        sum(map(procfs.waited_seconds, stats)),
    )
