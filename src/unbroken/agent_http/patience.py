"""Timeout for an agent's silence, in a process that may itself have been stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from unbroken.runtime.drive import GLANCE_SECONDS


class Patience:
    """Time of the agent's last message, and whether silence counts now."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.received_at = self._loop.time()
        self.is_suspended = False

    def received(self) -> None:
        """Note a message of the agent."""
        self.received_at = self._loop.time()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not count the time of the block as silence."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False
            self.received()


@asynccontextmanager
async def patience_of(seconds: float) -> AsyncIterator[Patience]:
    """Raise TimeoutError in the block after this time without a call of `received`.

    Unlike `asyncio.timeout` it sets no timer for each call, because agents send often. A process
    that was stopped, or starved, sees the time pass before it sees the messages. So a silence
    counts only at the second look in a row, if that look comes in time.
    """
    loop, patience = asyncio.get_running_loop(), Patience()
    glanced_at = patience.received_at
    timer: asyncio.TimerHandle

    def look(due: float) -> None:
        nonlocal timer, glanced_at
        now = loop.time()
        if patience.is_suspended:
            patience.received()
        heard_at = patience.received_at
        is_silent = now >= heard_at + seconds
        if is_silent and heard_at < glanced_at and now < due + GLANCE_SECONDS:
            limit.reschedule(now)
            return
        if is_silent:
            glanced_at = now
        due = now + GLANCE_SECONDS if is_silent else heard_at + seconds
        timer = loop.call_at(due, look, due)

    timer = loop.call_at(patience.received_at + seconds, look, patience.received_at + seconds)
    try:
        async with asyncio.timeout(None) as limit:
            yield patience
    finally:
        timer.cancel()
