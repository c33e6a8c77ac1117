"""The rate at which a snapshot is sent to another node, in virtual time."""

from __future__ import annotations

import asyncio
import os
import socket
from io import FileIO
from pathlib import Path

import pytest

from tests.virtual_time import advance, in_virtual_time
from unbroken.agent.snapshots.replication import BURST_SECONDS, UnsentSave
from unbroken.agent.snapshots.slots import MemoryFile
from unbroken.agent_http.peer import PeerConnection
from unbroken.core.snapshots.replication import Item

SIZE = 8_000_000


async def read(sock: socket.socket) -> int:
    """Read to the end; return the number of bytes."""
    loop, count = asyncio.get_running_loop(), 0
    while data := await loop.sock_recv(sock, 1 << 20):
        count += len(data)
    return count


@pytest.mark.parametrize("rate", [100_000, 1_000_000, 64_000_000])
@pytest.mark.parametrize("stopped_seconds", [0, 60])
@in_virtual_time
async def test_no_more_is_sent_than_the_rate_allows_even_after_a_stop(
    rate: int, stopped_seconds: int, tmp_path: Path
) -> None:
    path = tmp_path / "snapshot"
    with path.open("wb") as file:
        file.truncate(SIZE)
    fd = os.open(path, os.O_RDONLY)
    here, there = socket.socketpair()
    stops = iter([0, stopped_seconds])

    def is_wanted() -> bool:
        advance(next(stops, 0))
        return True

    with here, there, FileIO(fd) as file:
        here.setblocking(False)
        there.setblocking(False)
        part = UnsentSave(Item("training", 0, 0), file, SIZE, b"", copy=MemoryFile(fd, SIZE))
        began = asyncio.get_running_loop().time()
        reading = asyncio.create_task(read(there))
        await part.send(PeerConnection(here, "peer"), rate, is_wanted)
        seconds = asyncio.get_running_loop().time() - began
        here.shutdown(socket.SHUT_WR)
        assert await reading == SIZE
    due = stopped_seconds + SIZE / rate
    assert due - 2 * BURST_SECONDS <= seconds <= due + 0.01
