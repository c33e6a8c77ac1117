"""One snapshot on its way to the buddy: from its slot, or copied first, in a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

from unbroken.agent.snapshots.memory import File
from unbroken.agent_http.peer import Peer
from unbroken.core.snapshots.replication import Item
from unbroken.wire.snapshot import HEADERS_BYTES

BURST_SECONDS = 0.25
"""Seconds over which a late transfer may catch up."""
SLICE_BYTES = 1 << 20
COPY_BYTES = 16 * 1024 * 1024


class OvertakenError(Exception):
    """Training has begun to overwrite the snapshot that is being sent, or it is no longer
    needed."""


@dataclass(eq=False)
class Saved:
    """A save, as long as it lies in its slot; `close` when it is no longer needed."""

    item: Item
    file: FileIO
    size: int
    headers: bytes
    """Its headers when it was whole."""

    @property
    def is_intact(self) -> bool:
        """True if it is still that snapshot."""
        return os.pread(self.file.fileno(), HEADERS_BYTES, 0) == self.headers

    def part(self) -> Part:
        """Return the part to be sent."""
        return Part(self.item, FileIO(os.dup(self.file.fileno())), self.size, self.headers)

    def close(self) -> None:
        """Release the slot."""
        self.file.close()


@dataclass(eq=False)
class Part(Saved):
    """A save that waits to be sent."""

    copy: File | None = None
    copying: asyncio.Future[bool] | None = None
    is_held: bool = False
    """The copy is kept by another owner."""

    def begin_copy(self, copy: File) -> None:
        """Start a copy, made by the kernel."""
        self.copy = copy
        ends = os.dup(self.file.fileno()), os.dup(copy.fd)
        loop = asyncio.get_running_loop()
        self.copying = loop.run_in_executor(None, _copied, *ends, self.size, self.headers)

    async def send(self, peer: Peer, rate: int, is_wanted: Callable[[], bool]) -> None:
        """Send all of it, at this number of bytes a second. Raises OvertakenError."""
        loop = asyncio.get_running_loop()
        slice_bytes = max(64 * 1024, min(SLICE_BYTES, rate // 16))
        begin, due = 0, loop.time()
        source = self.file.fileno() if self.copy is None else self.copy.fd
        with FileIO(os.dup(source)) as file:
            while begin < self.size:
                if not is_wanted() or (self.copy is None and not self.is_intact):
                    raise OvertakenError
                count = min(slice_bytes, self.size - begin)
                await peer.send(file, begin, count)
                begin += count
                due = max(due, loop.time() - BURST_SECONDS) + count / rate
                await asyncio.sleep(max(0.0, due - loop.time()))  # noqa: TID251  (the bounded rate)


def _copied(source: int, target: int, size: int, headers: bytes) -> bool:
    """Copy a slot, in a thread, and close both; return False if it was overwritten meanwhile."""
    try:
        os.lseek(target, 0, os.SEEK_SET)
        begin = 0
        while begin < size:
            if os.pread(source, HEADERS_BYTES, 0) != headers:
                return False
            begin += os.sendfile(target, source, begin, min(COPY_BYTES, size - begin))
        return os.pread(source, HEADERS_BYTES, 0) == headers
    finally:
        os.close(source)
        os.close(target)
