"""Snapshots of what is on a GPU: ordered before later steps, whole or absent, in memory that is
pinned as long as it is mapped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.snapshot_agents import agent, channel
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot

pytestmark = pytest.mark.slow
BUSY_CYCLES = 1 << 30
"""Clock cycles of half a second and more, much longer than the host's work."""
SIZE = 64 * 1024 * 1024


@pytest.fixture
def line() -> Iterator[Channel]:
    """Provide a channel to an agent."""
    with agent() as memory, channel(memory) as found:
        yield found


def restored(snapshot: Snapshot, *tensors: Any) -> int:
    """The step that is restored into tensors that have lost everything."""
    for one in tensors:
        one.zero_()
    found = snapshot.restore()
    assert found is not None
    return found.step


def test_later_work_does_not_change_what_is_copied(torch: Any, line: Channel) -> None:
    tensor = torch.arange(SIZE, device="cuda") % 1000
    expected = tensor.clone()
    snapshot = Snapshot(tensor=tensor, channel=line)
    for step in range(4):
        torch.cuda._sleep(BUSY_CYCLES // 8)
        tensor.add_(1)
        assert snapshot.save(step)
        tensor.mul_(3)
        tensor.floor_divide_(3)
    tensor.fill_(7)
    snapshot.flush()
    assert restored(snapshot, tensor) == 3
    assert torch.equal(tensor, expected + 4)


def test_save_does_not_wait_for_the_device_nor_is_it_whole_before(
    torch: Any, line: Channel
) -> None:
    tensor = torch.ones(SIZE, device="cuda")
    snapshot = Snapshot(tensor=tensor, channel=line)
    for step in range(2):
        snapshot.save(step)
    snapshot.flush()
    torch.cuda._sleep(BUSY_CYCLES)
    tensor.add_(1)
    assert snapshot.save(2)
    slot = snapshot._open[0]
    assert slot is not None
    before = slot.header()
    assert not torch.cuda.current_stream().query(), "save has waited for the device"
    assert before is None
    snapshot.flush()
    after = slot.header()
    assert after is not None
    assert after.step == 2


def test_slots_of_one_process_after_another_are_written_where_all_see_it(
    torch: Any, line: Channel
) -> None:
    tensor = torch.zeros(SIZE, device="cuda")
    addresses = set()
    for round_ in range(6):
        tensor.fill_(round_ + 1.5)
        # Use another size, so that the agent's memory is new, and mapped where the last one was.
        snapshot = Snapshot(tensor=tensor, line=tensor[: round_ + 1], channel=line)
        snapshot.save(round_)
        snapshot.flush()
        slot = snapshot._open[0]
        assert slot is not None
        raw = torch.frombuffer(slot.memory, dtype=torch.uint8)
        assert raw.is_pinned()
        addresses.add(raw.data_ptr())
        del raw, slot
        # `find` maps the agent's file again, and sees what other processes see.
        assert restored(snapshot, tensor) == round_
        assert bool((tensor == round_ + 1.5).all())
        snapshot.close()
        del snapshot
        gc.collect()
    assert len(addresses) < 6, "nothing was mapped at a former address: this shows nothing"


def test_every_kind_of_tensor_comes_back(torch: Any, line: Channel) -> None:
    made = torch.randn(512, 256, device="cuda")
    parts = {
        "columns": made.t(),
        "every_second": torch.randn(1000, device="cuda")[::2],
        "half": made.bfloat16(),
        "nothing": torch.empty(0, 3, device="cuda"),
        "host": torch.arange(5),
        "complex": torch.randn(4096, dtype=torch.complex64, device="cuda").conj(),
    }
    expected = {name: one.clone() for name, one in parts.items()}
    snapshot = Snapshot(**parts, channel=line)
    snapshot.save(0)
    for one in parts.values():
        one.zero_()
    snapshot.flush()
    assert restored(snapshot, *parts.values()) == 0
    for name, one in parts.items():
        assert torch.equal(one, expected[name]), name


@pytest.mark.gpus(2)
def test_each_device_is_waited_for(torch: Any, line: Channel) -> None:
    first = torch.ones(SIZE, device="cuda:0")
    second = torch.ones(SIZE, device="cuda:1")
    snapshot = Snapshot(first=first, second=second, channel=line)
    snapshot.save(0)
    snapshot.flush()
    with torch.cuda.device(1):
        torch.cuda._sleep(BUSY_CYCLES)
        second.add_(1)
    assert snapshot.save(1)
    slot = snapshot._open[1]
    assert slot is not None
    assert slot.header() is None
    second.add_(1)
    snapshot.flush()
    assert restored(snapshot, first, second) == 1
    assert bool((first == 1).all())
    assert bool((second == 2).all())
