"""Calls that may hang in the kernel: the file system of a dead server, the counters of a device."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
CALL_SECONDS = 5.0
"""Seconds that a caller waits (node-exporter's limit for a mount); a scrape may last 10 s."""


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """A call that runs."""

    answer: asyncio.Future[T | None]
    until: float
    """Time of the loop from which it counts as hanging."""


class HangingCalls:
    """Makes each call in a thread of its own, which the end of the program does not wait for."""

    def __init__(self) -> None:
        self._running: dict[str, _Call[Any]] = {}

    async def call(self, name: str, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; None: it failed, or takes longer than CALL_SECONDS.

        Callers of one name share the call that runs, so there is at most one thread a name. While
        it hangs, they get None at once.
        """
        running: _Call[T] = self._running.get(name) or self._started(name, work)
        try:
            async with asyncio.timeout_at(running.until):
                # A caller that is cancelled leaves the answer to the others.
                return await asyncio.shield(running.answer)
        except TimeoutError:
            return None

    def _started(self, name: str, work: Callable[[], T]) -> _Call[T]:
        loop = asyncio.get_running_loop()
        call: _Call[T] = _Call(loop.create_future(), loop.time() + CALL_SECONDS)

        def done(result: T | None) -> None:
            del self._running[name]
            call.answer.set_result(result)

        def run() -> None:
            result = None
            try:
                with contextlib.suppress(OSError):
                    result = work()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(done, result)

        threading.Thread(name=f"call {name}", target=run, daemon=True).start()
        self._running[name] = call
        return call
