"""State on meshes other than one of all ranks, and state that cannot be divided again."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.worker.forked import ranks
from tests.worker.snapshot_agents import PLENTY, Agent, served
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SnapshotSlots]:
    monkeypatch.setenv("UNBROKEN_JOB", "job")
    with torch.random.fork_rng():
        found = SnapshotSlots(lambda: PLENTY)
        yield found
        found.close()


def mesh(first: int) -> Any:
    """Return a mesh of two dimensions."""
    return init_device_mesh("cpu", (first, get_world_size() // first), mesh_dim_names=("a", "b"))


def hybrid(model: nn.Sequential) -> None:
    """Shard the model in each of two groups."""
    fully_shard(model, mesh=mesh(2))


def tensors(model: nn.Sequential) -> None:
    """Shard tensors both ways, over all ranks."""
    both = mesh(2)
    for layer, at in ((model[0], 1), (model[1], 0)):
        assert isinstance(layer, nn.Linear)
        placed = distribute_tensor(layer.weight.data, both, (Shard(1 - at), Shard(at)))
        layer.weight = nn.Parameter(placed)
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.data, both, (Replicate(), Shard(0))))


def tied(model: nn.Sequential) -> None:
    """Give a tensor two names; the last ranks have nothing of it."""
    model[1] = nn.Linear(11, 6, bias=False)
    model[1].weight = nn.Parameter(torch.randn(3, 2))
    model.register_parameter("again", model[1].weight)
    fully_shard(model, mesh=mesh(1)["b"])


def own(model: nn.Sequential) -> None:
    """Add a buffer that each rank has for itself."""
    model.register_buffer("mean", torch.full((3,), get_rank()))
    fully_shard(model, mesh=mesh(1)["b"])


def part(model: nn.Sequential) -> None:
    """Use a mesh of half of the ranks."""
    fully_shard(model, mesh=mesh(2)["b"])


def act(rank: int, socks: Sequence[socket.socket], make: Callable[[Any], None], do: str) -> Any:
    """Save once, or restore; return the whole state."""
    line = Channel(socks[rank])
    line.start()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 2))
    make(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    snapshot = Snapshot(model=model, optimizer=optimizer, channel=line)
    found = None
    if do == "save":
        for one in model.parameters():
            one.grad = one.detach().clone()
        optimizer.step()
        assert snapshot.save(4)
    else:
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        found = snapshot.restore()
    snapshot.close()
    moments = [one for state in optimizer.state.values() for one in state.values()]
    whole = [
        one.full_tensor().tolist() if hasattr(one, "full_tensor") else one.tolist()
        for one in (*model.state_dict().values(), *moments)
    ]
    return whole if do == "save" else found and (found.step, found.source, whole)


@pytest.mark.parametrize(
    ("make", "before", "after", "is_possible"),
    [
        (hybrid, 4, 2, True),
        (tensors, 2, 4, True),
        (tied, 4, 3, True),
        (own, 2, 1, False),
        (part, 4, 2, False),
    ],
)
def test_state_is_divided_over_another_mesh_or_left(
    make: Any,
    before: int,
    after: int,
    is_possible: bool,
    memory: SnapshotSlots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for attempt, world in enumerate((before, after)):
        monkeypatch.setenv("JOB_RESTART_COUNT", str(attempt))
        with ExitStack() as stack:
            socks = [stack.enter_context(served(Agent(memory))) for _ in range(world)]
            do = "restore" if attempt else "save"
            found.append(ranks(world, act, tmp_path / "store", socks, make, do))
    source = f"memory of {before} ranks, divided anew"
    assert found[1] == [(4, source, found[0][0]) if is_possible else None] * after
