"""Worker that knows no more than the environment that the agent's documentation promises.

Rank 0 listens at MASTER_ADDR:MASTER_PORT and the others connect; then each writes what it is to
DIRECTORY, rank 0 prints the line of this attempt, and all wait for DIRECTORY/finish.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

DIRECTORY, NAMES = Path(sys.argv[1]), ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")
RANK, WORLD, ATTEMPT = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "JOB_RESTART_COUNT"))
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def meet() -> None:
    """Return when all ranks are there."""
    if RANK == 0:
        with socket.create_server(MASTER) as server:
            peers = [server.accept()[0] for _ in range(WORLD - 1)]
            for peer in peers:
                peer.sendall(b"go")
        return
    while True:
        try:
            with socket.create_connection(MASTER, timeout=60) as peer:
                peer.recv(2)
                return
        except ConnectionRefusedError:
            time.sleep(0.02)


def main() -> None:
    """Train, as far as an agent can see."""
    signal.signal(signal.SIGUSR1, lambda *_: (DIRECTORY / f"asked-{RANK}").touch())
    meet()
    told = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid()}
    path = DIRECTORY / f"attempt-{ATTEMPT}-{RANK}"
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)
    say = DIRECTORY / f"say-{ATTEMPT}"
    if RANK == 2 and say.exists():
        sys.stdout.write(say.read_text())
        sys.stdout.flush()
    while not (DIRECTORY / "finish").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
