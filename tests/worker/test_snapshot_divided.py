"""Sharded state from memory with another number of ranks: all of it, of one step, or none."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.worker.forked import Child, group, ranks
from tests.worker.kill_points import kill_at
from tests.worker.snapshot_agents import Agent, channel, served
from unbroken import worker
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.wire.snapshot import BODY_AT
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.slots import AgentSlots, Identity
from unbroken.worker.snapshot.snapshot import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_worker")]


class Training:
    """A training with uneven shards, on any number of ranks."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 2))
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.extra: dict[str, Any] = {"seen": 0, "rank": rank}

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, number: int) -> float:
        """Make a step; return the loss. Data are the same for all ranks."""
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        loss = self.model(data).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.extra["seen"] += 4
        return float(loss.item())

    def state(self) -> list[Any]:
        """Return the whole state, unsharded."""
        moments = [
            one[name]
            for one in self.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq", "step")
        ]
        found = [*self.model.parameters(), *moments]
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]
        return [one.tolist() for one in whole] + [self.scheduler.get_last_lr()]


def save(rank: int, socks: Sequence[socket.socket], place: Path, steps: range) -> Any:
    """Save steps; return the last two states, which are in memory. The last is on disk too."""
    line = Channel(socks[rank])
    line.start()
    training, disk = Training(rank), worker.checkpoints(place)
    snapshot = Snapshot(**training.parts, extra=training.extra, rng=True, channel=line)
    states = {}
    for step in steps:
        training.step(step)
        assert snapshot.save(step)
        states[step] = training.state()
    disk.save(steps[-1], **training.parts)
    disk.wait()
    snapshot.close()
    return states


def restore(
    rank: int, socks: Sequence[socket.socket], place: Path, source: str, further: int = 3
) -> Any:
    """Restore; return what was found, and the losses of further steps."""
    line = Channel(socks[rank])
    line.start()
    training = Training(rank)
    training.extra["seen"] = -1
    saved = Snapshot(**training.parts, extra=training.extra, rng=True, channel=line)
    before = training.state()
    found: Any = saved.restore()
    if source == "disk":
        found = worker.checkpoints(place).restore(**training.parts)
    if found is None:
        assert training.state() == before, "it was touched"
        saved.close()
        return None
    told = (found.source, found.missing) if source == "memory" else ()
    state, extra = training.state(), dict(training.extra)
    losses = [training.step(step) for step in range(found.step + 1, found.step + 1 + further)]
    if losses:
        assert saved.save(found.step + further)
    saved.close()
    return found.step, told, extra, state, losses


class Job:
    """Repeated attempts, on nodes of any number of ranks."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.place, self.patch, self.attempt = place, patch, -1
        (place / "disk").mkdir()
        self.agents: list[Agent] = []

    def run(self, act: Any, nodes: Sequence[SnapshotSlots], *arguments: Any) -> list[Any]:
        """Run a function on ranks; `nodes` has the memory of each, and may repeat one."""
        with self._sockets(nodes) as socks:
            store, disk = self.place / "store", self.place / "disk"
            return ranks(len(nodes), act, store, socks, disk, *arguments)

    @contextmanager
    def _sockets(self, nodes: Sequence[SnapshotSlots]) -> Iterator[list[socket.socket]]:
        """Yield the sockets of the next attempt."""
        self.attempt += 1
        self.patch.setenv("JOB_RESTART_COUNT", str(self.attempt))
        self.agents = [Agent(one) for one in nodes]
        with ExitStack() as stack:
            yield [stack.enter_context(served(one)) for one in self.agents]

    def lose(self, act: Any, nodes: Sequence[SnapshotSlots], *arguments: Any) -> bool:
        """Return whether a rank was killed; the other ranks have failed then."""
        with self._sockets(nodes) as socks:
            store, disk = self.place / "store", self.place / "disk"
            children = group(len(nodes), act, store, socks, disk, *arguments)
            ends = [_has_returned(child) for child in children]
        return not all(ends)


def _has_returned(child: Child) -> bool:
    try:
        return child.has_returned()
    except AssertionError:
        return False


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("before", "after"),
    [("0011", "01"), ("01", "0011"), ("000", "00"), ("00", "0")],
)
def test_shards_are_divided_anew_from_memory(
    before: str, after: str, job: Job, memories: list[SnapshotSlots]
) -> None:
    """Restore on another number of ranks; each digit is a rank's node."""
    saved = job.run(save, [memories[int(one)] for one in before], range(3))
    nodes = [memories[int(one)] for one in after]
    found = job.run(restore, nodes, "memory")
    for rank, (step, (source, missing), extra, state, _) in enumerate(found):
        assert (step, state) == (2, saved[0][2])
        assert source == f"memory of {len(before)} ranks, divided anew"
        is_new = rank >= len(before)
        assert extra == ({"seen": -1, "rank": rank} if is_new else {"seen": 12, "rank": rank})
        assert missing == (("extra", "rng") if is_new else ("rng",))
    assert [one.receipts[0]["source"] for one in job.agents] == [one[1][0] for one in found]


