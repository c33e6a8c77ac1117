"""One budget for all that the page's server computes: 5 % of the processor's time.

Whoever opens a page gets it at once. All that follows, new contents of open pages and questions to
agents, has its turn in the order in which it came. The next turn begins when what was used is paid:
after COST_FACTOR times the seconds of the processor that it took. So ten viewers of ten pages cost
what one viewer costs, and each page changes less often.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

COST_FACTOR = 20.0
"""Seconds without a turn for each second of the processor that a turn took: 5 % of the time."""
HOLD_SECONDS = 1.0
"""Seconds after which a turn keeps no other one from its own: it may wait for its cluster for half
a minute, and longer if the Kubernetes API puts off the requests of one person."""


@dataclass(slots=True)
class Clock:
    """Clocks of the server, given by its driver."""

    wall: Callable[[], float]
    monotonic: Callable[[], float]
    pause: Callable[[float], Awaitable[None]]
    processor: Callable[[], float]
    """Seconds of the processor that this thread has used. Other programs of the thread that run
    meanwhile are charged, too: where they are busy, pages change less often."""


class Turns:
    """Gives turns, in order."""

    def __init__(self, clock: Clock, cost_factor: float = COST_FACTOR) -> None:
        """`cost_factor`: another one for a process that does nothing else."""
        self._clock = clock
        self._cost_factor = cost_factor
        self._turn = asyncio.Lock()
        self._free_at = float("-inf")
        """Time of the monotonic clock from which the next turn may begin."""
        self._working = 0
        """Pieces of work that run now."""
        self._charged_at = 0.0
        """Time of the processor up to which they are charged: what several use is charged once."""

    @asynccontextmanager
    async def turn(self, latest: float = float("inf")) -> AsyncIterator[None]:
        """Wait for a turn, and charge the block.

        `latest`: time of the monotonic clock from which this turn does not wait for the budget.
        """
        await self._turn.acquire()
        with ExitStack() as held:
            held.callback(self._turn.release)
            while (early := min(self._free_at, latest) - self._clock.monotonic()) > 0:
                await self._clock.pause(early)
            timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, held.close)
            try:
                with self.at_once():
                    yield
            finally:
                timer.cancel()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Charge a block that does not wait for a turn: a person waits for it."""
        self._charge()
        self._working += 1
        try:
            yield
        finally:
            self._charge()
            self._working -= 1

    def _charge(self) -> None:
        now = self._clock.processor()
        if self._working:
            cost = self._cost_factor * (now - self._charged_at)
            self._free_at = max(self._free_at, self._clock.monotonic()) + cost
        self._charged_at = now
