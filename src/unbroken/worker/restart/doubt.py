"""Whether the state of this process may be rubbish.

When a collective on a device is aborted, what was enqueued behind it goes on: an optimizer's step
with gradients that never came, and the copies of a snapshot after it.  So an abort is told here
before it begins, and what arrives later is no snapshot of that attempt.
"""

from __future__ import annotations

from unbroken.worker import context

_newest = -1


def begin() -> None:
    """A collective of this attempt is about to be aborted."""
    global _newest
    _newest = max(_newest, context().attempt)


def is_doubted(attempt: int) -> bool:
    """Whether that has happened to an attempt."""
    return attempt <= _newest
