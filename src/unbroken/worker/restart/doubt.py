"""Tell whether an aborted collective may have corrupted the state of this process.

When a collective on a device is aborted, what was enqueued behind it goes on: an optimizer's step
with gradients that never came, and the copies of a snapshot after it.  So an abort is noted here
before it begins, and a copy that is complete later is no snapshot of that attempt.
"""

from __future__ import annotations

from unbroken.worker import context

_newest = -1


def begin() -> None:
    """Note that a collective of this attempt is about to be aborted."""
    global _newest
    _newest = max(_newest, context().attempt)


def is_doubted(attempt: int) -> bool:
    """Tell whether a collective of an attempt was aborted."""
    return attempt <= _newest
