"""Adds numbers up over all ranks, step by step, and resumes from its state: `STATE FIFO STEPS`.

Rank 0 keeps the number of steps in STATE and reports each one through FIFO.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    state, told, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    step = int(state.read_text()) if state.exists() else 0
    sys.stdout.write(f"rank {rank} of {world} begins at {step}\n")
    while step < last:
        total = torch.full((), rank + 1.0)
        dist.all_reduce(total)
        assert total.item() == world * (world + 1) / 2
        step += 1
        dist.barrier()
        if rank == 0:
            state.with_suffix(".new").write_text(str(step))
            state.with_suffix(".new").rename(state)
            with open(told, "w") as pipe:
                pipe.write(f"{step}\n")
        time.sleep(0.05)
    dist.barrier()
    sys.stdout.write(f"rank {rank} of {world} ends at {step}\n")
    dist.destroy_process_group()


main()
