"""Record whether an aborted collective may have corrupted the state of this process.

When a collective on a device is aborted, the work queued behind it continues: an optimizer's step
with gradients that never came, and the copies of a snapshot after it. So an abort is recorded here
before it begins, and a copy that completes later is no snapshot of that attempt.
"""

from __future__ import annotations

from unbroken.worker import context

_newest = -1


def begin() -> None:
    """Record that a collective of this attempt is about to be aborted."""
    global _newest
    _newest = max(_newest, context().attempt)


def is_doubted(attempt: int) -> bool:
    """Return whether a collective of an attempt was aborted."""
    return attempt <= _newest
