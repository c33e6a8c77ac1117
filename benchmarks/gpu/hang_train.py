"""Training script of `hangs.py`: one collective completes, and the next one never does.

With several ranks, the last rank does not enter the second collective. A single rank keeps its
device busy before it.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import distributed as dist

BUSY_CYCLES = 1 << 42
"""Clock cycles that keep a GPU busy for more than half an hour."""


def main() -> None:
    """Run both collectives; the process hangs until it is killed."""
    device = torch.device("cpu")
    if os.environ["BENCH_DEVICE"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda")
    dist.init_process_group(os.environ["BENCH_BACKEND"])
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    assert tensor[0].item() == dist.get_world_size()
    os.write(1, b"hangs now\n")
    if dist.get_world_size() == 1:
        torch.cuda._sleep(BUSY_CYCLES)
    elif dist.get_rank() == dist.get_world_size() - 1:
        threading.Event().wait()
    dist.all_reduce(tensor)
    tensor[0].item()


if __name__ == "__main__":
    main()
