"""A pipe that ends workers with their agent even if no process is left to end them.

The agent has the only writing end. Each worker inherits a reading end, open for this purpose alone.
When the writing end goes, however the agent ended, the kernel kills the worker's process group.

Unlike the parent-death signal, it needs no code in the worker before it becomes its program, so
that workers need not be forked. It also ends what the worker has started.
"""

from __future__ import annotations

import fcntl
import os
import signal

_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)  # linux/fcntl.h; Python has it since 3.14


class Lease:
    """Lasts as long as this object's process."""

    def __init__(self) -> None:
        self._source, self._held = os.pipe2(os.O_CLOEXEC)

    def lend(self) -> int:
        """Return a descriptor for one worker to inherit; the caller closes it here after `bind`."""
        # Opened again, because owner and signal belong to the open file.
        return os.open(f"/proc/self/fd/{self._source}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def bind(self, lent: int, group: int) -> None:
        """Let the end of the agent kill the process group, as long as any process of it holds
        `lent`."""
        fcntl.fcntl(lent, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lent, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lent, fcntl.F_SETFL, fcntl.fcntl(lent, fcntl.F_GETFL) | os.O_ASYNC)
