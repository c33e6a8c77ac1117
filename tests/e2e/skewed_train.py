"""Worker of `test_rank_skew.py`: after a restart one rank joins seconds after the others.

SLOW_RANKS names it for each attempt, -1 for none; the last of them is the last attempt.
Reports to the pipe EVENTS that it met the others (the sum of what all ranks gave), or could not.
With torchrun in place of our agent: `EVENTS=/dev/stdout SLOW_RANKS=-1,0 torchrun
--nproc-per-node=4 --max-restarts=9 skewed_train.py`, then `kill -9` of one worker.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import distributed

SKEW_SECONDS = 3.0


def main() -> None:
    """Meet the other ranks; stay with them until killed, but end in the last attempt."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    event = {"rank": rank, "attempt": attempt, "pid": os.getpid()}
    event["master"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

    def report(**more: object) -> None:
        with open(os.environ["EVENTS"], "a") as events:
            events.write(json.dumps({**event, **more}) + "\n")

    slow_ranks = [int(slow) for slow in os.environ["SLOW_RANKS"].split(",")]
    if attempt < len(slow_ranks) and rank == slow_ranks[attempt]:
        time.sleep(SKEW_SECONDS)
    given = torch.tensor([float(attempt), float(os.getpid())], dtype=torch.float64)
    try:
        distributed.init_process_group("gloo")
        distributed.all_reduce(given)
    except RuntimeError as error:
        report(failed=str(error)[:500])
        sys.exit(1)
    report(attempts=given[0].item(), pids=given[1].item())
    while attempt < len(slow_ranks) - 1:
        distributed.all_reduce(torch.ones(1))
        time.sleep(0.01)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
