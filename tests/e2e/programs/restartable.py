"""Worker whose function leaves its training on a job fault and is called again; without torch.

It sends all events to EVENTS, a socket of the test. The job ends when DIRECTORY/finish exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from unbroken import worker

STEP_SECONDS = 0.02
BATCH = 8
seen = 0
"""Number of samples; like a loader outside of the function, it survives a restart."""
_events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def report(what: str, **more: object) -> None:
    """Report to the test, with the values of the environment now."""
    environment = os.environ
    event = {
        "what": what,
        "attempt": int(environment["TORCHELASTIC_RESTART_COUNT"]),
        "rank": int(environment["RANK"]),
        "pid": os.getpid(),
        "master": f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        "at": time.clock_gettime(time.CLOCK_BOOTTIME),
    }
    _events.sendto(json.dumps({**event, **more}).encode(), "\0" + environment["EVENTS"])


@worker.restartable
def train(directory: Path) -> None:
    """Make steps until DIRECTORY/finish exists."""
    global seen
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    report("start", environment={name: os.environ.get(name) for name in names})
    step = 0
    while not (directory / "finish").exists():
        step += 1
        time.sleep(STEP_SECONDS)
        seen += BATCH
        worker.progress(step, samples=seen)
        report("step", step=step, seen=seen)
    report("end")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
