"""`train_step.py` under the in-process wrapper of nvidia-resiliency-ext, with reserve ranks.

The wrapper replaces no process: where a rank is lost, one of those that wait takes its place.  Its
settings are its defaults.  The store of the process groups is made once, as its guide advises.
"""

from __future__ import annotations

import os
from typing import Any

import train_step


def main() -> None:
    """Train, or wait to take a place."""
    wanted = train_step.settings()
    report = train_step.Reporter(train_step.DIRECTORY)
    from nvidia_resiliency_ext import inprocess
    from torch import distributed

    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    port = int(os.environ["UNBROKEN_BENCH_STORE_PORT"])
    store = distributed.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)

    def run(call: Any) -> None:
        own: Any = distributed.PrefixStore(f"group-{call.iteration}", store)
        train_step.train(report, wanted, own)

    run.__annotations__["call"] = inprocess.CallWrapper
    places = inprocess.rank_assignment
    active = places.MaxActiveWorldSize(int(wanted["ranks"]))
    inprocess.Wrapper(rank_assignment=inprocess.Compose(active, places.ShiftRanks()))(run)()


if __name__ == "__main__":
    main()
