"""`train_step.py` under the in-process wrapper of nvidia-resiliency-ext, with reserve ranks.

The wrapper replaces no process: a waiting reserve rank takes the place of a lost rank.  It aborts
NCCL groups only.  On gloo, a rank without a lost neighbour stays in its collective until the hard
timeout ends its process, by default after 90 s.  Both timeouts are lowered here.  The store of the
process groups is made once, as the wrapper's guide advises.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import train_step

SOFT_SECONDS, HARD_SECONDS = 5, 8


def main() -> None:
    """Train, or wait to take a place."""
    wanted = train_step.settings()
    report = train_step.Reporter(train_step.DIRECTORY)
    from nvidia_resiliency_ext import inprocess
    from torch import distributed

    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    port = int(os.environ["UNBROKEN_BENCH_STORE_PORT"])
    store = distributed.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)

    def run(call: Any = None) -> None:
        own: Any = distributed.PrefixStore(f"group-{call.iteration}", store)
        train_step.train(report, wanted, own)

    run.__annotations__["call"] = inprocess.CallWrapper
    places = inprocess.rank_assignment
    seconds = {"soft_timeout": SOFT_SECONDS, "hard_timeout": HARD_SECONDS}
    timeouts: Any = {name: timedelta(seconds=value) for name, value in seconds.items()}
    active = places.MaxActiveWorldSize(int(wanted["ranks"]))
    assignment = inprocess.Compose(active, places.ShiftRanks())
    inprocess.Wrapper(rank_assignment=assignment, **timeouts)(run)()


if __name__ == "__main__":
    main()
