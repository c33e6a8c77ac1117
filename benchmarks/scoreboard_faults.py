"""Breaks a worker for real, once in a trial, where and when its plan says."""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from scoreboard_trials import Plan

CHUNK_BYTES = 16 << 20
FILL_BYTES = 1 << 20
"""More than the disk of a rank has in a trial of a full one."""
PORT_SECONDS = 10.0
SPIKE_FACTOR = 30.0


class Group(Protocol):
    """What a rank can do with the others."""

    def barrier(self) -> None:
        """Wait for all ranks to come here."""


class Loader:
    """A data loader with one process of its own, which is asked for each batch."""

    def __init__(self) -> None:
        ask, self._ask = os.pipe()
        self._answer, answer = os.pipe()
        if os.fork() == 0:
            os.close(self._ask)
            self._serve(ask, answer)
        os.close(ask)
        os.close(answer)

    def next_batch(self, wish: bytes = b"b") -> bytes:
        """Wait for a batch."""
        os.write(self._ask, wish)
        return os.read(self._answer, 1)

    @staticmethod
    def _serve(ask: int, answer: int) -> None:
        lock = threading.Lock()
        while wish := os.read(ask, 1):
            if wish == b"d":
                lock.acquire()
                lock.acquire()  # by the same thread: never
            os.write(answer, wish)
        os._exit(0)


class Injector:
    """The fault of one rank; of the others it is none."""

    def __init__(self, plan: Plan, directory: Path, tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.directory = directory
        self.tell = tell
        self.is_slow = self.has_spike = self.saves_nothing = False
        self.is_mine = plan.rank == int(os.environ["RANK"])

    def before_meeting(self) -> None:
        """The store's port is taken by the judge, who is no part of the job."""
        if self.plan.fault != "port" or not self.is_mine:
            return
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self.tell("held")
            return
        taken = self.directory / "port-taken"
        if not self._is_due(0):
            return
        self.tell("port")
        until = time.monotonic() + PORT_SECONDS
        while not taken.exists():
            if time.monotonic() > until:
                raise SystemExit("the judge has not taken the port")
            time.sleep(0.005)

    def before(self, step: int, loader: Loader, group: Group) -> float:
        """What this rank adds to its share of the step: 0, or NaN.  It may not come back."""
        if not self._is_due(step):
            return 0.0
        match self.plan.fault:
            case "loader":
                loader.next_batch(b"d")
            case "collective":
                group.barrier()
            case "nan":
                return math.nan
            case "slow":
                self.is_slow = True
            case "spike":
                self.has_spike = True
            case "checkpoint":
                self.saves_nothing = True
            case name:
                self._break(name)
        return 0.0

    def _is_due(self, step: int) -> bool:
        """Whether the fault falls now; it does so once, whatever is started anew."""
        plan = self.plan
        if not self.is_mine or step != plan.step or plan.fault == "stop":
            return False
        try:
            os.close(os.open(self.directory / "injected", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        time.sleep(plan.jitter_seconds)
        self.tell("fault")
        return True

    def _break(self, name: str) -> None:
        match name:
            case "loop":
                self._spin()
            case "dstate":
                self._wait_for_child()
            case "silent":
                time.sleep(1e9)
            case "error":
                raise ValueError(f"batch {self.plan.step}: label 1001 is out of range")
            case "oom":
                self._allocate()
            case "segfault":
                ctypes.string_at(0)
            case "disk":
                with (self.directory / f"checkpoints/{self.plan.rank}/optimizer").open("wb") as to:
                    to.write(bytes(FILL_BYTES))

    @staticmethod
    def _spin() -> None:
        wanted = 1
        while wanted:
            wanted = wanted % 97 + 1

    @staticmethod
    def _wait_for_child() -> None:
        """posix_spawn's vfork keeps the parent in state D until the child has opened its files."""
        pipe = os.path.join(tempfile.mkdtemp(), "pipe")
        os.mkfifo(pipe)
        actions = [(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)

    @staticmethod
    def _allocate() -> None:
        kept = []
        while True:
            kept.append(b"\1" * CHUNK_BYTES)
