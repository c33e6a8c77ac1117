"""The model of `train_step.py` in shards (FSDP2), and its checkpoints by torch's own DCP.

The model is built on the meta device, so that no rank takes memory for the whole of it. Its values
are drawn only if nothing was restored.

Every rank writes its shards every few steps and waits until all have. A checkpoint is a folder
`step-N`, complete once it has DCP's `.metadata`, which is written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HSDP = "hsdp"
PREFIX, KEPT = "step-", 2
"""Begin of the names of the folders; number of complete checkpoints to keep."""


def made(build: Callable[[], nn.Module], sharding: str, nodes: int) -> tuple[nn.Module, Any]:
    """Return a model without values, and the group of ranks that have the same shards as this one.

    None: no other rank has them. With `hsdp` the ranks of a node share the model, and each of the
    `nodes` nodes has the whole.
    """
    world = distributed.get_world_size()
    if sharding == HSDP:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = build()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model, mesh.get_group("replicate") if sharding == HSDP else None


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Give each parameter values, the same on ranks with the same shard of it."""
    for number, parameter in enumerate(model.parameters()):
        local = parameter.to_local()  # type: ignore[operator]
        torch.manual_seed(1000 * number + parameter.device_mesh.get_coordinate()[-1])
        bound = parameter.shape[-1] ** -0.5
        local.uniform_(-bound, bound)


def save(model: nn.Module, step: int, directory: Path) -> None:
    """Write a checkpoint with all ranks; rank 0 then removes older ones."""
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=directory / f"{PREFIX}{step}")
    if distributed.get_rank() == 0:
        for older in complete(directory)[:-KEPT]:
            shutil.rmtree(directory / f"{PREFIX}{older}")


def load(model: nn.Module, directory: Path) -> int:
    """Load the newest complete checkpoint with all ranks; return its step.

    If none is there, the values are drawn, and 0 is returned.
    """
    steps = complete(directory)
    if not steps:
        draw(model)
        return 0
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=directory / f"{PREFIX}{steps[-1]}")
    return steps[-1]


def complete(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in order."""
    found = directory.glob(f"{PREFIX}*/.metadata")
    return sorted(int(one.parent.name.removeprefix(PREFIX)) for one in found)
