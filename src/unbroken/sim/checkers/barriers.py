"""Rules for workers that keep their process over attempts."""

from __future__ import annotations

from collections.abc import Callable

from unbroken.core.job.events import PodUid
from unbroken.sim.actors.training import Worker
from unbroken.sim.schedule import Schedule
from unbroken.wire.agent import IN_PROCESS_RESTART, StopCommand


class Barriers:
    """Watches processes, and the stops that let them live."""

    def __init__(self, schedule: Schedule, require: Callable[..., None]) -> None:
        self._schedule = schedule
        self._require = require
        self.may_keep = True
        """The job's user allows it."""
        self._processes: dict[int, Worker] = {}
        """By pid; in its newest attempt."""
        self._progressed: set[tuple[int, int]] = set()
        """Epochs and attempts that have had something to show."""
        self._last: tuple[int, int] | None = None
        """Epoch and attempt of the newest stop that let processes live."""
        self._ended: dict[PodUid, int] = {}
        """The newest attempt of which no process was to be kept."""

    def progressed(self, epoch: int, attempt: int) -> None:
        """The attempt has something to show."""
        self._progressed.add((epoch, attempt))

    def worker_started(self, worker: Worker) -> None:
        """Check that a process from before continues from the barrier, where it was, and may."""
        before = self._processes.get(worker.pid)
        self._processes[worker.pid] = worker
        if before is None:
            return
        require = self._require
        require(before.is_at_barrier, "a worker goes on that was not at the barrier", worker)
        require(before.attempt < worker.attempt, "a worker goes on in the same attempt", worker)
        require(before.rank == worker.rank, "a process changes its rank", before, worker)
        must_end = before.attempt <= self._ended.get(worker.pod, -1) < worker.attempt
        require(not must_end, "a worker lives on that was to end", before, worker)

    def stop_ordered(self, pod: PodUid, command: StopCommand, epoch: int) -> None:
        """Check that no process is kept twice without progress in between."""
        attempt, probes = command.attempt or 0, self._schedule.probes
        if command.restart_mode != IN_PROCESS_RESTART:
            if self._last == (epoch, attempt):
                probes["harder"] += 1
            self._ended[pod] = max(attempt, self._ended.get(pod, -1))
            return
        self._require(self.may_keep, "processes live on against the user's will", command)
        last, self._last = self._last, (epoch, attempt)
        if last is not None and last[0] == epoch and last[1] < attempt:
            between = {(epoch, number) for number in range(last[1] + 1, attempt + 1)}
            is_right = not between.isdisjoint(self._progressed)
            self._require(is_right, "processes live on again without progress", command)
            probes["kept_again"] += 1

    def operator_crashed(self) -> None:
        """Forget decisions that were not written."""
        self._last = None
        self._ended.clear()
