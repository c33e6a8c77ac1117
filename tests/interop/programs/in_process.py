"""Worker that stays over a fault, by the client library that comes with HyperPod's own agent.

Everything that happens is sent to EVENTS, a socket of the test.  The job ends when DIRECTORY/finish
is there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from hyperpod_elastic_agent.ipc.client import InProcessRestartSocketClient

STEP_SECONDS = 0.02
NAMES = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
_events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def report(what: str, **more: object) -> None:
    """Report to the test, with the values of the environment now."""
    environment = os.environ
    event = {
        "what": what,
        "attempt": int(environment["JOB_RESTART_COUNT"]),
        "rank": int(environment["RANK"]),
        "pid": os.getpid(),
        "master": f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        "at": time.clock_gettime(time.CLOCK_BOOTTIME),
    }
    _events.sendto(json.dumps({**event, **more}).encode(), "\0" + environment["EVENTS"])


def watch(client: InProcessRestartSocketClient, fault: threading.Event) -> None:
    """Set `fault` whenever the agent says that the others are to be waited for."""
    while True:
        client.hyperpod_wait_fault()
        fault.set()


def train(directory: Path, fault: threading.Event) -> bool:
    """Make steps; return True once DIRECTORY/finish exists, or False after a fault."""
    step = 0
    while not (directory / "finish").exists():
        if fault.is_set():
            return False
        step += 1
        time.sleep(STEP_SECONDS)
        report("step", step=step)
    return True


def main() -> None:
    """Wait for a rank, train, and wait again after each fault."""
    client, fault = InProcessRestartSocketClient(), threading.Event()
    threading.Thread(target=watch, args=(client, fault), daemon=True).start()
    is_over = False
    while not is_over:
        fault.clear()
        _, told = client.hyperpod_barrier()
        os.environ.update(told["worker_envs"])
        table = [one["ip"] for one in told["aggregate_worker_data"]["rank_ips"]]
        environment = {name: os.environ.get(name) for name in NAMES}
        report("start", agent=os.getppid(), table=table, environment=environment)
        client.hyperpod_past_rcb_barrier()
        is_over = train(Path(sys.argv[1]), fault)
    report("end")


if __name__ == "__main__":
    main()
