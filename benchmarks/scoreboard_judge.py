"""Watches one trial from outside, in the same way for every launcher, and returns its outcome.

Workers report each start, step and end over a datagram socket, and pidfds show their deaths. The
judge does the parts of a fault that no worker can do to itself. It stops a process, takes a port,
fills a disk and makes room on it again, or limits memory.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from scoreboard_faults import BY_THE_JUDGE
from scoreboard_fuse import SilentFileSystem
from scoreboard_logs import Word, first_since
from scoreboard_outcome import Outcome
from scoreboard_trials import AGENTS, PAUSED, WORLD, Plan, long_pause, right_result

START_SECONDS = 120.0
TRIAL_SECONDS = 600.0
LOOK_SECONDS = 0.25
DISK_BYTES = 256 << 10
CGROUPS = Path("/sys/fs/cgroup")
interrupted = threading.Event()
"""Set when all trials must end."""


class NotRun(Exception):
    """This trial is impossible here; the text says why."""


class Job(Protocol):
    """Methods of a launcher's job that the judge calls."""

    def ended(self) -> str:
        """Return why the job can never continue; empty while it may."""

    def words(self, ranks: dict[int, int]) -> list[Word]:
        """Return the launcher's messages about faults; `ranks` is the rank of each process."""

    def stop(self) -> None:
        """End the job."""


@dataclass
class Process:
    """A worker that has started."""

    rank: int
    pidfd: int
    at: float
    parent: int
    died_at: float | None = None


