"""Worker that trains from seeds alone, keeps its state in memory, and reports each loss.

PLAN is a list of `{"attempt", "rank", "step", "at"}`. At each of these points the worker reports
`held`, and waits to be killed. `at` is "begin" (the others wait in the step's all-reduce), "told"
(the step is made, not kept) or "kept". It ends by itself after 40 steps, or after N with `{"steps":
N}`. With `{"steps": 0}` it makes steps of 20 ms at least, and ends when DIRECTORY/finish exists.

With `{"shard": KIND}` in the list it trains in another way than with DDP: `fsdp2`, `hsdp` (each
node has all shards) or `tensor` (tensor parallel). `{"uses": [...]}` adds `compile`, `recompute`
(activation checkpointing) and `half` (mixed precision of FSDP2).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from restartable import report
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from unbroken import worker

PLAN = json.loads(os.environ["PLAN"])
STEPS = next((order["steps"] for order in PLAN if "steps" in order), 40)
FINISH = Path(sys.argv[1]) / "finish"
KIND = next((order["shard"] for order in PLAN if "shard" in order), "ddp")
USES = next((order["uses"] for order in PLAN if "uses" in order), [])


def hold(step: int, at: str) -> None:
    """Report, and wait to be killed, if the plan names this point."""
    here = {
        "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "rank": int(os.environ["RANK"]),
        "step": step,
        "at": at,
    }
    if here in PLAN:
        report("held", step=step)
        while True:
            signal.pause()


def goes_on(step: int) -> bool:
    """Return True if there is such a step; all ranks agree."""
    if STEPS:
        return step < STEPS
    time.sleep(0.02)
    is_over = torch.tensor(float(FINISH.exists()))
    distributed.all_reduce(is_over)
    return not is_over


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return a loss that depends on the step, the rank, and all earlier steps.

    Ranks that are tensor parallel work on the same samples.
    """
    seed = 1000 * step + (0 if KIND == "tensor" else distributed.get_rank())
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    found: torch.Tensor = (model(batch) - batch.roll(1, 1)).square().mean()
    return found


def replicated(model: nn.Module) -> nn.Module:
    """Wrap the model in DDP, which broadcasts it only if the replicas differ.

    Unless it looks for unused parameters, DDP packs gradients differently in the first step of an
    attempt. More than two ranks are then added in another order.
    """
    return nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=True, init_sync=not worker.replicas_agree(model)
    )


class Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the layer."""
        found: torch.Tensor = checkpoint(self.layer, batch, use_reentrant=False)
        return found


def shard(model: nn.Sequential) -> Any:
    """Divide the model in place; return the group of ranks that hold the same, if it is known."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    world, local = distributed.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if KIND == "tensor":
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
        return None
    shape, names = ((world // local, local), ("replicate", "shard")) if KIND == "hsdp" else (
        (world,), ("shard",)
    )  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    settings: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if "half" in USES else {})
    for layer in (model[0], model[3]):
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return mesh.get_group("replicate") if KIND == "hsdp" else None


def layers() -> nn.Sequential:
    """Return the model before it is divided."""
    first, last = nn.Linear(16, 32), nn.Linear(32, 16)
    if "recompute" in USES:
        return nn.Sequential(Recomputed(first), nn.Dropout(0.1), nn.Tanh(), Recomputed(last))
    return nn.Sequential(first, nn.Dropout(0.1), nn.Tanh(), last)


@worker.restartable
def train() -> None:
    """Resume from the kept state, and train."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    report("start", agent=os.getppid(), environment=environment)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = layers()
    replicas = None if KIND == "ddp" else shard(model)
    if "compile" in USES:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    snapshot = worker.Snapshot(**parts, replicas=replicas)
    found = snapshot.restore()
    first = found.step + 1 if found else 0
    if found:
        report("restored", step=found.step, source=found.source, checksum=found.checksum)
    parallel = replicated(model) if KIND == "ddp" else model
    for step in takewhile(goes_on, count(first)):
        hold(step, "begin")
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(parallel, step)
        loss.backward()
        optimizer.step()
        scheduler.step()
        report("step", step=step, loss=loss.item().hex())
        hold(step, "told")
        snapshot.save(step)
        worker.progress(step)
        hold(step, "kept")
        if step == first:
            sys.stdout.write("the first step is made\n")
    distributed.destroy_process_group()
    report("end")


if __name__ == "__main__":
    train()
