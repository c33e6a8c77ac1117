"""Calls that may hang in the kernel: the file system of a dead server, the counters of a device."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
CALL_SECONDS = 5.0
"""Seconds that a caller waits (node-exporter's limit for a mount); a scrape may last 10 s."""


class HangingCalls:
    """Makes each call in a thread of its own, which the end of the program does not wait for."""

    def __init__(self) -> None:
        self._running: set[str] = set()

    async def call(self, name: str, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; None: it failed, or takes too long.

        While a call hangs, other calls of its name return None at once: at most one thread a name.
        """
        if name in self._running:
            return None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T | None] = loop.create_future()

        def done(result: T | None) -> None:
            self._running.discard(name)
            if not answer.done():
                answer.set_result(result)

        def run() -> None:
            result = None
            try:
                with contextlib.suppress(OSError):
                    result = work()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(done, result)

        self._running.add(name)
        threading.Thread(name=f"call {name}", target=run, daemon=True).start()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await answer
        except TimeoutError:
            return None
