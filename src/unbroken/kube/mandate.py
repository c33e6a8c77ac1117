"""Whether this process, which has the lease, may act at this very moment.

A process may stand still between any two instructions, for longer than its lease is good for.  So
nobody is told "you lead" once and for all: each effect asks again, at the edge where it leaves,
and the answer is a comparison of two times.  It needs no request and no task that would have to
run first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .clock import boottime

NEVER = float("-inf")


@dataclass(slots=True)
class Tenure:
    """Until when a lease is certainly ours.  Pure: all times are of one clock, ours."""

    good_seconds: float
    """How long after the sending of a renewal it certainly is; less than others must wait."""
    until: float = NEVER

    def renewed(self, sent: float) -> None:
        """The server has taken a renewal that was sent then.

        The others count from a later moment: when they see it.
        """
        self.until = max(self.until, sent + self.good_seconds)

    def unanswered(self, sent: float) -> None:
        """A server that nobody else can reach either did not answer what was sent then.

        It has given the lease to nobody, provided that the lease was ours at that time.
        """
        if sent < self.until:
            self.until = max(self.until, sent + self.good_seconds)

    def ended(self) -> None:
        """It is another's, or was given back."""
        self.until = NEVER

    def holds(self, now: float) -> bool:
        """True if the lease is certainly ours."""
        return now < self.until


class Mandate:
    """A tenure and its clock: the permit of whoever leads."""

    def __init__(self, good_seconds: float, clock: Callable[[], float] = boottime) -> None:
        self._tenure = Tenure(good_seconds)
        self._clock = clock
        self._news = asyncio.Event()

    def is_given(self) -> bool:
        """True if the lease is certainly ours at this moment."""
        return self._tenure.holds(self._clock())

    async def given(self) -> None:
        """Return once it is; without giving way to other tasks where it is already."""
        while not self.is_given():
            self._news.clear()
            await self._news.wait()

    def renewed(self, sent: float) -> None:
        """As `Tenure.renewed`."""
        self._tenure.renewed(sent)
        self._news.set()

    def unanswered(self, sent: float) -> None:
        """As `Tenure.unanswered`."""
        self._tenure.unanswered(sent)
        self._news.set()

    def ended(self) -> None:
        """As `Tenure.ended`."""
        self._tenure.ended()
