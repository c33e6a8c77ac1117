"""Lower bound of a recovery: the time of the benchmark's own script without any fault.

Living ranks with their imports done repeat one round: a new process group, model, optimizer and
DDP, and one complete step.  `recovery.py` counts all of that after a kill.

    .venv/bin/python benchmarks/recovery_floor.py --rounds 20
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
from arguments import count
from recovery_launch import free_port
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from train_step import DEFAULTS, build, learn

PARTS = ("join", "build", "ddp", "first step", "second step")
UNCOUNTED = 2
"""Rounds that are not counted, since everything is done for the first time."""


def once(parameters: int) -> list[float]:
    """Run one round; return the times at which it began and each part ended."""
    at = [time.perf_counter()]
    distributed.init_process_group("gloo")
    at.append(time.perf_counter())
    model = build(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    at.append(time.perf_counter())
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    at.append(time.perf_counter())
    for _ in range(2):
        learn(parallel, optimizer, DEFAULTS["batch"])
        at.append(time.perf_counter())
    # The last to hold a group must not be DDP: its destructor would wait with the GIL for a thread
    # of gloo that waits for the GIL (torch 2.13).
    del parallel, optimizer, model
    distributed.destroy_process_group()
    return at


def run(rank: int, ports: list[int], parameters: int, meet: Any, results: Any) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    for port in ports:
        meet.wait()
        os.environ.update(RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        results.put((port, once(parameters)))


def main() -> None:
    """Print milliseconds of each part of its slowest rank, and of the whole round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--parameters", type=count, default=DEFAULTS["parameters"])
    parser.add_argument("--rounds", type=count, default=20)
    options = parser.parse_args()
    ports = [free_port() for _ in range(options.rounds + UNCOUNTED)]
    os.environ["WORLD_SIZE"] = str(options.ranks)
    context = multiprocessing.get_context("fork")
    meet, results = context.Barrier(options.ranks), context.Queue()
    ranks = [
        context.Process(target=run, args=(rank, ports, options.parameters, meet, results))
        for rank in range(options.ranks)
    ]
    for one in ranks:
        one.start()
    told = [results.get() for _ in range(options.ranks * len(ports))]
    for one in ranks:
        one.join()
    rounds = [[at for port, at in told if port == wanted] for wanted in ports[UNCOUNTED:]]
    for number, part in enumerate(PARTS):
        slowest = [max(at[number + 1] - at[number] for at in each) for each in rounds]
        print(f"{part:12} {1000 * statistics.median(slowest):7.1f} ms")
    whole = [max(at[4] for at in each) - min(at[0] for at in each) for each in rounds]
    print(f"{'to the first step':17} {1000 * statistics.median(whole):.1f} ms, p50 of {len(whole)}")


if __name__ == "__main__":
    main()
