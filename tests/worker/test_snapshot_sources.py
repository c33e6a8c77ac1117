"""Sources of a rank's state: memory, a replica, a buddy, the disk; and the receipt of each."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.worker.forked import ranks
from tests.worker.snapshot_agents import Agent, agent, channel, served
from tests.worker.test_checkpoints_ranks import trained, values
from unbroken import worker
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.errors import SpecError
from unbroken.wire import snapshot as format_
from unbroken.worker.channel import Channel
from unbroken.worker.checkpointing.checkpoints import CheckpointError
from unbroken.worker.snapshot.snapshot import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_worker")]


def act(rank: int, socks: Sequence[socket.socket], do: str, sharded: bool) -> Any:
    """Save or restore as one rank of a group."""
    line = Channel(socks[rank])
    line.start()
    model, optimizer = trained(sharded)
    snapshot = Snapshot(model=model, optimizer=optimizer, rng=True, channel=line)
    if do.isdigit():
        for step in map(int, do):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            assert snapshot.save(step)
        snapshot.close()
        return None
    found = snapshot.restore()
    told = (found.step, found.source, found.missing, found.checksum) if found else None
    numbers = {one for value in values(model, optimizer)[:4] for one in value.flatten().tolist()}
    snapshot.close()
    return told, numbers


def together(agents: Sequence[Agent], do: str, sharded: bool, place: Path) -> list[Any]:
    """Return the results of all ranks, each with its agent."""
    with ExitStack() as stack:
        socks = [stack.enter_context(served(one)) for one in agents]
        return ranks(len(agents), act, place / "store", socks, do, sharded)


def saved(memories: Sequence[SnapshotSlots], do: str, sharded: bool, place: Path) -> None:
    """Save these steps on each rank."""
    together([Agent(one) for one in memories], do, sharded, place)


def test_a_lost_shard_comes_from_its_buddy(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, new, _ = memories
    saved([one, other], "34", True, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    agents = [Agent(one), Agent(new, {0: other})]
    found = together(agents, "restore", True, tmp_path)
    assert [(told[:3], numbers) for told, numbers in found] == [
        ((4, "memory", ()), {4.0}),
        ((4, "buddy 0", ()), {4.0}),
    ]
    assert [len(one.receipts) for one in agents] == [1, 1]
    assert [one.receipts[0]["source"] for one in agents] == ["memory", "buddy 0"]
    assert [one.receipts[0]["replicas"] for one in agents] == ["", ""]
    assert [one.lists for one in agents] == [0, 1], "who has the newest does not ask"
    assert [one.fetches for one in agents] == [0, 1], "one snapshot is brought, not all"


def test_a_buddy_that_lags_is_met_by_the_other_buddies(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restore step 2, the newest step that the lost rank's buddy has.

    The other rank has 3 and 4 itself, and its own buddy has 2.
    """
    copies, new = memories[:2], memories[3]
    saved(copies, "12", True, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    saved([memories[2], new], "34", True, tmp_path)
    new.close()
    monkeypatch.setenv("JOB_RESTART_COUNT", "2")
    agents = [Agent(memories[2], {1: copies[0]}), Agent(new, {0: copies[1]})]
    found = together(agents, "restore", True, tmp_path)
    assert [told[:2] for told, _ in found] == [(2, "buddy 1"), (2, "buddy 0")]
    assert [numbers for _, numbers in found] == [{2.0}, {2.0}]


def test_a_buddy_has_what_was_lost_and_replicas_that_nobody_declared_come_after(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, new, _ = memories
    saved([one, other], "34", False, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    found = together([Agent(one), Agent(new, {0: other})], "restore", False, tmp_path)
    assert [told[:3] for told, _ in found] == [(4, "memory", ()), (4, "buddy 0", ())]
    assert found[0][0][3] == found[1][0][3]


def test_replicas_agree(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, new, _ = memories
    saved([one, other], "34", False, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    agents = [Agent(one), Agent(new)]
    found = together(agents, "restore", False, tmp_path)
    assert [told[:3] for told, _ in found] == [
        (4, "memory", ()),
        (4, "replica rank 0", ("rng",)),
    ]
    assert found[0][0][3] == found[1][0][3]
    for rank, receipt in enumerate(one.receipts[0] for one in agents):
        wanted = {"name": "training", "rank": rank, "attempt": 1, "saved_attempt": 0, "step": 4}
        assert {key: receipt[key] for key in wanted} == wanted
        assert receipt["replicas"] == "0-1"
        assert receipt["checksum"] == found[0][0][3]
    assert [one.lists for one in agents] == [0, 1]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1)])
def test_replicated_state_goes_to_another_number_of_ranks(
    before: int,
    after: int,
    memories: list[SnapshotSlots],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(memories[:before], "34", False, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    found = together([Agent(one) for one in memories[:after]], "restore", False, tmp_path)
    assert all(numbers == {4.0} for _, numbers in found)
    sources = [told[1:3] for told, _ in found]
    assert sources[:before] == [("memory", ())] * min(before, after)
    assert sources[before:] == [("replica rank 0", ("rng",))] * max(0, after - before)


def flipped(memory: SnapshotSlots, rank: int) -> None:
    """Flip a bit of the newest step of a rank."""
    with channel(memory) as line:
        from unbroken.worker.snapshot.slots import AgentSlots, Identity

        slots = [slot for slot, _ in AgentSlots(line, Identity("training", rank, 1)).find()]
        newest = max(slots, key=lambda slot: getattr(slot.header(), "step", -1))
        newest.memory[format_.BODY_AT + 5] ^= 16


def test_what_is_damaged_on_one_rank_is_given_by_a_replica(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(memories[:2], "34", False, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    flipped(memories[1], 1)
    found = together([Agent(one) for one in memories[:2]], "restore", False, tmp_path)
    assert [told[:2] for told, _ in found] == [(4, "memory"), (4, "replica rank 0")]
    assert [numbers for _, numbers in found] == [{4.0}, {4.0}]


def test_what_is_damaged_on_one_rank_is_given_by_its_buddy(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(memories[:2], "34", True, tmp_path)
    saved(memories[2:], "34", True, tmp_path)
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    flipped(memories[1], 1)
    agents = [Agent(memories[0]), Agent(memories[1], {5: memories[3]})]
    found = together(agents, "restore", True, tmp_path)
    assert [told[:2] for told, _ in found] == [(4, "memory"), (4, "buddy 5")]
    assert [numbers for _, numbers in found] == [{4.0}, {4.0}]


class Plain:
    """A training whose weights are all one number, in memory and on disk."""

    def __init__(self, line: Channel | None, place: Path) -> None:
        self.model, self.extra = nn.Linear(4, 4), {"seen": 0}
        self.disk = worker.checkpoints(place)
        self.snapshot = Snapshot(
            model=self.model, extra=self.extra, checkpoints=self.disk, channel=line
        )

    def set(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        self.extra["seen"] = step

    def save(self, step: int, *, disk: bool = False, memory: bool = False) -> None:
        self.set(step)
        if memory:
            assert self.snapshot.save(step)
        if disk:
            assert self.disk.save(step, model=self.model, extra=self.extra)
            self.disk.wait()

    def restore(self) -> tuple[int, str] | None:
        """Restore; return the step and its source. Assert that all of the state is of that step."""
        self.set(-1)
        found = self.snapshot.restore()
        self.snapshot.close()
        if found is None:
            return None
        numbers = {one.item() for value in self.model.parameters() for one in value.flatten()}
        assert numbers == {float(found.step)}
        assert self.extra == found.extra == {"seen": found.step}
        return found.step, found.source


@contextmanager
def going_on(place: Path, memory: SnapshotSlots) -> Iterator[tuple[Plain, Agent]]:
    """Yield the next start of a training."""
    known = Agent(memory)
    with channel(known) as line:
        yield Plain(line, place), known


@pytest.mark.parametrize(
    ("disk", "memory", "expected"),
    [
        ([3], [], (3, "disk")),
        ([3], [4, 5], (5, "memory")),
        ([5], [3, 4], (5, "disk")),
        ([5], [4, 5], (5, "memory")),
        ([], [], None),
    ],
)
def test_the_newer_of_disk_and_memory_is_taken(
    disk: list[int], memory: list[int], expected: Any, tmp_path: Path
) -> None:
    with agent() as slots:
        with going_on(tmp_path, slots) as (first, _):
            assert first.restore() is None
            for step in range(7):
                first.save(step, disk=step in disk, memory=step in memory)
            first.snapshot.close()
        with going_on(tmp_path, slots) as (second, known):
            assert second.restore() == expected
        assert len(known.receipts) == (expected is not None)
        for receipt in known.receipts:
            is_disk = expected[1] == "disk"
            assert (receipt["step"], receipt["source"]) == expected
            assert receipt["saved_attempt"] == (None if is_disk else 0)
            assert receipt["checksum"]


def damage(place: Path, step: int) -> None:
    """Flip one bit of a checkpoint."""
    file = place / f"step-{step:08}.attempt-0" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_a_damaged_checkpoint_that_is_newer_leaves_memory(tmp_path: Path) -> None:
    with agent() as slots:
        with going_on(tmp_path, slots) as (first, _):
            first.restore()
            first.save(3, memory=True)
            first.save(5, disk=True)
            first.snapshot.close()
        damage(tmp_path, 5)
        with going_on(tmp_path, slots) as (second, _):
            assert second.restore() == (3, "memory")


def test_a_checkpoint_that_does_not_fit_leaves_memory_or_is_told(tmp_path: Path) -> None:
    with agent() as slots:
        with going_on(tmp_path, slots) as (first, _):
            first.restore()
            first.save(3, memory=True)
            first.disk.save(5, other=torch.nn.Linear(2, 2))
            first.disk.wait()
            first.snapshot.close()
        with going_on(tmp_path, slots) as (second, _):
            assert second.restore() == (3, "memory")
    with agent() as slots, going_on(tmp_path, slots) as (third, _):
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            third.snapshot.restore()
        third.snapshot.close()


def test_checkpoints_that_memory_went_on_from_are_pruned(tmp_path: Path) -> None:
    with agent() as slots:
        with going_on(tmp_path, slots) as (first, _):
            first.restore()
            for step in (1, 2):
                first.save(step, disk=True, memory=True)
            first.save(3, memory=True)
            first.snapshot.close()
        with going_on(tmp_path, slots) as (second, _):
            assert second.restore() == (3, "memory")
            second.save(4, disk=True)
            left = sorted(one.name for one in tmp_path.glob("step-*"))
            assert left == ["step-00000002.attempt-0", "step-00000004.attempt-1"]


def test_bare_tensors_are_not_for_disks(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="weights is a tensor"):
        Snapshot(weights=torch.ones(3), checkpoints=worker.checkpoints(tmp_path))


def fallen_back(rank: int, socks: Mapping[int, socket.socket], place: Path, do: str) -> Any:
    """Save or restore shards in memory, and on disk."""
    line = Channel(socks[rank])
    line.start()
    model, optimizer = trained(True)
    disk = worker.checkpoints(place)
    snapshot = Snapshot(model=model, optimizer=optimizer, checkpoints=disk, channel=line)
    if do == "save":
        snapshot.restore()
        snapshot.save(1)
        disk.save(1, model=model, optimizer=optimizer)
        disk.wait()
        snapshot.save(2)
        snapshot.close()
        return [one.tolist() for one in values(model, optimizer)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = snapshot.restore()
    assert found is not None
    snapshot.close()
    return found.step, found.source, [one.tolist() for one in values(model, optimizer)]


def test_shards_of_which_one_is_lost_come_from_disk_on_another_number_of_ranks(
    memories: list[SnapshotSlots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "disk"
    place.mkdir()

    def run(world: int, do: str) -> list[Any]:
        with ExitStack() as stack:
            socks = [stack.enter_context(served(one)) for one in memories[:world]]
            return ranks(world, fallen_back, tmp_path / "store", socks, place, do)

    state = run(2, "save")[0]
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    assert run(2, "restore") == [(2, "memory", state)] * 2
    monkeypatch.setenv("JOB_RESTART_COUNT", "2")
    memories[1].close()
    assert run(3, "restore") == [(1, "disk", state)] * 3
