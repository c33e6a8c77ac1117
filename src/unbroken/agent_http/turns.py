"""Turns to connect to agents, of which there are thousands.

Connecting takes a millisecond of the operator's processor. If an operator asked 12,500 agents at
once, each would time out long before its turn, and so would every retry.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

TURNS_MAX = 64
TURN_SECONDS = 0.25
"""Seconds after which a slow connection no longer occupies its turn: agents that are cut off must
not hold up others."""


class Turns:
    """Lets a limited number connect at a time, in the order in which they came."""

    def __init__(self, most: int = TURNS_MAX) -> None:
        self._free = asyncio.Semaphore(most)
        self.random = random.Random()
        """Jitter for all links: one generator takes 2.5 KB."""
        self.links = 0
        """Number of links of the process, connected or not."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one more link during the block."""
        self.links += 1
        try:
            yield
        finally:
            self.links -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block or after `TURN_SECONDS`."""
        await self._free.acquire()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(TURN_SECONDS, end)
        try:
            yield
        finally:
            timer.cancel()
            end()
