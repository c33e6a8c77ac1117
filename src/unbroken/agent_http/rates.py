"""Budget of one agent: an agent that exceeds it is read more slowly, and no other agent is.

A well-behaved agent reports each change, several of them at a start or a fault. Otherwise it
repeats its report once in `HEARTBEAT_SECONDS` or more rarely.
"""

from __future__ import annotations

from unbroken.budget import Flow, Limits

AGENT = Limits(
    # An agent of 16 workers sends 2 a second, and 8 within a second of a start or a fault.
    messages=Flow(5.0, 40.0),
    # A report of 16 workers takes 4 to 25 KB.
    bytes=Flow(64 * 1024.0, 2 * 1024 * 1024.0),
    # A report takes 0.1 ms, one with the tracebacks of 16 workers 5 ms, one that was made to be
    # slow 50 ms.
    work=Flow(0.005, 0.05),
)
"""Limits of all connections of an agent together."""
STREAM = Flow(0.02, 0.5)
"""Work for the stream of one agent below its messages.  A report takes 0.1 ms; 128 KiB of empty
fragments, which make no message, take 0.1 s."""
WORK_OF_MESSAGE, WORK_OF_BYTE = 0.001, 1e-6
"""Most processor seconds that a message is charged: a constant, and an amount per byte.

More than that is due to Python's garbage collection rather than the agent: seconds with thousands
of agents.
"""
HEAVY_BYTES = 16 * 1024
"""Longest message, in bytes, that is read at the same time as others.

Longer messages of a job are read one at a time, and other jobs get their turn between, as one may
take 50 ms.
"""
CONNECTION_MESSAGES = 10.0
"""Messages charged for a connection of an agent that ends it and is connected to again at once."""


def chargeable(size: int, work: float) -> float:
    """Return what an agent is charged for bytes whose reading took this work."""
    most = WORK_OF_MESSAGE + WORK_OF_BYTE * size
    return work if work < most else most
