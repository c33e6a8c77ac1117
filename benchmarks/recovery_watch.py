"""Watches the workers of a job from outside, in the same way for every launcher.

Workers report through a named pipe (`train_step.py`). Pidfds show their ends, and standard error
has the lines of the launchers. Every event gets the time at which it is read. Only one thing is
polled, since the kernel has no event for it: whether a dead worker's exit status was collected.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO

REAP_LOOK_SECONDS = 0.001


STEPS_KEPT = 256
MARKS = ("imported", "joined", "built", "loaded", "restored")
"""Reports of a worker on its way to its first step: torch is imported, the process group joined,
the model built (and divided), its state loaded, the model wrapped (DDP)."""


@dataclass(eq=False)
class Worker:
    """One process of one rank, or one call of its function in a process that survives."""

    rank: int
    pid: int
    life: int
    pidfd: int
    process_at: float
    began_at: float
    marks: dict[str, float] = field(default_factory=dict)
    """Times at which it has reached each of `MARKS`."""
    first_step_at: float | None = None
    first_step_cpu_seconds: float | None = None
    """Processor time that it used until its first step."""
    first_step: int | None = None
    steps: int = 0
    newest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    """Times and numbers of its last steps."""
    died_at: float | None = None
    reaped_at: float | None = None

    def started_at(self, killed_at: float) -> float:
        """Return when the worker was there for an attempt after the kill.

        A process that waited, parked or kept, counts from the first line of its script or function.
        """
        return self.process_at if self.process_at >= killed_at else self.began_at

    def step_seconds(self, count: int) -> list[float]:
        """Return the durations of its newest steps."""
        times = [at for at, _ in self.newest][-count - 1 :]
        return [later - earlier for earlier, later in pairwise(times)]

    def step_at(self, at: float) -> int:
        """Return the newest step that it had made by then; 0: none."""
        return max((step for made_at, step in self.newest if made_at <= at), default=0)

    def look_reaped(self) -> None:
        """Note when the exit status of the dead process has been collected."""
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
    """Newest worker of each rank."""

    def open(self) -> None:
        """Make the pipe of the records and the gate, open."""
        self.directory.mkdir(parents=True)
        for name in ("records", "gate"):
            os.mkfifo(self.directory / name)
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        pipe = os.open(self.directory / "records", os.O_RDWR | os.O_NONBLOCK)
        self._follow(os.fdopen(pipe, "rb", buffering=0), self._record)
        self._gate = os.open(self.directory / "gate", os.O_RDWR | os.O_NONBLOCK)
        self._stack.callback(os.close, self._gate)
        self.resume()

    def close(self) -> None:
        """Close the pipe and the gate; workers that still live end at their next report."""
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
        """Close the gate: ranks make a step only now and then. They wait for a byte."""
        with suppress(BlockingIOError):
            os.read(self._gate, 4096)

    def resume(self) -> None:
        """Open the gate: all ranks make steps."""
        self.pause()
        os.write(self._gate, b"!")

    def drain(self) -> None:
        """Read all records that have arrived."""
        for key, _ in self._selector.select(0):
            self._handle(key)

    def wait(self, until: Callable[[], bool], seconds: float, reaps: Worker | None = None) -> bool:
        """Watch until `until()`; return False if it does not hold within the time."""
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
        worker = self.newest.get(record["rank"])
        if worker is None or (worker.pid, worker.life) != (record["pid"], record["life"]):
            return  # of an attempt that is over
        match record["event"]:
            case "step":
                self._step(worker, record)
            case mark if mark in MARKS:
                worker.marks[mark] = record["at"]

    @staticmethod
    def _step(worker: Worker, record: dict[str, float]) -> None:
        worker.steps += 1
        worker.newest.append((record["at"], int(record["step"])))
        if worker.first_step_at is None:
            worker.first_step_at, worker.first_step = record["at"], int(record["step"])
            worker.first_step_cpu_seconds = record["cpu_seconds"]
            worker.marks["learned"] = record.get("learned_at", record["at"])

    def _begin(self, record: dict[str, float]) -> None:
        pid, rank, life = int(record["pid"]), int(record["rank"]), int(record["life"])
        with suppress(ProcessLookupError):  # it may be gone again
            pidfd = os.pidfd_open(pid)
            worker = Worker(rank, pid, life, pidfd, record["process_at"], record["at"])
            self.workers.append(worker)
            self.newest[rank] = worker
            self._selector.register(pidfd, selectors.EVENT_READ, None)
