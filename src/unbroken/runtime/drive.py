"""Driver of a machine: its events in their order, and a Tick when its deadline comes.

A task takes events from an `Inbox`. A machine that is called back has an `Alarm` instead.

Both obey one rule: a process that was paused (stopped, starved, suspended) takes all waiting events
before it acts on a deadline. Such a process sees the time pass before it sees the events of the
meantime. So a deadline that is found late is acted on only `GLANCE_SECONDS` later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from unbroken.core.tick import Tick

GLANCE_SECONDS = 0.1
"""Seconds to take waiting events. A process that is later than this counts as paused."""

E = TypeVar("E")
Clock = Callable[[], float]


class _Moment:
    """Decides when to act on a deadline."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = self._glance_until = 0.0

    def begin(self, deadline: float) -> float:
        """Begin to wait for a deadline; return the seconds to wait."""
        now = self._clock()
        # The system's clock may have been set back since.
        self._at = max(deadline, now, min(self._glance_until, now + GLANCE_SECONDS))
        return self._at - now

    def has_come(self) -> bool:
        """True to act, now that the wait is over; False: it ended late, so wait once more."""
        now = self._clock()
        is_late = now > self._at + GLANCE_SECONDS and self._at != self._glance_until
        if is_late:
            self._glance_until = now + GLANCE_SECONDS
        return not is_late


class Inbox(asyncio.Queue[E]):
    """Events of one machine, for the task that drives it: `async for event in inbox`."""

    def __init__(self, deadline: Callable[[], float | None], clock: Clock, most: int = 0) -> None:
        """`deadline`: the machine's.  `most`: events that may wait; 0: any number."""
        super().__init__(most)
        self._deadline = deadline
        self._moment = _Moment(clock)

    def __aiter__(self) -> Inbox[E]:
        return self

    async def __anext__(self) -> E | Tick:
        """Return the next event, or a Tick if the deadline comes first."""
        while self.empty() and (deadline := self._deadline()) is not None:
            try:
                async with asyncio.timeout(self._moment.begin(deadline)):
                    return await self.get()
            except TimeoutError:
                if self._moment.has_come():
                    return Tick()
        return await self.get()


class Alarm:
    """Calls a machine's driver when its deadline comes, in the event loop."""

    def __init__(self, clock: Clock, call: Callable[[], object]) -> None:
        self._call = call
        self._moment = _Moment(clock)
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline: float | None) -> None:
        """Call at this deadline, and no longer at an earlier one; None: never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            loop, seconds = asyncio.get_running_loop(), self._moment.begin(deadline)
            self._timer = loop.call_later(seconds, self._ring, deadline)

    def _ring(self, deadline: float) -> None:
        self._timer = None
        if self._moment.has_come():
            self._call()
        else:
            self.set(deadline)
