"""Seconds that torch's own rendezvous needs to bring N nodes together, for `control_plane.py`.

    python benchmarks/control_plane_rendezvous.py [--nodes 8,16,32,64,128] [--bound-seconds N]

The nodes are threads of one process, each with a handler of torch's c10d rendezvous, as each
torchrun has; the store is a TCPStore, as with `--rdzv-backend c10d`.  A round is what follows a
failure: all come to the rendezvous at once, and are through when the last one knows its rank.  The
time that torchrun takes to notice the failure and to end its workers is not in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

from arguments import count, output_file
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

RUN = "bench"


def handler(port: int, nodes: int) -> DynamicRendezvousHandler:
    """The rendezvous handler of one node, with its own connection to the store."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    backend = C10dRendezvousBackend(store, RUN)
    return DynamicRendezvousHandler.from_backend(
        RUN, store, backend, min_nodes=nodes, max_nodes=nodes, local_addr="127.0.0.1"
    )


def rounds(nodes: int, times: int, bound_seconds: float) -> list[float]:
    """Seconds of each round that ended within the bound."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handlers = [handler(server.port, nodes) for _ in range(nodes)]
    found: list[float] = []
    for _ in range(times):
        through = threading.Semaphore(0)
        threads = [
            threading.Thread(target=_join, args=(one, through), daemon=True) for one in handlers
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for _ in threads:
            left = began + bound_seconds - time.monotonic()
            if not through.acquire(timeout=max(0.0, left)):
                return found
        found.append(time.monotonic() - began)
    return found


def _join(one: DynamicRendezvousHandler, through: threading.Semaphore) -> None:
    one.next_rendezvous()
    through.release()


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="8,16,32,64,128")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--bound-seconds", type=float, default=120.0)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[int, Any] = {}
    for nodes in map(int, options.nodes.split(",")):
        began = time.process_time()
        seconds = rounds(nodes, options.rounds, options.bound_seconds)
        used = time.process_time() - began
        found[nodes] = {"seconds": seconds, "cpu_seconds": used}
        if not seconds:
            print(f"{nodes} nodes: not together within {options.bound_seconds:g} s", flush=True)
            break
        median, each = statistics.median(seconds), used / len(seconds)
        print(f"{nodes} nodes: p50 {median:.2f} s, {each:.2f} s of processor time", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    # Threads of handlers that are still waiting would hold the process.
    os._exit(0)


if __name__ == "__main__":
    main()
