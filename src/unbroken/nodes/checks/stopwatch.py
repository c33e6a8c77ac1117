"""Time that a piece of work takes, without that for which no processor was free."""

from __future__ import annotations

from pathlib import Path

from unbroken.kube.clock import monotonic

SCHEDSTAT = "/proc/thread-self/schedstat"
THREADS = Path("/proc/self/task")
LEAST_SECONDS = 1e-6


def queued_seconds() -> float:
    """Return the seconds that this thread has waited for a processor; 0 where they are unknown.

    (Linux, Documentation/scheduler/sched-stats.rst: the second number, in nanoseconds.)
    """
    return _queued(SCHEDSTAT)


def queued_threads() -> dict[str, float]:
    """Return `queued_seconds` of each thread of this process, by its id."""
    return {task.name: _queued(task / "schedstat") for task in THREADS.iterdir()}


def _queued(schedstat: Path | str) -> float:
    try:
        with open(schedstat, encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Stopwatch:
    """Runs from its making: on a busy machine, what is slow must not be the queue before it."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._queued = queued_seconds()

    def seconds(self) -> float:
        """Since the making, above 0."""
        queued = queued_seconds() - self._queued
        return max(LEAST_SECONDS, monotonic() - self._began - queued)
