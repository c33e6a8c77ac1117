"""Work at several places of one machine at once, a process for each; and the time that a piece of
work takes, without that for which no processor was free.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from unbroken.kube.clock import monotonic

ANSWER_BYTES_MAX = 16 << 20
"""Bytes of one answer as JSON."""
Place = TypeVar("Place")
Found = TypeVar("Found")


def at_each(
    places: Sequence[Place], work: Callable[[Place], Found]
) -> list[tuple[Place, Found | str]]:
    """Results of `work` for each place, as JSON has them (a tuple comes back as a list); a text
    says how its process ended without an answer."""
    context = multiprocessing.get_context("fork")
    started = []
    for place in places:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(work, place, send))
        process.start()
        # Only the process holds it now: when it ends, so does the pipe.
        send.close()
        started.append((place, process, receive))
    result: list[tuple[Place, Found | str]] = []
    for place, process, receive in started:
        try:
            answer: Found | str = json.loads(receive.recv_bytes(ANSWER_BYTES_MAX))
        except EOFError:
            process.join()
            answer = f"its process ended with {process.exitcode}"
        process.join()
        receive.close()
        result.append((place, answer))
    return result


def _run(work: Callable[[Place], Found], place: Place, send: Connection) -> None:
    send.send_bytes(json.dumps(work(place)).encode())
    send.close()


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
