"""The examination: the activity of every rank of this agent, found without stopping a rank.

Each rank is looked at twice with a pause between. Looks that take longer than the available time
are left out; the answer is the evidence so far.

Torch's flight recorder has the newest collective of each process group. A rank dumps its own on
request only if the job has set up torch's NCCL backend for it. The variables are
TORCH_NCCL_DEBUG_INFO_PIPE_FILE and TORCH_FR_DUMP_TEMP_FILE (before torch 2.8
TORCH_NCCL_DEBUG_INFO_TEMP_FILE). A byte written to the pipe requests the dump. Other backends
record, but can be asked from inside only; their ranks' activity is read from their stacks.

`Sampling` counts how often each rank waits for its peers. The stack of a rank's main thread is read
again and again without pausing it, at moments that are independent of the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import stat
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.agent.side_thread import SideThread
from unbroken.core.diagnosis.rank_activity import Kind, activity_of, awaits_peers, is_backward
from unbroken.errors import PeerError, WorldError
from unbroken.wire import pickled
from unbroken.wire.agent import WorkerReport
from unbroken.wire.observation import Activity, Collective, RankEvidence, RankWatch, ThreadStack

from . import procfs, spy

PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_BYTES_MAX = 64 * 1024 * 1024
GROUPS_MAX = 64
_files = SideThread("dumps", most=256)


def read(dump: bytes) -> tuple[Collective, ...]:
    """Return the newest collective of each group. Raises PeerError."""
    try:
        result = pickled.load(dump)
        newest: dict[str, Collective] = {}
        for entry in result["entries"]:
            collective = _collective(entry)
            known = newest.get(collective.group)
            is_newer = known is None or collective.sequence >= known.sequence
            if is_newer and not entry["is_p2p"]:
                newest[collective.group] = collective
        return tuple(newest[group] for group in sorted(newest)[:GROUPS_MAX])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PeerError(f"a flight recorder's dump is not understood: {error}"[:200]) from error


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    group = f"{_text(name)}({_text(description)})"
    # Gloo's entries stay `scheduled`; a retired entry is over with every backend.
    state = "completed" if entry["retired"] else _text(entry["state"])
    operation = _text(entry["profiling_name"]).rpartition(":")[2]
    sequence = entry["collective_seq_id"]
    if type(sequence) is not int or not 0 <= sequence < 1 << 63:
        raise ValueError("a sequence number is none")
    return Collective(group[:100], sequence, operation[:100], state[:20])


def _text(value: Any) -> str:
    # The text of a nested value could have any length.
    if type(value) not in (str, int):
        raise ValueError(f"a {type(value).__name__} in place of a text")
    return str(value)


class Request:
    """A request to one rank for its dump; a dump from before is not taken as the answer.

    A thread touches the files: they may lie on storage that hangs.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self.collectives: tuple[Collective, ...] = ()
        """The collectives dumped since, once they are read; empty: no complete dump."""
        pipe = environ.get(PIPE_VARIABLE)
        prefix = next((environ[name] for name in FILE_VARIABLES if environ.get(name)), None)
        self._path = f"{prefix}{rank}" if pipe and prefix else ""
        self._before: int | None = None
        if self._path:
            _files.call(lambda: self._ask(f"{pipe}{rank}.pipe"))

    def fetch(self) -> Future[None] | None:
        """Have the answer read, if there is a new one; None: the rank dumps nothing."""
        return _files.call(self._read) if self._path else None

    def _ask(self, pipe: str) -> None:
        self._before = _written(self._path)
        # Without a reader the rank does not exist, or does not listen.
        with contextlib.suppress(OSError):
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(fd, "wb", 0)) as file:
                file.write(b"1")

    def _read(self) -> None:
        written = _written(self._path)
        if written == self._before:
            return
        with contextlib.suppress(OSError, PeerError), open(self._path, "rb", opener=_now) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                self.collectives = read(file.read(DUMP_BYTES_MAX))
                self._before = written


def _now(path: str, flags: int) -> int:
    # The file is the job's: a pipe in its place must not keep the agent waiting.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _written(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


