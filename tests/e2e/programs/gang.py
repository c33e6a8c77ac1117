"""Worker of the job tests that behaves as torch's, but without torch, so that it starts at once.

Rank 0 listens at MASTER_ADDR:MASTER_PORT, the others connect, and all make each step together. A
rank that loses a peer fails with the words of gloo. It sends all events to EVENTS, a socket of the
test. A worker locks a file of its attempt, and the kernel drops the lock with the process. So each
worker sees whether a process of another attempt lives.

PLAN is a list of `{"attempt", "rank", "step", "do", "value"}`: an action before that step, in any
attempt or rank if none is named. Step 0 is the meeting. The job ends when DIRECTORY/finish exists.
With PROGRESS, each step is reported by the library for scripts, too.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.02
PATIENCE_SECONDS = 60.0
FLOCK = "hhqqi"  # struct flock (fcntl.h): type, whence, start, length, pid
LOST = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [{}]"

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
DIRECTORY = Path(sys.argv[1])
_events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
_kept: list[Peer] = []


class Peer:
    """A connection to another rank; closed by the end of the process, as torch's are."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_SECONDS)
        self._socket = connection
        self._lines = connection.makefile("rb")
        self._name = "{}:{}".format(*connection.getpeername())
        _kept.append(self)

    def receive(self) -> bytes:
        """Return one line; raise an error if the peer has gone."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise RuntimeError(LOST.format(self._name))
        return line

    def close(self) -> None:
        """Close the connection before the process ends."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, line: bytes) -> None:
        """Send one line; raise an error if the peer has gone."""
        try:
            self._socket.sendall(line)
        except ConnectionError:
            raise RuntimeError(LOST.format(self._name)) from None


def report(what: str, **more: object) -> None:
    """Send a report to the test."""
    event = {"what": what, "attempt": ATTEMPT, "rank": RANK, "pid": os.getpid()}
    event["master"] = "{}:{}".format(*MASTER)
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    text = json.dumps({**event, "at": at, **more}).encode()
    _events.sendto(text, "\0" + os.environ["EVENTS"])


def lock() -> list[str]:
    """Hold the lock of this attempt until death; return the attempts of which a process lives."""
    own = DIRECTORY / f"attempt-{ATTEMPT}-{MASTER[0]}-{MASTER[1]}.lock"
    file = os.open(own, os.O_RDWR | os.O_CREAT)
    fcntl.lockf(file, fcntl.LOCK_SH)
    return [
        f"{path.stem}: {pid}"
        for path in DIRECTORY.glob("attempt-*.lock")
        if path != own and (pid := holder(path))
    ]


def holder(path: Path) -> int:
    """Return a process that holds the lock; 0: none."""
    with path.open("rb+") as file:
        wish = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wish))
    return 0 if found[0] == fcntl.F_UNLCK else found[4]


def leave_family() -> None:
    """Leave behind a process that neither a signal to the group nor a hang-up reaches."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            report("daemon", others=lock())
            signal.sigwait([signal.SIGINT])
        os._exit(0)
    os.wait()


def linger(seconds: float) -> None:
    """Delay the end of the process after its connections are closed, as work on a GPU does."""
    for peer in _kept:
        peer.close()
    time.sleep(seconds)


def follow_plan(step: int) -> None:
    """Carry out the actions that the plan has for this step."""
    for order in json.loads(os.environ.get("PLAN", "[]")):
        is_mine = order.get("rank", RANK) == RANK and order.get("attempt", ATTEMPT) == ATTEMPT
        if not is_mine or order["step"] != step:
            continue
        match order["do"]:
            case "raise":
                raise ValueError(order["value"])
            case "linger":
                atexit.register(linger, order["value"])
            case "exit":
                report("exit", code=order["value"])
                os._exit(order["value"])
            case "sleep":
                time.sleep(order["value"])
            case "daemon":
                leave_family()
            case "print":
                sys.stdout.write(f"{order['value']}\n")
                sys.stdout.flush()


def listen() -> list[Peer]:
    """Wait for all others, as rank 0."""
    peers: list[Peer] = []
    with socket.create_server(MASTER, backlog=WORLD) as server:
        server.settimeout(PATIENCE_SECONDS)
        while len(peers) < WORLD - 1:
            peer = Peer(server.accept()[0])
            hello = json.loads(peer.receive())
            if hello["attempt"] != ATTEMPT:
                report("stranger", hello=hello)
            peers.append(peer)
    return peers


def connect() -> list[Peer]:
    """Find rank 0, which may start later, as another rank."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            peer = Peer(socket.create_connection(MASTER, timeout=PATIENCE_SECONDS))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(STEP_SECONDS)
        else:
            peer.send(json.dumps({"attempt": ATTEMPT, "rank": RANK}).encode() + b"\n")
            return [peer]


def step_together(peers: list[Peer]) -> bool:
    """Make one step with all others; return whether it was the last."""
    if RANK != 0:
        peers[0].send(b"here\n")
        return peers[0].receive() == b"end\n"
    for peer in peers:
        peer.receive()
    is_last = (DIRECTORY / "finish").exists()
    for peer in peers:
        peer.send(b"end\n" if is_last else b"go\n")
    time.sleep(STEP_SECONDS)
    return is_last


def main() -> None:
    """Train until DIRECTORY/finish exists."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment: dict[str, Any] = {name: os.environ.get(name) for name in names}
    report("start", others=lock(), agent=os.getppid(), environment=environment)
    follow_plan(0)
    peers = listen() if RANK == 0 else connect()
    step = 0
    is_last = False
    while not is_last:
        step += 1
        follow_plan(step)
        is_last = step_together(peers)
        report("step", step=step)
        if "PROGRESS" in os.environ:
            from unbroken import worker

            worker.progress(step)
        # A line that recurs shows that training has resumed.
        sys.stdout.write(f"rank {RANK} made step {step}\n")
    report("end")


def run(program: Callable[[], None]) -> None:
    """Run a program. If it fails, its connections close only when the process ends.

    Then no peer can fail before its agent has seen the end of the process: the first one to end is
    certain.
    """
    try:
        program()
    except (RuntimeError, ValueError, OSError):
        traceback.print_exc()
        atexit._run_exitfuncs()
        os._exit(1)


if __name__ == "__main__":
    run(main)
