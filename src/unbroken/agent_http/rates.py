"""Limit of one agent's rate: an agent that exceeds it is read more slowly, and no other agent is.

A well-behaved agent reports each change, several of them at a start or a fault. Otherwise it
repeats its report once in `HEARTBEAT_SECONDS` or more rarely.
"""

from __future__ import annotations

MESSAGES_A_SECOND, MESSAGES_BURST = 5.0, 40.0
"""Messages of one agent, sustained and at once.  An agent of 16 workers sends 2 a second, and 8
within a second of a start or a fault."""
BYTES_A_SECOND, BYTES_BURST = 64 * 1024.0, 2 * 1024 * 1024.0
"""Bytes of one agent, sustained and at once.  A report of 16 workers takes 4 to 25 KB."""
WORK_A_SECOND, WORK_BURST = 0.005, 0.05
"""Processor seconds for the messages of one agent, sustained and at once.  A report
takes 0.1 ms, one with the tracebacks of 16 workers 5 ms, one that was made to be slow 50 ms."""
WORK_OF_MESSAGE, WORK_OF_BYTE = 0.001, 1e-6
"""Most processor seconds that a message is charged: a constant, and an amount per byte.

More than that is due to Python's garbage collection rather than the agent: seconds with thousands
of agents.
"""
STREAM_A_SECOND, STREAM_BURST = 0.02, 0.5
"""Processor seconds for the stream of one agent below its messages, sustained and at once.  A
report takes 0.1 ms; 128 KiB of empty fragments, which make no message, take 0.1 s."""
WAIT_SECONDS_MAX = 5.0
"""Seconds, at most, that an agent waits unread; its further debt is dropped."""
HEAVY_BYTES = 16 * 1024
"""Longest message, in bytes, that is read at the same time as others.

Longer messages of a job are read one at a time, and other jobs get their turn between, as one may
take 50 ms.
"""
CONNECTION_MESSAGES = 10.0
"""Messages charged for a connection of an agent that ends it and is connected to again at once."""


class Bucket:
    """Tokens that come back at a rate, kept as the time at which none of them is missing."""

    __slots__ = ("_burst_seconds", "_full_at", "_seconds_each")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._seconds_each, self._burst_seconds = 1.0 / rate, burst / rate
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


class Rate:
    """The rate of one agent, over all of its connections."""

    __slots__ = ("_bytes", "_messages", "_stream", "_work")

    def __init__(self, now: float) -> None:
        self._messages = Bucket(MESSAGES_A_SECOND, MESSAGES_BURST, now)
        self._bytes = Bucket(BYTES_A_SECOND, BYTES_BURST, now)
        self._work = Bucket(WORK_A_SECOND, WORK_BURST, now)
        self._stream = Bucket(STREAM_A_SECOND, STREAM_BURST, now)

    def message(self, size: int, work: float, now: float) -> float:
        """Count a message that took this many seconds to read; return the seconds to wait before
        the next one is read."""
        delay, other = self._messages.wait(1.0, now), self.answer(size, work, now)
        return delay if delay > other else other

    def answer(self, size: int, work: float, now: float) -> float:
        """Count a requested answer; return the seconds to wait before the next request."""
        delay = self._bytes.wait(size, now)
        if not work:
            return delay
        other = self._work.wait(_chargeable(size, work), now)
        return delay if delay > other else other

    def piece(self, size: int, work: float, now: float) -> float:
        """Count a piece of the stream; return the seconds to wait before the next one is read."""
        return self._stream.wait(_chargeable(size, work), now)

    def connection(self, now: float) -> float:
        """Count a connection; return the seconds to wait before it is made."""
        return self._messages.wait(CONNECTION_MESSAGES, now)


def _chargeable(size: int, work: float) -> float:
    most = WORK_OF_MESSAGE + WORK_OF_BYTE * size
    return work if work < most else most
