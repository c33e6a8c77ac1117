"""A queue of keys: each is handled once, never twice at a time, again after a failure.

`Backlog` and `retry_after` decide and are pure; `WorkQueue` runs a handler over them.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from random import Random
from typing import Generic, TypeVar

from unbroken.errors import UnbrokenError, WorldError
from unbroken.log_lines import Log

from .backoff import Backoff
from .client import api_errors
from .clock import entropy, monotonic
from .errors import Conflict
from .observed import observed

log = Log(__name__)

K = TypeVar("K", bound=Hashable)

RETRY = Backoff(first=0.05, limit=60.0)
"""Back-off of each key; client-go starts at 5 ms, for servers that are farther from overload."""

WORLD_SECONDS_MAX = 5.0
"""Seconds of the longest delay after errors that name a shorter one.

An API server that was away names 1 s, so every key is handled again within this time after an
outage, however long the outage was.
"""

Handler = Callable[[K], Awaitable[float | None]]
"""Handles one key; returns the seconds until it is to be handled again, or None."""


def retry_after(error: Exception) -> float | None:
    """Return the seconds after which an error needs a retry; None if only the back-off counts.

    Infinity: the key is handled again only when it is added again, as when its object changes. A
    conflict needs a retry at once: the handler decided on an old version of an object.
    """
    match error:
        case Conflict():
            return 0.0
        case WorldError(retry_after_seconds=None):
            return math.inf
        case WorldError(retry_after_seconds=seconds):
            return seconds
        case _:
            return None


class Backlog(Generic[K]):
    """Decides which key is next. Times are seconds of one monotonic clock."""

    def __init__(self, backoff: Backoff, random: Random) -> None:
        self._backoff = backoff
        self._random = random
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        """Keys in `_ready`."""
        self._working: set[K] = set()
        self._dirty: set[K] = set()
        """Keys added while being handled."""
        self._later: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        """Time at which a key of `_later` counts; other entries of it are stale."""
        self._failures: dict[K, int] = {}
        self._order = 0

    def add(self, key: K) -> None:
        """Handle the key as soon as possible; once, however often it is added before that."""
        self._due.pop(key, None)
        if key in self._working:
            self._dirty.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)

    def add_at(self, key: K, time: float) -> None:
        """Handle the key at `time`; the earliest of several counts."""
        if key in self._waiting or self._due.get(key, time + 1.0) <= time:
            return
        self._due[key] = time
        self._order += 1
        heapq.heappush(self._later, (time, self._order, key))

    def take(self, now: float) -> K | None:
        """Return the next key, which the caller must give to `done` or `failed`; None: nothing is
        due."""
        while self._later and self._later[0][0] <= now:
            time, _, key = heapq.heappop(self._later)
            if self._due.get(key) == time:
                self.add(key)
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """Note that the key was handled; earlier failures are forgotten."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: K, now: float, after: float | None = None) -> float:
        """Have the key handled again; return the seconds until then.

        The delay is its back-off, or `after`, the seconds of `retry_after`. Only the first of
        several failures in a row is retried at once: the next ones back off, to
        `WORLD_SECONDS_MAX`.
        """
        if after == math.inf:
            self.done(key)
            return after
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        delay = self._backoff.delay(failures, self._random)
        if after is not None:
            delay = after if failures == 1 else max(after, min(delay, WORLD_SECONDS_MAX))
        self._release(key)
        self.add_at(key, now + delay)
        return delay

    def failures(self, key: K) -> int:
        """Return the number of failures of the key in a row."""
        return self._failures.get(key, 0)

    def deadline(self) -> float | None:
        """Return when `take` may have another key; None: only after an `add`."""
        while self._later and self._due.get(self._later[0][2]) != self._later[0][0]:
            heapq.heappop(self._later)
        return self._later[0][0] if self._later else None

    def __len__(self) -> int:
        return len(self._ready) + len(self._due)

    def _release(self, key: K) -> None:
        self._working.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)


class WorkQueue(Generic[K]):
    """Runs one handler for the added keys; `name` is for the log.

    A key is never handled twice at the same time. A handler that raises is called again at the time
    of its error (`retry_after`).
    """

    def __init__(self, name: str, handler: Handler[K], *, workers: int = 1) -> None:
        self.name = name
        self.handled = self.failed = 0
        """Number of returns of the handler, and of its errors."""
        self._handler = handler
        self._workers = workers
        self._backlog: Backlog[K] = Backlog(RETRY, entropy())
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Return the waiting keys, those that are due later included."""
        return len(self._backlog)

    def add(self, key: K) -> None:
        """Have the key handled soon."""
        self._backlog.add(key)
        self._wake.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Have the key handled `seconds` from now."""
        self._backlog.add_at(key, monotonic() + seconds)
        self._wake.set()

    @observed
    async def run(self) -> None:
        """Handle keys until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workers):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = self._backlog.take(monotonic())
            if key is None:
                await self._wait()
                continue
            again = await self._handle(key)
            if again is not None:
                self.add_after(key, again)
            # Another worker may sleep although this one has just freed a key.
            self._wake.set()

    async def _wait(self) -> None:
        self._wake.clear()
        deadline = self._backlog.deadline()
        loop = asyncio.get_running_loop()
        when = None if deadline is None else loop.time() + deadline - monotonic()
        try:
            async with asyncio.timeout_at(when):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _handle(self, key: K) -> float | None:
        try:
            with api_errors(self.name):
                again = await self._handler(key)
        except UnbrokenError as error:
            delay = self._failed(key, retry_after(error))
            failures = self._backlog.failures(key)
            log.log(
                logging.WARNING if failures == 3 or delay == math.inf else logging.DEBUG,
                "work failed",
                queue=self.name,
                key=key,
                failures=failures,
                retry_seconds=delay,
                error=error,
            )
            return None
        except Exception:
            # A bug with one key must not stop the work on all others.
            delay = self._failed(key)
            log.exception("work failed", queue=self.name, key=key, retry_seconds=delay)
            return None
        self.handled += 1
        self._backlog.done(key)
        return again

    def _failed(self, key: K, after: float | None = None) -> float:
        self.failed += 1
        return self._backlog.failed(key, monotonic(), after)