class Judge:
    """One trial; used as a context manager."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.name = f"unbroken-scoreboard-{uuid.uuid4().hex}"
        self.processes: dict[int, Process] = {}
        self.steps: list[tuple[float, int, int]] = []
        """Time, rank and step of each report."""
        self.ends: dict[int, float] = {}
        self.injected_at: float | None = None
        self.load_average: float | None = None
        """Load average of the machine over the minute before the fault."""
        self._stop_at: float | None = None
        self._not_run = ""
        self._stack = ExitStack()

    def __enter__(self) -> Judge:
        """Make the directory and what the fault needs, and listen."""
        for rank in range(WORLD):
            (self.directory / f"checkpoints/{rank}").mkdir(parents=True)
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._socket = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.bind("\0" + self.name)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        if self.plan.fault == "disk":
            self._mount(self.directory / f"checkpoints/{self.plan.rank}")
        if self.plan.fault == "fuse":
            self._mount_silent(self.directory / "remote")
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes of the trial."""
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            os.close(process.pidfd)
        self._stack.close()

    def memory_groups(self, mebibytes: int) -> list[Path]:
        """Return a memory group for each agent, if the fault is about memory. NotRun."""
        if self.plan.fault not in ("oom", "loader-oom"):
            return []
        is_old = (CGROUPS / "memory").is_dir()
        base = CGROUPS / "memory" if is_old else CGROUPS
        groups = [base / f"{self.name}-{number}" for number in range(AGENTS)]
        try:
            for group in groups:
                group.mkdir()
                self._stack.callback(remove_group, group)
                limit = "memory.limit_in_bytes" if is_old else "memory.max"
                (group / limit).write_text(str(mebibytes << 20))
        except OSError as error:
            raise NotRun(f"no memory group can be made: {error.strerror}") from None
        return groups

    def until_step(self, job: Job) -> None:
        """Wait until the job makes its first step, has ended, or has used up its time."""
        until = time.monotonic() + START_SECONDS
        while not (self.steps or self._not_run or job.ended() or interrupted.is_set()):
            if time.monotonic() > until:
                return
            self._hear(LOOK_SECONDS)

    def look_on(self, job: Job, bound: float) -> str:
        """Watch until the job has ended or pauses too long. Return why it failed, or ''."""
        began = time.time()
        longest = TRIAL_SECONDS + (long_pause(self.plan)[1] if self.plan.fault == PAUSED else 0.0)
        while not (self._not_run or interrupted.is_set()):
            now = time.time()
            if len(self.ends) == WORLD:
                return ""
            if why := job.ended():
                self._hear(0.0)
                return why
            idle = now - (self.steps[-1][0] if self.steps else began)
            if idle > (bound if self.steps else max(bound, START_SECONDS)):
                return f"stood still for {idle:.0f} s"
            if now - began > longest:
                return f"not at its end after {longest:.0f} s"
            self._hear(LOOK_SECONDS)
        raise NotRun(self._not_run or "interrupted")

    def outcome(self, launcher: str, program: str, why: str, said: list[Word]) -> Outcome:
        """Return the outcome of the trial."""
        plan = self.plan
        if self.injected_at is None and plan.rank >= 0:
            raise NotRun(why or "the fault did not fall")
        since = self.injected_at or 0.0
        word = first_since(said, since)
        made = [(rank, step) for _, rank, step in self.steps]
        is_right = set(self.ends.values()) == {right_result(plan.last_step)}
        starts = [one.at for one in self.processes.values()]
        again = sorted(at for at in starts if at > since) if plan.rank >= 0 else []
        at = min([*([word.at] if word else []), *again[:1]], default=None)
        if plan.step == 0:
            at = word.at if word else None
        return Outcome(
            fault=plan.fault,
            seed=plan.seed,
            mode=plan.mode,
            load_average=self.load_average,
            launcher=launcher,
            program=program,
            rank=plan.rank,
            step=plan.step,
            survived=not why and is_right,
            ending=why or ("right" if is_right else "wrong result"),
            stall_seconds=self._stall(since) if len(self.ends) == WORLD else None,
            detected_seconds=at - since if at is not None and plan.rank >= 0 else None,
            acted=bool(again) or bool(word and word.acts),
            blamed=word.rank if word else None,
            blamed_pod=word.ranks if word else (),
            said=word.text if word else "",
            others=[one.text for one in said if one is not word][:20],
            early=sum(one.at < since for one in said),
            restarts=max(Counter(p.rank for p in self.processes.values()).values(), default=1) - 1,
            lost_steps=sum(rank == 0 for rank, _ in made)
            - len({step for rank, step in made if rank == 0}),
        )

    @property
    def ranks(self) -> dict[int, int]:
        """Rank of each process."""
        return {pid: process.rank for pid, process in self.processes.items()}

    def _stall(self, since: float) -> float:
        """Return the longest time without a step, from the last step before the fault."""
        times = sorted(at for at, _, _ in self.steps)
        before = [at for at in times if at <= since]
        later = [*(before[-1:] or [since] * bool(since)), *(at for at in times if at > since)]
        return max((b - a for a, b in pairwise(later)), default=0.0)

    def _hear(self, seconds: float) -> None:
        if self._stop_at is not None:
            seconds = min(seconds, max(0.0, self._stop_at - time.time()))
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with suppress(BlockingIOError):
                    while True:
                        self._take(json.loads(self._socket.recv(1 << 16)))
            else:
                self._selector.unregister(key.fd)
                self._died(key.data)
        if self._stop_at is not None and time.time() >= self._stop_at:
            self._stop_process()

    def _take(self, event: dict[str, Any]) -> None:
        rank, at, what = event["rank"], event["at"], str(event["what"])
        match what:
            case "start":
                self._started(event["pid"], rank, at)
            case "step":
                self.steps.append((at, rank, event["step"]))
                self._after_step(rank, event["step"])
            case "end":
                self.ends[rank] = event["state"]
            case "fault":
                self._injected(at)
            case "port":
                self._take_port(*event["place"])
            case "held":
                self._not_run = "the launcher holds the port of the store itself"
            case _:
                raise AssertionError(f"a worker told {event}")

    def _started(self, pid: int, rank: int, at: float) -> None:
        with suppress(ProcessLookupError):
            process = Process(rank, os.pidfd_open(pid), at, parent_of(pid))
            self.processes[pid] = process
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)

    def _died(self, process: Process) -> None:
        process.died_at = time.time()
        if self.plan.fault == "disk" and process.rank == self.plan.rank:
            (self.directory / f"checkpoints/{process.rank}/optimizer").unlink(missing_ok=True)

    def _after_step(self, rank: int, step: int) -> None:
        plan = self.plan
        is_due = plan.fault in BY_THE_JUDGE and (rank, step) == (plan.rank, plan.step)
        if is_due and self.injected_at is None:
            self._stop_at = time.time() + plan.jitter_seconds

    def _stop_process(self) -> None:
        self._stop_at = None
        newest = max(
            (one for one in self.processes.values() if one.rank == self.plan.rank),
            key=lambda one: one.at,
        )
        with suppress(ProcessLookupError):
            if self.plan.fault == "parent":
                os.kill(newest.parent, signal.SIGSTOP)
                self._stack.callback(continue_process, newest.parent)
            else:
                signal.pidfd_send_signal(newest.pidfd, signal.SIGSTOP)
            self._injected(time.time())

    def _injected(self, at: float) -> None:
        self.injected_at, self.load_average = at, os.getloadavg()[0]

    def _take_port(self, host: str, port: int) -> None:
        try:
            self._stack.enter_context(socket.create_server((host, port)))
        except OSError as error:
            self._not_run = f"the port could not be taken: {error.strerror}"
        (self.directory / "port-taken").touch()

    def _mount(self, place: Path) -> None:
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotRun(f"no small disk can be mounted: {done.stderr.strip()}")
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(place)], check=False)

    def _mount_silent(self, place: Path) -> None:
        place.mkdir()
        try:
            mounted = SilentFileSystem(place)
        except OSError as error:
            raise NotRun(f"FUSE cannot be mounted: {error.strerror}") from None
        self._stack.callback(mounted.close)

    def _left(self) -> list[int]:
        """Return the processes of the trial that live."""
        mark = f"SCOREBOARD_EVENTS={self.name}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


def parent_of(pid: int) -> int:
    """Return the parent process. ProcessLookupError: the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        raise ProcessLookupError(pid) from None
    return int(text.rpartition(")")[2].split()[1])


def continue_process(pid: int) -> None:
    """Let a stopped process run, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def remove_group(group: Path) -> None:
    """Remove a group as soon as it is empty; killed processes take a moment to leave it."""
    for _ in range(50):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
