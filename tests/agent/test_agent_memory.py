"""Memory of snapshots that is released: not by the thread that answers the operator."""

from __future__ import annotations

import os
import threading
import time

import pytest

from unbroken.agent.snapshots.memory import SMALL_BYTES, SPARE_BYTES, Memory

SIZE = 64 * SMALL_BYTES


def test_a_large_file_is_closed_by_another_thread_and_its_room_is_there_at_once() -> None:
    room = SPARE_BYTES + SIZE
    memory = Memory(lambda: room)
    file = memory.take("large", SIZE)
    os.posix_fallocate(file.fd, 0, SIZE)
    room -= SIZE
    assert memory.room() == 0
    began = time.thread_time()
    memory.give_back(file)
    spent = time.thread_time() - began
    assert memory.room() == SIZE, "the next snapshot need not wait for the kernel"
    end = time.monotonic() + 30
    while memory._closing.bytes:
        assert time.monotonic() < end
        time.sleep(0.001)
    os.posix_fallocate(other := os.memfd_create("closed here"), 0, SIZE)
    began = time.thread_time()
    os.close(other)
    assert spent < time.thread_time() - began
    assert "closing" in {thread.name for thread in threading.enumerate()}


def test_small_files_are_closed_at_once() -> None:
    memory = Memory(lambda: SPARE_BYTES + SIZE)
    file = memory.take("small", SMALL_BYTES)
    memory.give_back(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)
