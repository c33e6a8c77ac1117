"""Worker of a sharded training with its state in memory, at its buddy, and at the URL RUN_URL.

All weights are the number of the step, which is compared when the state is restored. It ends when
DIRECTORY/finish exists.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import torch
from restartable import report
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unbroken import worker

FINISH = Path(sys.argv[1]) / "finish"


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's shards."""
    return [parameter.to_local() for parameter in model.parameters()]


def train() -> None:
    """Resume from the nearest place that has the state, and train."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    report("start", agent=os.getppid(), environment=environment)
    distributed.init_process_group("gloo")
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    saved = worker.checkpoints(os.environ["RUN_URL"], every=10)
    snapshot = worker.Snapshot(model=model, checkpoints=saved)
    found = snapshot.restore()
    if found:
        assert all((part == found.step).all() for part in weights(model))
        report("restored", step=found.step, source=found.source)
    complete = 0
    for step in count(found.step + 1 if found else 1):
        time.sleep(0.02)
        is_over = torch.tensor(float(FINISH.exists()))
        distributed.all_reduce(is_over)
        if is_over:
            break
        with torch.no_grad():
            for part in weights(model):
                part.fill_(step)
        snapshot.save(step)
        if saved.is_due(step) and saved.save(step, model=model):
            saved.wait()
            complete = step
        worker.progress(step)
        report("step", step=step, saved=complete)
    distributed.destroy_process_group()
    report("end")


if __name__ == "__main__":
    train()
