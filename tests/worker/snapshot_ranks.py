"""Trainings of two ranks that save each step, started again, some with the memory of a rank lost.

All ranks are forked from this process, so that torch is imported once.  Printed: what each rank of
each attempt has found, its losses, and sums of its weights and of the optimizer's moments.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch._dynamo  # here, so that no child has to import it
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.worker.snapshot_agents import PLENTY, served
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot


def model(mode: str) -> nn.Module:
    """Return a model that is the same on all ranks."""
    torch.manual_seed(3)
    found = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 1))
    if mode == "ddp":
        return DistributedDataParallel(found)
    fully_shard(found, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return found


def whole(tensor: Any) -> Any:
    """Return the whole of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(mode: str, last: int, rank: int, sock: socket.socket) -> dict[str, Any]:
    """Restore, train, save."""
    line = Channel(sock)
    line.start()
    net = model(mode)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    snapshot = Snapshot(model=net, optimizer=optimizer, rng=True, channel=line)
    torch.manual_seed(rank)
    found = snapshot.restore()
    losses = []
    for step in range(found.step + 1 if found else 0, last):
        loss = net(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        snapshot.save(step)
    snapshot.close()
    weights = [whole(one).detach().double().sum().item() for one in net.parameters()]
    moments = [whole(one["exp_avg"]).double().sum().item() for one in optimizer.state.values()]
    told = (found.step, found.source, list(found.missing)) if found else None
    return {"found": told, "losses": losses, "weights": weights, "moments": moments}


def attempt(
    agents: Sequence[SnapshotSlots], mode: str, last: int, number: int
) -> list[dict[str, Any]]:
    """Run all ranks to their end, each with an agent of its own."""
    os.environ["JOB_RESTART_COUNT"] = str(number)
    pipes = [os.pipe() for _ in agents]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for rank, one in enumerate(agents):
            sock = stack.enter_context(served(one))
            if os.fork() == 0:
                try:
                    os.environ["RANK"] = str(rank)
                    dist.init_process_group(
                        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
                    )
                    told = train(mode, last, rank, sock)
                    os.write(pipes[rank][1], json.dumps(told).encode())
                    dist.destroy_process_group()
                    os._exit(0)
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
        for _, writing in pipes:
            os.close(writing)
        found = []
        for reading, _ in pipes:
            with open(reading, "rb") as file:
                found.append(json.loads(file.read()))
        for _ in agents:
            os.wait()
    return found


def main(mode: str) -> dict[str, Any]:
    """Train without a break, with a break after three steps, and then with one memory lost."""
    torch.set_num_threads(1)
    one, other, new, unused, third = (SnapshotSlots(lambda: PLENTY) for _ in range(5))
    found = {
        "unbroken": attempt([unused, third], mode, 5, 0),
        "first": attempt([one, other], mode, 3, 0),
        "second": attempt([one, other], mode, 5, 1),
        "lost": attempt([one, new], mode, 5, 2),
    }
    for memory in (one, other, new, unused, third):
        memory.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
