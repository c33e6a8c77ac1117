"""Worker that trains on numbered samples, and counts in its model how often it saw each.

The counts are part of the state that is restored. So at the end they say what the model was trained
on, whatever was repeated in between. `--kills N`: in each of the first N attempts one rank kills
itself at a random moment of a random step. Each rank writes its counts to FOLDER/end-RANK.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from epochs_data import KINDS
from torch import distributed, nn

from unbroken import worker

MOMENT_SECONDS = 0.03
"""Latest moment of a kill after its step began: about as long as two steps take."""


def options() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="map")
    parser.add_argument("--mode", choices=["snapshot", "in-process", "disk"], default="snapshot")
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop", type=int, default=-1, help="end after this step")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--loader-processes", type=int, default=2)
    return parser.parse_args()


class Counting(nn.Module):
    """A model that counts the samples it is trained on, by epoch."""

    def __init__(self, epochs: int, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen = nn.Buffer(torch.zeros(epochs, size, dtype=torch.int64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        found: torch.Tensor = self.layer(numbers[:, None].float() / 1000).square().mean()
        return found

    def count(self, epoch: int, numbers: torch.Tensor) -> None:
        """Count the samples of all ranks."""
        new = torch.bincount(numbers, minlength=self.seen.shape[1])
        distributed.all_reduce(new)
        self.seen[epoch] += new


def maybe_die(settings: argparse.Namespace, made: int) -> None:
    """Kill one rank at a random moment of a random step of this attempt."""
    where = worker.context()
    chance = random.Random(f"{settings.kind} {settings.mode} {where.attempt}")
    rank, step = chance.randrange(where.world_size), chance.randint(1, 6)
    if where.attempt < settings.kills and (rank, step) == (where.rank, made):

        def kill() -> None:
            time.sleep(chance.uniform(0, MOMENT_SECONDS))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


def train(settings: argparse.Namespace, data: Any) -> None:
    """Train from the newest state on, and write the counts."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = Counting(settings.epochs, settings.size)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": data}
    saved = worker.checkpoints(settings.folder / "checkpoints", every=3)
    snapshot = None if settings.mode == "disk" else worker.Snapshot(**parts, checkpoints=saved)
    found: Any = snapshot.restore() if snapshot else saved.restore(**parts)
    step = found.step + 1 if found else 0
    first = step
    parallel = nn.parallel.DistributedDataParallel(model)
    for epoch in range(data.epoch, settings.epochs):
        for numbers in data:
            maybe_die(settings, step - first)
            optimizer.zero_grad()
            parallel(numbers).backward()
            optimizer.step()
            model.count(epoch, numbers)
            if snapshot:
                snapshot.save(step)
            if saved.is_due(step):
                saved.save(step, **parts)
            worker.progress(step, samples=data.samples)
            if step == settings.stop:
                break
            step += 1
        if step == settings.stop:
            saved.wait()
            saved.save(step, **parts)
            break
    saved.wait()
    told = {
        "seen": model.seen.tolist(),
        "samples": data.samples,
        "attempt": worker.context().attempt,
    }
    rank = distributed.get_rank()
    (settings.folder / f"end-{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


def main() -> None:
    """Train in the mode that the options say."""
    settings = options()
    (settings.folder / "checkpoints").mkdir(exist_ok=True)
    data = worker.data(KINDS[settings.kind](settings.size, settings.loader_processes))
    again = worker.restartable(train) if settings.mode == "in-process" else train
    again(settings, data)


if __name__ == "__main__":
    main()