def test_training_goes_on_as_from_disk(job: Job, memories: list[SnapshotSlots]) -> None:
    job.run(save, memories[:1] * 3, range(3))
    memory = job.run(restore, memories[:1] * 2, "memory")
    disk = job.run(restore, memories[1:2] * 2, "disk")
    assert [(one[0], *one[3:]) for one in memory] == [(one[0], *one[3:]) for one in disk]


def test_shards_go_from_four_ranks_to_three_and_back(
    job: Job, memories: list[SnapshotSlots]
) -> None:
    nodes = [memories[int(one)] for one in "0011"]
    saved = job.run(save, nodes, range(3))
    three = job.run(restore, nodes[:3], "memory")
    source = "memory of 4 ranks, divided anew"
    assert [(one[0], one[1][0], one[3]) for one in three] == [(2, source, saved[0][2])] * 3
    made = job.run(restore, nodes[:3], "memory", 0)
    assert [(one[0], one[1][0]) for one in made] == [(5, "memory")] * 3
    four = job.run(restore, nodes, "memory")
    source = "memory of 3 ranks, divided anew"
    assert [(one[0], one[1][0], one[3]) for one in four] == [(5, source, made[0][3])] * 4
    assert len({repr(one[4]) for one in four}) == 1, "losses differ between ranks"


def slots(memory: SnapshotSlots, rank: int) -> dict[int, Any]:
    """Return the slots of a rank, by step."""
    with channel(memory) as line:
        found = AgentSlots(line, Identity("training", rank, 0)).find()
    return {header.step: slot for slot, _ in found if (header := slot.header())}


def test_of_a_step_of_which_a_shard_is_lost_nothing_is_taken(
    job: Job, memories: list[SnapshotSlots]
) -> None:
    saved = job.run(save, memories[:2] + memories[:1], range(3))
    slots(memories[1], 1)[2].clear()
    (found,) = job.run(restore, memories[1:2], "memory")[:1]
    assert found is None, "ranks 0 and 2 are elsewhere"
    found = job.run(restore, memories[:2], "memory")
    assert [(one[0], one[3]) for one in found] == [(1, saved[0][1])] * 2


def test_a_shard_that_is_damaged_is_given_up(job: Job, memories: list[SnapshotSlots]) -> None:
    saved = job.run(save, memories[:1] * 3, range(3))
    slots(memories[0], 2)[2].memory[BODY_AT + 1] ^= 4
    found = job.run(restore, memories[:1] * 2, "memory")
    assert [(one[0], one[3]) for one in found] == [(1, saved[0][1])] * 2


def overwritten(rank: int, socks: Sequence[socket.socket], place: Path, slot: Any) -> Any:
    """Restore, while a worker of the older attempt resumes after all shares have been checked."""

    def calls(frame: FrameType, _event: str, _value: Any) -> None:
        if frame.f_code.co_name == "carry_out" and slot.header() is not None:
            slot.clear()
            slot.memory[BODY_AT : BODY_AT + 64] = bytes(64)

    sys.settrace(calls)
    try:
        return restore(rank, socks, place, "memory")
    finally:
        sys.settrace(None)


def test_what_is_overwritten_while_it_is_read_is_not_taken(
    job: Job, memories: list[SnapshotSlots]
) -> None:
    saved = job.run(save, memories[:1] * 3, range(3))
    found = job.run(overwritten, memories[:1] * 2, slots(memories[0], 2)[2])
    assert [(one[0], one[3]) for one in found] == [(1, saved[0][1])] * 2


def killed(rank: int, socks: Sequence[socket.socket], place: Path, victim: int, point: int) -> Any:
    """Restore; one rank is killed before a line of it."""
    if rank == victim:
        kill_at(point, "snapshot/restore", "snapshot/div")
    return restore(rank, socks, place, "memory", further=0)


@pytest.mark.heavy
def test_killed_at_points_while_shards_are_divided(job: Job, memories: list[SnapshotSlots]) -> None:
    """Check that after each kill the next attempt can resume from the same state."""
    saved = job.run(save, memories[:1] * 3, range(3))
    points = range(40, 4000, 170)
    for number, point in enumerate(points):
        if not job.lose(killed, memories[:1] * 2, number % 2, point):
            break
    assert number > 3
    assert number < len(points) - 1
    found = job.run(restore, memories[:1] * 2, "memory")
    assert [one[3] for one in found] == [saved[0][2]] * 2
