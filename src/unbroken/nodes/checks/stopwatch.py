"""Time that a piece of work takes, without that for which no processor was free."""

from __future__ import annotations

from unbroken.kube.clock import monotonic

SCHEDSTAT = "/proc/thread-self/schedstat"
LEAST_SECONDS = 1e-6


def queued_seconds() -> float:
    """Return the seconds that this thread has waited for a processor; 0 where they are unknown.

    (Linux, Documentation/scheduler/sched-stats.rst: the second number, in nanoseconds.)
    """
    try:
        with open(SCHEDSTAT, encoding="ascii") as file:
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
