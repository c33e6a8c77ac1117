"""Breaks a worker once in a trial, at the place and time of its plan."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from scoreboard_trials import Plan

CHUNK_BYTES = 16 << 20
BATCH_BYTES = 32 << 10
FILL_BYTES = 1 << 20
"""Size of a write: more than a rank's disk has free in a trial with a full disk."""
PORT_SECONDS = 10.0
BY_THE_JUDGE = ("stop", "parent")
"""Faults that no worker can do to itself."""
SPIKE_FACTOR = 30.0
FOREVER = {"x86_64": b"\xeb\xfe", "aarch64": b"\x00\x00\x00\x14"}
"""Machine code of a jump to itself."""
SO_ATTACH_FILTER = 26
RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: nothing of any packet is kept."""


class Group(Protocol):
    """Collective operations that a rank can use."""

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

    def next_batch(self, wish: bytes = b"b") -> None:
        """Wait for a batch.  RuntimeError: the process has ended."""
        os.write(self._ask, wish)
        left = BATCH_BYTES
        while left:
            part = os.read(self._answer, left)
            if not part:
                raise RuntimeError("DataLoader worker exited unexpectedly")
            left -= len(part)

    @staticmethod
    def _serve(ask: int, answer: int) -> None:
        lock = threading.Lock()
        while wish := os.read(ask, 1):
            if wish == b"d":
                lock.acquire()
                lock.acquire()  # by the same thread: never
            elif wish == b"s":
                time.sleep(1e9)
            elif wish == b"m":
                allocate()
            os.write(answer, bytes(BATCH_BYTES))
        os._exit(0)


def allocate() -> None:
    """Take memory until the kernel ends it."""
    kept = []
    while True:
        kept.append(b"\1" * CHUNK_BYTES)


def spin_in_c(keeps_gil: bool) -> None:
    """Run a loop of machine code that never ends."""
    code = FOREVER[platform.machine()]
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    kind = (ctypes.PYFUNCTYPE if keeps_gil else ctypes.CFUNCTYPE)(None)
    kind(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


def lock_each_other() -> None:
    """Let two threads each wait for the lock that the other one holds."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()


def fill_pipe() -> None:
    """Write into a pipe that somebody holds and nobody reads."""
    _, into = os.pipe()
    while True:
        os.write(into, bytes(mmap.PAGESIZE))


def lose_packets() -> None:
    """Let the kernel drop all that comes over TCP connections of this process."""
    code = ctypes.create_string_buffer(RETURN_NOTHING, len(RETURN_NOTHING))
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:  # the listing's own descriptor is gone
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(number)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


class Injector:
    """Injector of one rank's fault; for the other ranks it does nothing."""

    def __init__(self, plan: Plan, directory: Path, tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.directory = directory
        self.tell = tell
        self.is_slow = self.has_spike = self.saves_nothing = False
        self.is_mine = plan.rank == int(os.environ["RANK"])

    def before_meeting(self) -> None:
        """Wait while the judge, which is no part of the job, takes the store's port."""
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
        """Return a number to add to this rank's share of the step: 0, or NaN.

        The call may never return.
        """
        if not self._is_due(step):
            if self.plan.fault == "barrier" and step == self.plan.step:
                group.barrier()
            return 0.0
        fault = self.plan.fault
        if fault in LOADER_WISHES:
            loader.next_batch(LOADER_WISHES[fault])
        elif fault == "collective":
            group.barrier()
        elif fault == "nan":
            return math.nan
        elif fault in BREAKERS:
            BREAKERS[fault](self)
        return 0.0

    def _is_due(self, step: int) -> bool:
        """Return whether the fault is due now. It happens once, however often workers restart."""
        plan = self.plan
        if not self.is_mine or step != plan.step or plan.fault in BY_THE_JUDGE:
            return False
        try:
            os.close(os.open(self.directory / "injected", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        time.sleep(plan.jitter_seconds)
        self.tell("fault")
        return True

    def turn_slow(self) -> None:
        """Take twice as long for each step from now on."""
        self.is_slow = True

    def turn_odd(self) -> None:
        """Report losses that are too high from now on."""
        self.has_spike = True

    def stop_saving(self) -> None:
        """Write no more checkpoints."""
        self.saves_nothing = True

    def raise_error(self) -> None:
        """Fail as a script does."""
        raise ValueError(f"batch {self.plan.step}: label 1001 is out of range")

    def fill_disk(self) -> None:
        """Write more than the disk of the checkpoints holds."""
        with (self.directory / f"checkpoints/{self.plan.rank}/optimizer").open("wb") as to:
            to.write(bytes(FILL_BYTES))

    def read_remote(self) -> None:
        """Read a file of the file system that does not answer."""
        (self.directory / "remote/batch").read_bytes()


def spin() -> None:
    """Compute in Python for ever."""
    wanted = 1
    while wanted:
        wanted = wanted % 97 + 1


def wait_for_child() -> None:
    """Enter state D, in which vfork keeps the parent until the child has opened its files."""
    pipe = os.path.join(tempfile.mkdtemp(), "pipe")
    os.mkfifo(pipe)
    actions = [(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)


LOADER_WISHES = {"loader": b"d", "loader-sleep": b"s", "loader-oom": b"m"}
BREAKERS: Mapping[str, Callable[[Injector], object]] = {
    "loop": lambda _: spin(),
    "dstate": lambda _: wait_for_child(),
    "silent": lambda _: time.sleep(1e9),
    "gil": lambda _: ctypes.PyDLL(None).pause(),
    "locks": lambda _: lock_each_other(),
    "loop-gpu": lambda _: spin(),
    "loop-c": lambda _: spin_in_c(keeps_gil=True),
    "loop-c-free": lambda _: spin_in_c(keeps_gil=False),
    "pipe": lambda _: fill_pipe(),
    "link": lambda _: lose_packets(),
    "oom": lambda _: allocate(),
    "segfault": lambda _: ctypes.string_at(0),
    "fuse": Injector.read_remote,
    "error": Injector.raise_error,
    "disk": Injector.fill_disk,
    "slow": Injector.turn_slow,
    "spike": Injector.turn_odd,
    "checkpoint": Injector.stop_saving,
}
