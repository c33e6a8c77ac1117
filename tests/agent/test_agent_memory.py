"""Memory of snapshots that is released: not by the thread that answers the operator."""

from __future__ import annotations

import os
import threading

import pytest

from tests.watching import wait_until
from unbroken.agent.snapshots.slots import SMALL_BYTES, SPARE_BYTES, SnapshotMemory

SIZE = 64 * SMALL_BYTES


def test_a_large_file_is_closed_by_another_thread_and_its_room_is_there_at_once() -> None:
    room = SPARE_BYTES + SIZE
    memory = SnapshotMemory(lambda: room)
    file = memory.take("large", SIZE)
    os.posix_fallocate(file.fd, 0, SIZE)
    room -= SIZE
    assert memory.room() == 0
    memory.give_back(file)
    assert memory.room() == SIZE, "the next snapshot need not wait for the kernel"
    wait_until(lambda: memory._closing.bytes, lambda count: not count)
    assert "closing" in {thread.name for thread in threading.enumerate()}


def test_small_files_are_closed_at_once() -> None:
    memory = SnapshotMemory(lambda: SPARE_BYTES + SIZE)
    file = memory.take("small", SMALL_BYTES)
    memory.give_back(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)
