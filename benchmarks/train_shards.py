"""The model of `train_step.py` in shards (FSDP2), and its checkpoints by torch's own DCP.

Every rank writes its shards every few steps and waits until all have. A checkpoint is a folder
`step-N`, complete once it has DCP's `.metadata`, which is written last.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HSDP = "hsdp"
PREFIX, KEPT = "step-", 2
"""Begin of the names of the folders; number of complete checkpoints to keep."""


def shard(model: nn.Module, sharding: str, nodes: int) -> Any:
    """Divide each layer in place; return the group of ranks that have the same shards as this one.

    None: no other rank has them. With `hsdp` the ranks of a node share the model, and each of the
    `nodes` nodes has the whole.
    """
    world = distributed.get_world_size()
    if sharding == HSDP:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (world,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mesh.get_group("replicate") if sharding == HSDP else None


def save(model: nn.Module, step: int, directory: Path) -> None:
    """Write a checkpoint with all ranks; rank 0 then removes older ones."""
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=directory / f"{PREFIX}{step}")
    if distributed.get_rank() == 0:
        for older in complete(directory)[:-KEPT]:
            shutil.rmtree(directory / f"{PREFIX}{older}")


def load(model: nn.Module, directory: Path) -> int:
    """Load the newest complete checkpoint with all ranks; return its step, or 0: none is there."""
    steps = complete(directory)
    if not steps:
        return 0
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=directory / f"{PREFIX}{steps[-1]}")
    return steps[-1]


def complete(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in order."""
    found = directory.glob(f"{PREFIX}*/.metadata")
    return sorted(int(one.parent.name.removeprefix(PREFIX)) for one in found)
