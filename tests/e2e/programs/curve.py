"""Worker that trains from seeds alone, keeps its state in memory, and reports each loss.

PLAN is a list of `{"attempt", "rank", "step", "at"}`. At each of these points the worker reports
`held`, and waits to be killed. `at` is "begin" (the others wait in the step's all-reduce), "told"
(the step is made, not kept) or "kept". With `{"shard": true}` in the list it trains with FSDP2,
else with DDP. It ends by itself after 40 steps, or after N with `{"steps": N}`. With `{"steps": 0}`
it makes steps of 20 ms at least, and ends when DIRECTORY/finish exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count, takewhile
from pathlib import Path

import torch
from restartable import report
from torch import distributed, nn

from unbroken import worker

PLAN = json.loads(os.environ["PLAN"])
STEPS = next((order["steps"] for order in PLAN if "steps" in order), 40)
FINISH = Path(sys.argv[1]) / "finish"
IS_SHARDED = {"shard": True} in PLAN


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
    """Return a loss that depends on the step, the rank, and all earlier steps."""
    seed = 1000 * step + distributed.get_rank()
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


def shard(model: nn.Module) -> None:
    """Shard the model with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))


@worker.restartable
def train() -> None:
    """Resume from the kept state, and train."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    report("start", agent=os.getppid(), environment=environment)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 16))
    if IS_SHARDED:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    snapshot = worker.Snapshot(model=model, optimizer=optimizer, scheduler=scheduler)
    found = snapshot.restore()
    first = found.step + 1 if found else 0
    if found:
        report("restored", step=found.step, source=found.source, checksum=found.checksum)
    parallel = model if IS_SHARDED else replicated(model)
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
