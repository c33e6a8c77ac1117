"""Slots of a process that stays for the next attempt: nothing is mapped, taken or read again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.worker.snapshot_agents import PLENTY, Agent, channel
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.wire.snapshot import BODY_AT
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot, _left

Begin = Callable[[int], None]


@pytest.fixture
def memory() -> Iterator[SnapshotSlots]:
    slots = SnapshotSlots(lambda: PLENTY)
    yield slots
    slots.close()


@pytest.fixture
def line(memory: SnapshotSlots) -> Iterator[Channel]:
    _left.clear()
    with channel(Agent(memory, owner=77)) as found:
        yield found
    _left.clear()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    def begin(attempt: int) -> None:
        monkeypatch.setenv("UNBROKEN_JOB", "job")
        monkeypatch.setenv("JOB_RESTART_COUNT", str(attempt))

    return begin


def files(memory: SnapshotSlots) -> set[int]:
    """Return the descriptors of the agent's files of rank 0."""
    return {slot.file.fd for slot in memory._slots[("training", 0)]}


def trained(line: Channel, weights: torch.Tensor, *steps: int) -> Snapshot:
    """Return the snapshot of an attempt that was left after the save of the last step."""
    snapshot = Snapshot(weights=weights, channel=line)
    found = snapshot.restore()
    for step in steps:
        assert step > (found.step if found else -1)
        weights.fill_(step)
        assert snapshot.save(step)
    snapshot.flush()
    return snapshot


def test_the_next_attempt_saves_into_the_same_files(
    memory: SnapshotSlots, line: Channel, begin: Begin
) -> None:
    """At each moment one slot has the newest step, through attempts with one save, with none, and
    with several."""
    weights = torch.zeros(1000)
    begin(0)
    trained(line, weights, 1, 2, 3)
    first, newest = files(memory), 3
    for attempt, saves in enumerate((1, 0, 2, 3, 0, 0, 1, 1), 1):
        begin(attempt)
        weights.fill_(-1)  # a torn step
        snapshot = Snapshot(weights=weights, channel=line)
        found = snapshot.restore()
        assert found is not None
        assert (found.step, weights[0].item()) == (newest, newest)
        for _ in range(saves):
            newest += 1
            weights.fill_(newest)
            assert snapshot.save(newest)
            snapshot.flush()
            assert newest in [
                header.step for slot, _ in snapshot.find() if (header := slot.header())
            ]
        assert files(memory) == first
    assert len(memory.memory._files) == 2


def test_what_another_process_has_opened_is_never_given_away(
    memory: SnapshotSlots, line: Channel, begin: Begin
) -> None:
    """A process that woke up late would write into it."""
    weights = torch.zeros(1000)
    begin(0)
    trained(line, weights, 1, 2)
    late = files(memory)
    _left.clear()
    begin(1)
    ask = {"name": "training", "rank": 0, "attempt": 1, "bytes": 5000, "from_attempt": 0}
    for slot in (0, 1):
        answer = memory.answer({"type": "snapshot_open", **ask, "slot": slot}, 78)
        assert answer.fds[0] not in late
    answer = memory.answer({"type": "snapshot_open", **ask, "slot": 0})
    assert answer.fds[0] not in late, "a process that is not known gets a new one too"


def test_a_state_that_has_grown_gets_new_memory_and_keeps_the_newest_step(
    memory: SnapshotSlots, line: Channel, begin: Begin
) -> None:
    """Only the slot of the older step is given up for it."""
    begin(0)
    trained(line, torch.zeros(1000), 1, 2)
    begin(1)
    weights = torch.zeros(1000)
    more: dict[str, torch.Tensor] = {}
    snapshot = Snapshot(weights=weights, extra=lambda: more, channel=line)
    assert snapshot.restore() is None, "it has other parts"
    more["moments"] = torch.ones(100_000)
    for step in (3, 4):
        assert snapshot.save(step)
        snapshot.flush()
        steps = [header.step for slot, _ in snapshot.find() if (header := slot.header())]
        assert step in steps


def test_one_slot_alone_is_not_dropped_by_opening_the_other(
    memory: SnapshotSlots, line: Channel, begin: Begin
) -> None:
    """The former attempt had saved once."""
    weights = torch.zeros(1000)
    begin(0)
    trained(line, weights, 1)
    begin(1)
    snapshot = trained(line, weights, 2, 3)
    assert sorted(header.step for slot, _ in snapshot.find() if (header := slot.header())) == [2, 3]


def test_what_was_overwritten_by_another_writer_is_still_read_and_found(
    memory: SnapshotSlots, line: Channel, begin: Begin
) -> None:
    """A slot whose header is not the one that this process wrote is checked in full."""
    weights = torch.zeros(1000)
    begin(0)
    trained(line, weights, 1, 2)
    begin(1)
    snapshot = Snapshot(weights=weights, channel=line)
    for slot, _ in snapshot.find():
        header = slot.header()
        assert header is not None
        if header.step == 2:
            slot.written = None
            slot.memory[BODY_AT + 77] ^= 4
    found = snapshot.restore()
    assert found is not None
    assert found.step == 1


def test_slots_that_are_not_used_again_are_unmapped(
    memory: SnapshotSlots, line: Channel, begin: Begin
) -> None:
    """Their memory would stay taken, although the agent has dropped them."""
    begin(0)
    trained(line, torch.zeros(1000), 1, 2)
    former = [weakref.ref(slot) for slot in _left["training"][1]]
    begin(1)
    snapshot = Snapshot(weights=torch.zeros(2000), channel=line)
    assert snapshot.restore() is None, "it has another shape"
    for step in (1, 2):
        assert snapshot.save(step)
    snapshot.flush()
    gc.collect()
    assert [reference() for reference in former] == [None, None]
