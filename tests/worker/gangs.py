"""Ranks that really train and really die, and a small agent that speaks their protocol."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tests.watching import PATIENCE_SECONDS
from unbroken.agent.ports import OfferedPorts
from unbroken.wire.ipc import AT_BARRIER, INIT, JOB_FAULT, JOB_START, VARIABLE, Frames, encode

RANKS = Path(__file__).with_name("restart_ranks.py")


class Socket:
    """The agent's socket, with a thread for each connection."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gang")
        self.path = f"{self._directory.name}/agent"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self.connections: dict[int, socket.socket] = {}
        """Newest connection of each local rank."""
        self._told: dict[tuple[int, str], queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def told(self, rank: int, kind: str) -> queue.SimpleQueue[dict[str, Any]]:
        """Return the queue of a local rank's messages of one type."""
        with self._lock:
            return self._told.setdefault((rank, kind), queue.SimpleQueue())

    def say(self, rank: int, kind: str, **values: Any) -> None:
        """Send a message to a local rank."""
        if rank not in self.connections:
            # Its introduction is on its way.
            self.told(rank, INIT).get(timeout=PATIENCE_SECONDS)
        # A rank that ended by itself is reported at the barrier.
        with suppress(OSError):
            self.connections[rank].sendall(encode({"type": kind, **values}))

    def close(self) -> None:
        """Close all connections; a second call has no effect."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for sock in self.connections.values():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._directory.cleanup()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(sock,)).start()

    def _read(self, sock: socket.socket) -> None:
        frames = Frames()
        with sock, suppress(OSError):
            while data := sock.recv(65536):
                for message in frames.feed(data):
                    rank = message["local_rank"]
                    self.connections[rank] = sock
                    self.told(rank, message["type"]).put(message)
        for rank, newest in self.connections.items():
            if newest is sock:
                self.told(rank, AT_BARRIER).put({"ended": sock})


class Gang:
    """Ranks of one job on one node."""

    def __init__(self, orders: IO[str], reports: IO[str], size: int) -> None:
        self._orders, self._lines = orders, reports
        self.size = size
        self.socket = Socket()
        self.attempt = 0
        self.pids = [0] * size
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._forked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.seen: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.order: dict[str, Any] = {"action": "reduce"}
        self.ports = OfferedPorts()
        self.port = self.ports.next(None)

    def start(self, *ranks: int, **order: Any) -> None:
        """Start all ranks, or some; `order` stays in force for all later attempts."""
        self.order |= order
        for rank in ranks or range(self.size):
            self._start(rank)

    def park(self) -> None:
        """Fork a process for the next rank that is lost."""
        self._tell("park\n")

    def kill(self, *ranks: int) -> None:
        """Kill ranks with SIGKILL."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def fault(self, *survivors: int, **more: float) -> None:
        """Send the survivors a job fault, so that they leave the attempt."""
        for rank in survivors:
            self.socket.say(rank, JOB_FAULT, restart_count=self.attempt + 1, **more)

    def arrive(self, *survivors: int) -> list[int]:
        """Wait until survivors are at the barrier.

        Return the ranks that have ended instead, as a rank does that gloo holds.
        """
        ended = []
        for rank in survivors:
            said = self.socket.told(rank, AT_BARRIER).get(timeout=PATIENCE_SECONDS)
            while said.get("ended", self) not in (self, self.socket.connections[rank]):
                said = self.socket.told(rank, AT_BARRIER).get(timeout=PATIENCE_SECONDS)
            ended += [rank] if "ended" in said else []
        return ended

    def resume(self, survivors: Sequence[int], lost: Sequence[int]) -> None:
        """Start the next attempt."""
        self.attempt, self.port = self.attempt + 1, self.ports.next(None)
        for rank in lost:
            self._start(rank)
        for rank in survivors:
            self.socket.say(rank, JOB_START, worker_envs=self._environ(rank))

    def recover(self, *lost: int) -> list[int]:
        """Recover from the loss of dead ranks; return the ranks that kept their process."""
        survivors = [rank for rank in range(self.size) if rank not in lost]
        self.fault(*survivors)
        ended = self.arrive(*survivors)
        kept = [rank for rank in survivors if rank not in ended]
        self.resume(kept, [*lost, *ended])
        return kept

    def until(self, what: str, *ranks: int) -> list[dict[str, Any]]:
        """Wait until these ranks, or all, report `what` in this attempt; return the reports.

        Other reports are kept in `seen`.
        """
        wanted, found = set(ranks or range(self.size)), []
        while wanted:
            report = self._reports.get(timeout=PATIENCE_SECONDS)
            self.seen.append(report)
            if (report["what"], report["attempt"]) == (what, self.attempt):
                wanted.discard(report["rank"])
                found.append(report)
        return found

    def close(self) -> None:
        """End all processes."""
        for pid in filter(None, self.pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._orders.close()
        self._reader.join()
        self._lines.close()
        self.socket.close()
        self.ports.close()

    def _start(self, rank: int) -> None:
        order = {**self.order, "environ": self._environ(rank)}
        self._tell(json.dumps(order) + "\n")
        self.pids[rank] = self._forked.get(timeout=PATIENCE_SECONDS)

    def _tell(self, line: str) -> None:
        self._orders.write(line)
        self._orders.flush()

    def _environ(self, rank: int) -> dict[str, str]:
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size,
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port,
                  "JOB_RESTART_COUNT": self.attempt, VARIABLE: self.socket.path}  # fmt: skip
        return {name: str(value) for name, value in values.items()}

    def _read(self) -> None:
        while line := self._lines.readline():
            report = json.loads(line)
            if report["what"] == "forked":
                self._forked.put(report["pid"])
            else:
                self._reports.put(report)


@contextmanager
def templates() -> Iterator[IO[str]]:
    """Yield the pipe on which to request a gang's template.

    The process behind it imports torch once for all gangs.
    """
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(RANKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdin is not None
        yield process.stdin


@contextmanager
def gang(asked: IO[str], folder: Path, size: int) -> Iterator[Gang]:
    """Yield a gang in which no rank has started."""
    for name in ("orders", "reports"):
        os.mkfifo(folder / name)
    asked.write(f"{folder}\n")
    asked.flush()
    with open(folder / "orders", "w") as orders, open(folder / "reports") as reports:
        made = Gang(orders, reports, size)
        try:
            yield made
        finally:
            made.close()
