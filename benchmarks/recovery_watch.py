"""Sees from outside, the same way for every launcher, what becomes of the workers of a job.

Workers report through a named pipe (`train_step.py`), their ends come through pidfds, the lines of
the launchers through their standard error.  All are stamped as they are read.  Polled is only what
the kernel has no event for: whether a dead worker's exit status was collected.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

REAP_LOOK_SECONDS = 0.001


@dataclass
class Worker:
    """One process of one rank."""

    rank: int
    pid: int
    pidfd: int
    process_at: float
    began_at: float
    imported_at: float | None = None
    joined_at: float | None = None
    """It is in the process group, whose store and ranks it has found."""
    first_step_at: float | None = None
    first_step_cpu_seconds: float | None = None
    """Processor time that it took up to there."""
    steps: int = 0
    died_at: float | None = None
    reaped_at: float | None = None

    def look_reaped(self) -> None:
        """Note it if nobody but history knows the process any more."""
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            self.reaped_at = time.time()


@dataclass
class Watch:
    """The workers of one job, and the gate that lets them run."""

    directory: Path
    on_line: Callable[[str, float], None] = lambda line, at: None
    workers: list[Worker] = field(default_factory=list)
    newest: dict[int, Worker] = field(default_factory=dict)
    """By rank."""

    def open(self) -> None:
        """Make the pipe and the gate, closed."""
        self.directory.mkdir(parents=True)
        os.mkfifo(self.directory / "records")
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        pipe = os.open(self.directory / "records", os.O_RDWR | os.O_NONBLOCK)
        self._follow(os.fdopen(pipe, "rb", buffering=0), self._record)
        self._gate = self._stack.enter_context((self.directory / "gate").open("w"))

    def close(self) -> None:
        """Let go of everything; workers that still live end at their next report."""
        for worker in self.workers:
            os.close(worker.pidfd)
        self._stack.close()

    def follow_lines(self, stream: IO[bytes], log: Path) -> None:
        """Pass each line of a launcher's stream to `on_line`, and keep it in `log`."""
        os.set_blocking(stream.fileno(), False)
        kept = self._stack.enter_context(log.open("ab"))

        def line(text: bytes) -> None:
            kept.write(text + b"\n")
            kept.flush()
            self.on_line(text.decode(errors="replace"), time.time())

        self._follow(stream, line)

    def pause(self) -> None:
        """Let no rank begin another step."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)

    def resume(self) -> None:
        """Let all ranks go on."""
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def wait(self, until: Callable[[], bool], seconds: float, reaps: Worker | None = None) -> bool:
        """Look on until it is so; False: it was not within the time."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            looks = reaps is not None and reaps.died_at is not None and reaps.reaped_at is None
            for key, _ in self._selector.select(REAP_LOOK_SECONDS if looks else left):
                self._handle(key)
            if looks:
                assert reaps is not None
                reaps.look_reaped()
        return True

    def end_workers(self) -> None:
        """Kill every worker that lives."""
        for worker in self.workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _follow(self, stream: IO[bytes], take: Callable[[bytes], None]) -> None:
        self._stack.enter_context(stream)
        rest = b""

        def read() -> bool:
            nonlocal rest
            with suppress(BlockingIOError):
                chunk = stream.read(1 << 16)
                *lines, rest = (rest + (chunk or b"")).split(b"\n")
                for line in lines:
                    take(line)
                return chunk != b""
            return True

        self._selector.register(stream, selectors.EVENT_READ, read)

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.data is None:  # a pidfd: its process has ended
            self._selector.unregister(key.fd)
            worker = next(one for one in self.workers if one.pidfd == key.fd)
            worker.died_at = time.time()
        elif not key.data():
            self._selector.unregister(key.fileobj)

    def _record(self, line: bytes) -> None:
        record = json.loads(line)
        if record["event"] == "began":
            self._begin(record)
            return
        worker = self.newest[record["rank"]]
        if worker.pid != record["pid"]:
            return  # of an attempt that is over
        if record["event"] == "imported":
            worker.imported_at = record["at"]
        elif record["event"] == "joined":
            worker.joined_at = record["at"]
        else:
            worker.steps += 1
            if worker.first_step_at is None:
                worker.first_step_at = record["at"]
                worker.first_step_cpu_seconds = record["cpu_seconds"]

    def _begin(self, record: dict[str, float]) -> None:
        pid, rank = int(record["pid"]), int(record["rank"])
        with suppress(ProcessLookupError):  # it may be gone again
            pidfd = os.pidfd_open(pid)
            worker = Worker(rank, pid, pidfd, record["process_at"], record["at"])
            self.workers.append(worker)
            self.newest[rank] = worker
            self._selector.register(pidfd, selectors.EVENT_READ, None)