LOOKS_AT_ONCE = max(2, min(8, (os.cpu_count() or 1) // 4))
WAITS_FOR_CHILD = "do_wait"
"""Function of the kernel in which wait4(2) waits."""
PAUSE_SECONDS = 1.0
PAUSE_SHARE = 0.3
"""Share of the available time that the pause may take."""
LOOK_SECONDS_MAX = 2.0
MEASURED_SECONDS_MIN = 0.1
"""Least seconds of a measurement: the kernel counts processor time in hundredths of a second."""
ANSWER_SHARE = 0.1
ANSWER_SECONDS_MAX = 0.25
"""Seconds, at most, that are reserved to send the answer."""


LastOutput = Callable[[int], tuple[float | None, str]]
"""Returns, by the worker's pid, when it last wrote, and its last line."""


@dataclass(frozen=True, slots=True)
class _Counters:
    at: float
    cpu_seconds: float
    io_bytes: int | None
    waited_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class ExaminedWorker:
    """A worker under examination."""

    worker: WorkerReport
    pid: int
    """Pid of the relevant process: the worker's own, or one below it."""
    recorder: Request
    first: _Counters | None = None
    second: _Counters | None = None
    stat: procfs.Stat | None = None
    """The newest reading."""
    waits_in: str = ""
    stacks: spy.Stacks | None = None
    functions: list[tuple[str, ...]] = field(default_factory=list)
    """Functions on the stack, for each look that has shown any."""
    gil_threads: list[int | None] = field(default_factory=list)
    """Thread that held the GIL, for each look."""
    is_spied: bool = False
    """py-spy looks at it now, or was ended during a look."""
    note: str = "there was no time to look at its stack"
    active_before: Activity | None = None
    active_after: Activity | None = None

    @property
    def is_halted(self) -> bool:
        """True if the process does not run anyway, so that it cannot be paused (proc(5): stopped,
        traced, in the kernel)."""
        return self.stat is None or self.stat.state in "TtDZX"

    async def spied(self, way: tuple[str, ...]) -> spy.Stacks:
        """Look once. Raises WorldError."""
        self.is_spied = True
        try:
            stacks = await spy.dump(self.pid, way)
        except WorldError:
            self.is_spied = False
            raise
        self.is_spied = False
        self.gil_threads.append(stacks.gil_thread)
        return stacks

    def look(self, now: float) -> _Counters:
        """Read the kernel's data."""
        stat = procfs.stat(self.pid)
        if stat is not None and self.stat is not None and stat.state == "t":
            # A tracer since the first look is our own py-spy, which detaches late.
            stat = replace(stat, state=self.stat.state)
        self.stat = stat
        if stat is None:
            return _Counters(now, 0.0, None)
        self.waits_in = procfs.waits_in(self.pid)
        family = procfs.tree(self.pid)
        cpu = sum(one.cpu_seconds for one in map(procfs.stat, family) if one is not None)
        told = [] if stat.state == "D" else [procfs.io_bytes(pid) for pid in family]
        known = [count for count in told if count is not None]
        waited = sum(map(procfs.waited_seconds, family))
        return _Counters(now, cpu, sum(known) if known else None, waited)

    def activity(self, now: float) -> Activity | None:
        """Return its activity since it started; None: the kernel does not report it."""
        stat, main = procfs.stat(self.pid), procfs.main_thread(self.pid)
        if stat is None or main is None:
            return None
        family = [one for one in map(procfs.stat, procfs.tree(self.pid)) if one is not None]
        used = sum(one.cpu_seconds + one.children_seconds for one in family)
        return Activity(now, *main, used, stat.faults)

    def evidence(self) -> RankEvidence:
        """Return the evidence that has been collected so far."""
        before, after = self.first, self.second
        share = moved = waited = None
        if before is not None and after is not None and self.stat is not None:
            elapsed = after.at - before.at
            if elapsed >= MEASURED_SECONDS_MIN:
                share = max(0.0, after.cpu_seconds - before.cpu_seconds) / elapsed
                waited = max(0.0, after.waited_seconds - before.waited_seconds) / elapsed
            if before.io_bytes is not None and after.io_bytes is not None:
                moved = max(0, after.io_bytes - before.io_bytes)
        looks = self.functions
        return RankEvidence(
            rank=self.worker.rank,
            pid=self.pid,
            state=self.stat.state if self.stat is not None else "",
            waits_in=self.waits_in,
            cpu_seconds=self.stat.cpu_seconds if self.stat is not None else 0.0,
            cpu_share=share,
            waited_share=waited,
            io_bytes=moved,
            is_same=looks[0] == looks[-1] if len(looks) > 1 else None,
            collectives=self.recorder.collectives,
            threads=self._threads(),
            note="it has ended" if self.stat is None else self.note,
            activity_before=self.active_before,
            activity_after=self.active_after,
        )

    def _threads(self) -> tuple[ThreadStack, ...]:
        """Return the stacks; a thread that held the GIL at every look is marked."""
        if self.stacks is None:
            return ()
        owners = set(self.gil_threads)
        owner = owners.pop() if len(self.gil_threads) > 1 and len(owners) == 1 else None
        return tuple(
            replace(thread, holds_gil=number == owner)
            for thread, number in zip(self.stacks.threads, self.stacks.ids, strict=True)
        )


class RankExamination:
    """Looks at the workers from `run` to its end; `evidence` returns the evidence so far, at any
    time."""

    def __init__(
        self,
        attempt: int,
        workers: Sequence[WorkerReport],
        seconds: float,
        last_output: LastOutput = lambda pid: (None, ""),
    ) -> None:
        self.attempt = attempt
        self._last_output = last_output
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._seconds = seconds - min(ANSWER_SHARE * seconds, ANSWER_SECONDS_MAX)
        self._subjects = [
            ExaminedWorker(worker, matters_most(worker.pid), Request(worker.rank, os.environ))
            for worker in workers
        ]
        self._slots = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._over = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        for subject in self._subjects:
            subject.first = subject.look(self._began)
            subject.active_before = subject.activity(self._began)

    @property
    def is_over(self) -> bool:
        """True if it looks no more, or its time is nearly up."""
        return self._over.is_set() or self._now() >= self._began + self._seconds

    async def run(self) -> None:
        """Look at all workers, twice."""
        try:
            async with asyncio.timeout_at(self._began + self._seconds):
                async with asyncio.TaskGroup() as tasks:
                    self._looking = tasks.create_task(self._look())
        except TimeoutError:
            pass  # The evidence so far is the answer.
        finally:
            for subject in self._subjects:
                if subject.second is None and not subject.is_spied:
                    subject.second = subject.look(self._now())
                if subject.active_after is None and not subject.is_spied:
                    subject.active_after = subject.activity(self._now())
            self._over.set()

    def stop(self) -> None:
        """End it: py-spy is killed, if it runs."""
        if self._looking is not None:
            self._looking.cancel()

    async def wait(self, seconds: float) -> None:
        """Return when it is over, or after this number of seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    def evidence(self, watch: Sequence[RankWatch] = ()) -> tuple[RankEvidence, ...]:
        """Return the evidence so far, with what the ranks have reported about themselves."""
        told = {rank_watch.rank: rank_watch for rank_watch in watch}
        return tuple(self._evidence_of(subject, told) for subject in self._subjects)

    def _evidence_of(self, subject: ExaminedWorker, told: Mapping[int, RankWatch]) -> RankEvidence:
        at, line = self._last_output(subject.worker.pid)
        rank_evidence = replace(subject.evidence(), last_output_at=at, last_line=line)
        watch = told.get(rank_evidence.rank)
        if watch is None:
            return rank_evidence
        return replace(rank_evidence, phase=watch.phase, step=watch.step, step_at=watch.step_at)

    async def _look(self) -> None:
        await self._all(self._first)
        self._fetch_dumps()
        # The last look takes as long as the first.
        reserved = 1.5 * (self._now() - self._began)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._began + self._seconds - reserved):
                await self._all(self._deeper)
                self._fetch_dumps()
                await self._pause()
        await self._all(self._again)
        if dumps := self._fetch_dumps():
            await asyncio.wait(dumps)

    def _fetch_dumps(self) -> list[asyncio.Future[None]]:
        dumps = [subject.recorder.fetch() for subject in self._subjects]
        return [asyncio.wrap_future(one) for one in dumps if one is not None]

    async def _all(self, look: Callable[[ExaminedWorker], Coroutine[None, None, None]]) -> None:
        async def one(subject: ExaminedWorker) -> None:
            async with self._slots:
                await look(subject)

        async with asyncio.TaskGroup() as tasks:
            for subject in self._subjects:
                tasks.create_task(one(subject))

    async def _pause(self) -> None:
        due = self._began + min(PAUSE_SECONDS, PAUSE_SHARE * self._seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await asyncio.Event().wait()

    async def _first(self, subject: ExaminedWorker) -> None:
        subject.stacks = await self._spy(subject)

    async def _deeper(self, subject: ExaminedWorker) -> None:
        """Get native frames, which take a second to find in libraries as large as torch's."""
        if subject.stacks is None or subject.is_halted:
            return
        with contextlib.suppress(WorldError):
            subject.stacks = await subject.spied(spy.NATIVE)

    async def _again(self, subject: ExaminedWorker) -> None:
        subject.second = subject.look(self._now())
        stacks = await self._spy(subject)
        subject.stacks = subject.stacks or stacks
        subject.active_after = subject.activity(self._now())

    async def _spy(self, subject: ExaminedWorker) -> spy.Stacks | None:
        if subject.stat is None or subject.stat.state in "ZX":
            return None
        ways = (spy.NONBLOCKING,) if subject.is_halted else (spy.PLAIN, spy.NONBLOCKING)
        for way in ways:
            try:
                async with asyncio.timeout(min(LOOK_SECONDS_MAX, self._seconds / 4)):
                    stacks = await subject.spied(way)
            except TimeoutError:
                subject.note = "py-spy did not end in time"
            except WorldError as error:
                subject.note = str(error)
                if subject.note in (spy.NOT_ALLOWED, spy.MISSING):
                    return None
            else:
                subject.note = ""
                subject.functions.append(stacks.functions)
                return stacks
        return None


def matters_most(pid: int) -> int:
    """Return the process to examine for a worker.

    It is the worker itself. If the worker only waits for a program that it has started, it is the
    Python process below it that has computed most. A fork of the worker, such as a DataLoader's
    worker, is no such program: a rank that waits for a compiler has some of these as well.
    """
    own, is_python = procfs.stat(pid), procfs.is_python(pid)
    if own is None or (is_python and procfs.waits_in(pid) != WAITS_FOR_CHILD):
        return pid
    below = (one for one in procfs.tree(pid)[1:] if procfs.is_python(one))
    told = [
        (stat.cpu_seconds, one)
        for one in below
        if (stat := procfs.stat(one)) and not (stat.program and stat.program == own.program)
    ]
    return max(told)[1] if told else pid


ANSWER_SECONDS = 1.0
"""Seconds reserved for the last samples to end, and to send the answer."""
_ENDED = "it has ended"
_IN_VAIN = (spy.NOT_ALLOWED, spy.MISSING, _ENDED)


class Sampling:
    """Samples of several workers, each at a mean rate of `per_second`, for `seconds`."""

    def __init__(self, workers: Sequence[WorkerReport], seconds: float, per_second: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + max(0.0, seconds - ANSWER_SECONDS)
        self._per_second = per_second
        self._over = asyncio.Event()
        self._ranks = [RankEvidence(worker.rank, matters_most(worker.pid)) for worker in workers]

    def stop(self) -> None:
        """Stop sampling: the workers are being ended."""
        self._over.set()

    async def run(self) -> tuple[RankEvidence, ...]:
        """Return the counts of each worker once the time is up."""
        return tuple(await asyncio.gather(*map(self._sample, self._ranks)))

    async def _sample(self, rank: RankEvidence) -> RankEvidence:
        now = self._loop.time
        while now() < self._until and not self._over.is_set():
            # Equal intervals could coincide with the steps, and show one part of each only.
            due = min(self._until, now() + random.uniform(0.5, 1.5) / self._per_second)
            try:
                async with asyncio.timeout_at(self._until + ANSWER_SECONDS / 2):
                    is_waiting = await _look(rank)
            except (WorldError, TimeoutError) as error:
                rank = replace(rank, note=str(error))
                if rank.note in _IN_VAIN:
                    break
            else:
                waiting = rank.waiting + bool(is_waiting)
                rank = replace(
                    rank, samples=rank.samples + (is_waiting is not None), waiting=waiting
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._over.wait()
        return rank


async def _look(rank: RankEvidence) -> bool | None:
    """Return whether the rank waits for its peers now; None: it could not be determined. Raises
    WorldError."""
    stat = procfs.stat(rank.pid)
    if stat is None:
        raise WorldError(_ENDED)
    threads = (await spy.dump(rank.pid, spy.NONBLOCKING)).threads[:1]
    # The kernel's data are some ms older than the stack, so they count only if the stack alone
    # cannot distinguish waiting from computing.
    share = 1.0 if stat.state == "R" else 0.0
    is_open = any(is_backward(thread.frames) for thread in threads)
    seen = RankEvidence(
        rank.rank, rank.pid, "S", cpu_share=share if is_open else None, threads=threads
    )
    what = activity_of(seen)
    return None if what.kind is Kind.UNKNOWN else awaits_peers(seen, what)
