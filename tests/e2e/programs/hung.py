"""Worker of the tests of hangs: training over gloo like DDP, in which rank 3 hangs for good.

Files in DIRECTORY select the behaviour. With `told` every rank reports its steps; otherwise rank 0
only prints a line for each. In the first attempt, with `gil` a thread of rank 3 takes the GIL for
ever, and with `sleep` rank 3 sleeps for ever. With `rest` rank 0 works at something of its own for
REST_SECONDS, and then makes the file `rested`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import torch
from gang import ATTEMPT, DIRECTORY, RANK, follow_plan, lock, report, run
from torch import distributed

from unbroken import worker

STEP_SECONDS = 0.25
REST_SECONDS = 20.0
"""Twice the time in which a hang of ranks that report steps is found (docs/detectors.md)."""


def keep_gil() -> None:
    """Take the GIL with this thread, and never give it back."""
    ctypes.PyDLL(None).pause()


def hang() -> None:
    """Hang or rest, as the files in DIRECTORY select."""
    if RANK == 3 and ATTEMPT == 0 and (DIRECTORY / "gil").exists():
        threading.Thread(target=keep_gil, name="holder", daemon=True).start()
    if RANK == 3 and ATTEMPT == 0 and (DIRECTORY / "sleep").exists():
        while True:
            time.sleep(3600)
    rested = DIRECTORY / "rested"
    if RANK == 0 and (DIRECTORY / "rest").exists() and not rested.exists():
        end = time.monotonic() + REST_SECONDS
        while time.monotonic() < end:
            evaluate()
        rested.touch()


def evaluate() -> None:
    """Compute, write and wait a little, as an evaluation does."""
    sum(number * number for number in range(200_000))
    (DIRECTORY / "scores").write_bytes(os.urandom(1 << 18))
    time.sleep(0.05)


def main() -> None:
    """Train until DIRECTORY/finish exists."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    report("start", others=lock(), agent=os.getppid(), environment=environment)
    distributed.init_process_group("gloo")
    step, is_last = 0, torch.zeros(1)
    while not is_last.item():
        step += 1
        follow_plan(step)
        time.sleep(STEP_SECONDS)
        hang()
        is_last.fill_((DIRECTORY / "finish").exists())
        distributed.all_reduce(is_last)
        if (DIRECTORY / "told").exists():
            worker.progress(step)
        elif RANK == 0:
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
        report("step", step=step)
    distributed.destroy_process_group()
    report("end")


if __name__ == "__main__":
    run(main)
