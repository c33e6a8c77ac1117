"""Permission of this process, which has the lease, to act at this very moment.

A process may stop between any two instructions, for longer than its lease is valid. So leadership
is never granted once and for all. Each effect asks again at the moment it leaves, and the answer is
a comparison of two times. It needs no request and no task that would have to run first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .clock import boottime

NEVER = float("-inf")


@dataclass(slots=True)
class Tenure:
    """The time until which a lease is certainly ours. Pure: all times are of one clock of this
    process."""

    good_seconds: float
    """Seconds after the sending of a renewal for which it is certainly valid; less than others must
    wait."""
    until: float = NEVER

    def renewed(self, sent: float) -> None:
        """Note that the server has accepted a renewal that was sent then.

        The others count from a later moment: when they see it.
        """
        self.until = max(self.until, sent + self.good_seconds)

    def unanswered(self, sent: float) -> None:
        """Extend the tenure for a request of this time to a server that answered neither this
        process nor any other.

        The server has given the lease to no other process, provided that the lease was ours at that
        time.
        """
        if sent < self.until:
            self.until = max(self.until, sent + self.good_seconds)

    def ended(self) -> None:
        """Note that the lease is another's, or was given back."""
        self.until = NEVER

    def holds(self, now: float) -> bool:
        """True if the lease is certainly ours."""
        return now < self.until


class Mandate:
    """A tenure and its clock: the permit of the leader."""

    def __init__(self, good_seconds: float, clock: Callable[[], float] = boottime) -> None:
        self._tenure = Tenure(good_seconds)
        self._clock = clock
        self._news = asyncio.Event()

    def is_given(self) -> bool:
        """True if the lease is certainly ours at this moment."""
        return self._tenure.holds(self._clock())

    async def given(self) -> None:
        """Return once it is; without yielding to other tasks if it is already."""
        while not self.is_given():
            self._news.clear()
            await self._news.wait()

    def renewed(self, sent: float) -> None:
        """Note as `Tenure.renewed`."""
        self._tenure.renewed(sent)
        self._news.set()

    def unanswered(self, sent: float) -> None:
        """Note as `Tenure.unanswered`."""
        self._tenure.unanswered(sent)
        self._news.set()

    def ended(self) -> None:
        """Note as `Tenure.ended`."""
        self._tenure.ended()
