"""`train_step.py` for torchft: each rank is its own replica group, as in its example of DDP.

Ranks that survive continue without the lost one. A rank that returns gets the state from one of
them.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import train_step


def main() -> None:
    """Train until killed."""
    wanted = train_step.settings()
    group = int(os.environ["REPLICA_GROUP_ID"])
    report = train_step.Reporter(train_step.DIRECTORY, group)
    report.begin()
    import torch
    import torchft
    from torch import nn

    report("imported", time.time())
    torch.set_num_threads(1)
    model = train_step.build(wanted["parameters"])
    plain = torch.optim.SGD(model.parameters(), lr=0.001)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        plain.load_state_dict(found["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"rank_{group}",
        timeout=timedelta(seconds=30),
    )
    report("joined", time.time())
    parallel = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, plain)
    report("restored", time.time())
    width = model[0].in_features
    while True:
        report.pace(wanted["idle_seconds"])
        optimizer.zero_grad()
        batch = torch.randn(wanted["batch"], width)
        nn.functional.mse_loss(parallel(batch), batch).backward()  # type: ignore[no-untyped-call]
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            report.step(manager.current_step())


if __name__ == "__main__":
    main()
