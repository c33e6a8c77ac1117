"""Memory of slots, which is present before it is written and requested before it is needed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.worker.snapshot_agents import PLENTY, channel
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.errors import WorldError
from unbroken.wire.ipc import SNAPSHOT_OPEN
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.slots import take
from unbroken.worker.snapshot.snapshot import Snapshot

SIZE = 70 * 1024 * 1024 + 100


def test_all_pages_are_taken_and_missing_ones_are_an_error() -> None:
    fd = os.memfd_create("slot")
    os.ftruncate(fd, SIZE)
    memory = mmap.mmap(fd, SIZE)
    take(memory, fd)
    assert os.fstat(fd).st_blocks * 512 >= SIZE
    # Simulate a machine without free pages: a process that writes there would be killed.
    os.ftruncate(fd, mmap.PAGESIZE)
    with pytest.raises(WorldError, match=f"no memory for a snapshot of {SIZE} bytes"):
        take(memory, fd)
    os.close(fd)


class Asked:
    """A channel that remembers which slots were requested."""

    def __init__(self, line: Channel) -> None:
        self._line = line
        self.slots: list[int] = []

    def request(
        self, message: Mapping[str, Any], answer_type: str, **how: Any
    ) -> tuple[Mapping[str, Any], list[int]]:
        """Send the request to the agent."""
        if message["type"] == SNAPSHOT_OPEN:
            self.slots.append(message["slot"])
        return self._line.request(message, answer_type, **how)


def saved(memory: SnapshotSlots, steps: int, grown: int = 0) -> tuple[list[bool], list[int]]:
    """Return what each save returned, and the slots that were requested.

    After the first save the state may grow.
    """
    parts = {"tensor": torch.zeros(1_000_000)}
    with channel(memory) as line:
        asked = Asked(line)
        snapshot = Snapshot(extra=lambda: parts["tensor"], channel=asked)
        kept = []
        for step in range(steps):
            kept.append(snapshot.save(step))
            ahead = snapshot._slots._ahead.get(1)  # type: ignore[attr-defined]
            if ahead is not None:
                ahead.found()
            if step == 0 and grown:
                parts["tensor"] = torch.zeros(grown)
        snapshot.close()
    memory.close()
    return kept, asked.slots


def test_the_second_slot_is_taken_while_training_goes_on() -> None:
    assert saved(SnapshotSlots(lambda: PLENTY), 1) == ([True], [0, 1])
    assert saved(SnapshotSlots(lambda: PLENTY), 4) == ([True] * 4, [0, 1])


def test_a_slot_that_was_taken_too_small_is_taken_again() -> None:
    assert saved(SnapshotSlots(lambda: PLENTY), 4, grown=2_000_000) == ([True] * 4, [0, 1, 1, 0])


def test_what_is_refused_ahead_is_refused_when_it_is_needed() -> None:
    room = iter([PLENTY, PLENTY, 0, 0, PLENTY])  # to plan, and for each slot
    kept, asked = saved(SnapshotSlots(lambda: next(room)), 3)
    assert (kept, asked) == ([True, False, True], [0, 1, 1, 1])
