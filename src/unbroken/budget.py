"""Budget of a foreign peer: what it may cost this process.

A peer that exceeds its budget is read later, and no other peer is. A budget may have others above
it, which are charged too: a dashboard of Ray has that of its namespace, and this the total. Times
are seconds of one monotonic clock, and work is seconds of the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from unbroken.errors import PeerError

WAIT_SECONDS_MAX = 5.0
"""Seconds, at most, that a peer waits unread; its further debt is dropped."""


class Flow(NamedTuple):
    """An amount that a peer may spend: sustained, and at once."""

    a_second: float
    at_once: float


UNBOUND = Flow(1e18, 1e18)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a budget."""

    messages: Flow = UNBOUND
    bytes: Flow = UNBOUND
    work: Flow = UNBOUND
    connections: Mapping[Enum, int] = field(default_factory=dict)
    """Connections that are open at the same time, by their use."""
    lines_a_minute: int = 0
    """Lines of this process's log."""


class Bucket:
    """Tokens that come back at a rate, kept as the time at which none of them is missing."""

    __slots__ = ("_burst_seconds", "_full_at", "_seconds_each")

    def __init__(self, flow: Flow, now: float) -> None:
        self._seconds_each, self._burst_seconds = 1.0 / flow.a_second, flow.at_once / flow.a_second
        self._full_at = now

    def wait(self, cost: float, now: float) -> float:
        """Take tokens; return the seconds until none is owed."""
        # Without min and max: this runs several times for each message of each agent.
        full_at = self._full_at
        if full_at < now:
            full_at = now
        full_at += cost * self._seconds_each
        late = full_at - now - self._burst_seconds
        if late > WAIT_SECONDS_MAX:
            full_at -= late - WAIT_SECONDS_MAX
            late = WAIT_SECONDS_MAX
        self._full_at = full_at
        return late if late > 0.0 else 0.0


class Budget:
    """The budget of one peer, or of several together."""

    __slots__ = (
        *("__weakref__", "_above", "_bytes", "_held", "_limits", "_lines", "_messages"),
        *("_minute_at", "_owner", "_work"),
    )

    def __init__(self, owner: str, limits: Limits, now: float, above: Budget | None = None) -> None:
        self._owner, self._limits, self._above = owner, limits, above
        self._messages, self._bytes = Bucket(limits.messages, now), Bucket(limits.bytes, now)
        self._work = Bucket(limits.work, now)
        self._held: dict[Enum, int] | None = None
        """Open connections; None: there was none yet, as with thousands of agents."""
        self._lines, self._minute_at = 0, now

    def _levels(self) -> Iterator[Budget]:
        level: Budget | None = self
        while level is not None:
            yield level
            level = level._above

    def spend(self, size: float, work: float, now: float, messages: float = 1.0) -> float:
        """Charge messages of `size` bytes that took `work`; return the seconds until the next one
        may be read."""
        delay = self._messages.wait(messages, now) if messages else 0.0
        if size and (late := self._bytes.wait(size, now)) > delay:
            delay = late
        if work and (late := self._work.wait(work, now)) > delay:
            delay = late
        if self._above is not None:
            return max(delay, self._above.spend(size, work, now, messages))
        return delay

    def may_log(self, now: float) -> bool:
        """Charge a line of this process's log; False: the line must not be written."""
        for level in self._levels():
            if now >= level._minute_at + 60.0:
                level._minute_at, level._lines = now, 0
        if any(level._lines >= level._limits.lines_a_minute for level in self._levels()):
            return False
        for level in self._levels():
            level._lines += 1
        return True

    def held(self, use: Enum) -> int:
        """Return the number of open connections for a use."""
        return (self._held or {}).get(use, 0)

    @contextmanager
    def connection(self, use: Enum) -> Iterator[None]:
        """Count a connection during the block.  Raises PeerError if there are too many."""
        for level in self._levels():
            if level.held(use) >= level._limits.connections[use]:
                most = f"{level._limits.connections[use]} connections for each {use.value}"
                raise PeerError(f"{level._owner} has {most}, the most that are opened")
        self._count(use, 1)
        try:
            yield
        finally:
            self._count(use, -1)

    def _count(self, use: Enum, more: int) -> None:
        for level in self._levels():
            level._held = {**(level._held or {}), use: level.held(use) + more}
