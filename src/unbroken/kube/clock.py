"""Clocks, and time as Kubernetes writes it.

This is the only module of the package that reads a clock or waits for one; everything else takes
the time as an argument or a function.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime


def wall() -> float:
    """Return seconds since the epoch: for display and for objects."""
    return time.time()


def monotonic() -> float:
    """Return seconds of a clock that never jumps: for deadlines and durations."""
    return time.monotonic()


def processor() -> float:
    """Return seconds of the processor that this thread has used: for what others cost it."""
    return time.thread_time()


def boottime() -> float:
    """Return seconds since boot, suspensions included: for times that others measure too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since the epoch that runs evenly, whatever is done to the system's
    clock."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def entropy() -> random.Random:
    """Return a source of jitter, seeded by the system."""
    return random.Random()


async def pause(seconds: float) -> None:
    """Wait for `seconds`, for a back-off or a heartbeat; at least one turn of the loop."""
    await asyncio.sleep(max(0.0, seconds))


def rfc3339(seconds: float) -> str:
    """Return `metav1.Time`: whole seconds in UTC, 2006-01-02T15:04:05Z."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time(seconds: float) -> str:
    """Return `metav1.MicroTime`: six digits after the point, which its parser requires."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Return seconds since the epoch of a `Time` or a `MicroTime`. Raises ValueError for anything
    else."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"no time zone in {text!r}")
    return moment.timestamp()
