"""Training script of `restarts.py`: DDP on a device, with a snapshot and a report after each step.

It reports to the socket BENCH_SOCKET, and runs on BENCH_DEVICE with BENCH_BACKEND. Data are a
function of step and rank, so the weights after a step do not depend on restarts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import zlib
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unbroken import worker

DEVICE, BACKEND = os.environ["BENCH_DEVICE"], os.environ["BENCH_BACKEND"]
WIDTH, BATCH, HELD = 256, 32, 1 << 20
PAUSE_SECONDS = 0.01
_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def report(what: str, **values: Any) -> None:
    """Send a report to the benchmark."""
    where = worker.context()
    told = {"what": what, "rank": where.rank, "attempt": where.attempt, "pid": os.getpid()}
    line = json.dumps({**told, "at": time.monotonic(), **values})
    _socket.sendto(line.encode(), os.environ["BENCH_SOCKET"])


def device() -> torch.device:
    """Return the device of this rank."""
    if DEVICE == "cpu":
        return torch.device("cpu")
    number = worker.context().local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


held: dict[str, torch.Tensor] = {}
"""Tensors on the device that live as long as the process, over all attempts."""


def memory(where: torch.device) -> tuple[int, bool]:
    """Return the address of the tensor on the device, and whether its values are unchanged."""
    made = torch.arange(HELD, device=where)
    kept = held.setdefault("tensor", made)
    return kept.data_ptr(), torch.equal(kept, torch.arange(HELD, device=where))


@worker.restartable
def train() -> None:
    """Train one attempt."""
    where = device()
    address, is_intact = memory(where)
    dist.init_process_group(BACKEND)
    report("joined", address=address, is_intact=is_intact)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    ).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = DistributedDataParallel(model)
    snapshot = worker.Snapshot(model=model, optimizer=optimizer)
    found = snapshot.restore()
    for step in range(found.step + 1 if found else 0, sys.maxsize):
        batch = torch.full((BATCH, WIDTH), (step % 97 + dist.get_rank()) / 97.0, device=where)
        optimizer.zero_grad()
        (parallel(batch) - batch).square().mean().backward()
        optimizer.step()
        snapshot.save(step)
        weights = torch.cat([one.detach().flatten() for one in model.parameters()]).cpu()
        worker.progress(step)
        report("step", step=step, checksum=zlib.crc32(memoryview(weights.numpy())))
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    report("began")
    train()
