"""Where the agent's socket for its workers is.

The name is chosen before the agent is forked from its keeper, which so can clean up after an agent
that was killed, and touches nobody else's.
"""

from __future__ import annotations

import contextlib
import os

_OWN = os.urandom(8).hex()
PATH_BYTES_MAX = 107
"""Of an address of a unix socket (unix(7))."""


def path() -> str:
    """Nobody else's, and short enough."""
    import tempfile  # by the keeper only at its end

    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > PATH_BYTES_MAX - 70:
        base = "/tmp"
    return f"{base}/unbroken-{_OWN}"


def remove() -> None:
    """Leave nothing of it, if it is there."""
    directory = path()
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
