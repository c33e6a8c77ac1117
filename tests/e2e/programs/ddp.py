"""Worker of the job tests that trains with DDP over gloo; else as `gang.py`."""

from __future__ import annotations

import os
import sys

import torch
from gang import DIRECTORY, RANK, follow_plan, lock, report, run
from torch import distributed, nn


def main() -> None:
    """Train until DIRECTORY/finish exists."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    report("start", others=lock(), agent=os.getppid(), environment=environment)
    follow_plan(0)
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    is_last = torch.zeros(1)
    while not is_last.item():
        step += 1
        follow_plan(step)
        optimizer.zero_grad()
        model(torch.full((2, 8), float(RANK))).square().mean().backward()
        optimizer.step()
        is_last.fill_((DIRECTORY / "finish").exists())
        distributed.all_reduce(is_last)
        report("step", step=step)
        sys.stdout.write(f"rank {RANK} made step {step}\n")
    distributed.destroy_process_group()
    report("end")


if __name__ == "__main__":
    run(main)
