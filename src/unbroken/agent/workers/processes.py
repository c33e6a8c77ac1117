"""The one owner of the agent's child processes: starts, signals, kills and reaps them.

The agent adopts every orphan below it, so "has no children" is the proof that no process of any
worker is alive. Workers are watched by pidfd, adopted processes by SIGCHLD.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.agent.evidence import pages
from unbroken.agent.evidence.pages import PageSource
from unbroken.agent.options import LaunchOptions, kept_only
from unbroken.core.agent.events import (
    AgentEvent,
    FirstOutput,
    NothingLives,
    ProgramStage,
    RecurringLine,
    SpawnFailed,
    StageStarted,
    TurnedCold,
    WatchRead,
    WorkerEnded,
)
from unbroken.core.agent.faults import SIGBUS, SIGKILL, WorkerEnd
from unbroken.core.agent.recurring_lines import RecurringLines
from unbroken.errors import WorldError
from unbroken.log_lines import Log
from unbroken.wire.agent import StartCommand, WarmReport

from . import facts, learned, lineage
from .environment import BOOT, Program, kind_of, programs, python
from .facts import ErrorFile
from .output import OutputThread, Stream, WriteTimes, last_line, open_file, tail_text
from .spawn import Child, LifePipe, NotStartedError, spawn_all

if TYPE_CHECKING:
    # Loaded while workers start.
    from unbroken.agent.evidence.log_watch import LogWatch
    from unbroken.agent.evidence.watch import AttemptWatch

    from .warm import WarmStarts

log = Log(__name__)

LAST_WORDS_SECONDS = 0.1
"""Seconds, at most, that the output of an ended worker may delay the report of its end; it usually
takes 1 ms."""
FILE_BYTES_MAX = 32 * 1024 * 1024
"""Size of a stream's file in a folder of the agent's own, of which the newest two are kept. It lies
on the disk of the node, or in memory, and a training may run for weeks. A folder that was given is
the user's."""
ATTEMPTS_KEPT = 3
"""Attempts whose output is kept in such a folder."""
UNKILLABLE_SECONDS = 5.0
INTERPRETER_SECONDS = 5.0
"""Seconds, at most, that an interpreter may take to print its version."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker whose end has not been reported."""

    attempt: int
    stage: ProgramStage
    program: Program
    pid: int
    pidfd: int
    rank: int
    streams: tuple[Stream, ...]
    oom_kills: int
    """OOM kills counted by the kernel before it started."""
    page: PageSource | None
    rhythm: WriteTimes
    is_signalled: bool = False


class Processes:
    """Carries out the machine's orders to processes; `feed` takes the resulting events."""

    keeps = True

    def __init__(
        self, options: LaunchOptions, feed: Callable[[AgentEvent], None], clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._feed = feed
        self._directories = log_directories(options)
        self._has_own_directory = not given_directory(options)
        self._made: dict[str, None] = {}
        """Directories of attempts that were made, the oldest first."""
        self.note = f"output in {self._directories[ProgramStage.TRAIN]}"
        self._clock = clock
        self._lease = LifePipe()
        self._output = OutputThread(clock)
        self._lines = RecurringLines()
        """Kinds of lines that recur; for the output's thread only."""
        self._command: StartCommand | None = None
        """The start command that `_rules` were made for."""
        self._rules: LogWatch | None = None
        self._watch: AttemptWatch | None = None
        self._boots = False
        self._warm: WarmStarts | None = None
        self._imports_changed: Callable[[], None] = lambda: None
        self._workers: dict[int, WorkerProcess] = {}
        self._last_words = 0
        """Workers that have ended and whose output is still being read."""
        self._is_killing = False
        self._kept: tuple[int, ...] = ()
        """Local ranks that the newest kill spares."""
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._error_file = ErrorFile(options.error_file, self._directories[ProgramStage.TRAIN])

    def start(self, imports_changed: Callable[[], None]) -> None:
        """Take charge of this process's children."""
        self._imports_changed = imports_changed
        lineage.adopt_orphans()
        self._boots = can_boot(self._options)
        self._output.start()
        self._loop.add_signal_handler(signal.SIGCHLD, self._children_changed)

    async def warm_up(self) -> None:
        """Return when workers can start: with learned imports, once a template has done them."""
        if not self._boots:
            return
        program = self._nobodys_program()
        if self._options.preload:
            self._warm_starts().open(program)
            return
        place = learned.folder(), learned.entry_of(program)
        known = await asyncio.to_thread(learned.read, *place)
        if known is not None:
            await self._warm_starts().recall(program, known)

    def _nobodys_program(self) -> Program:
        """Return the program of a process without a rank, before any start."""
        nobody = StartCommand(-1, -1, self._options.nnodes, "", -1)
        return programs(self._options, ProgramStage.TRAIN, nobody, "", True)[0]

    def imports(self) -> Collection[str] | None:
        """Return the modules that a usable template was sent; None: no worker starts warm, or the
        job names the modules."""
        if not self._boots or self._options.preload:
            return None
        return () if self._warm is None else self._warm.imports()

    def warm(self) -> WarmReport | None:
        """Return how the workers would start next; None: always cold, or nothing has started."""
        return None if self._warm is None else self._warm.report()

    def import_beforehand(self, names: Sequence[str]) -> None:
        """Take the names of modules that workers of other agents import."""
        self._warm_starts().peer_imports(self._nobodys_program(), names)

    def close(self) -> None:
        """Write out pending output."""
        if self._warm is not None:
            self._warm.close()
        self._output.stop(seconds=1.0)

    def spawn(self, stage: ProgramStage, command: StartCommand, kept: tuple[int, ...] = ()) -> None:
        """Start the workers of a stage, except for the kept local ranks, which belong to this
        attempt from now on; feed `StageStarted` or `SpawnFailed`."""
        self._is_killing = False
        attempt = command.attempt
        directory = f"{self._directories[stage]}/attempt_{attempt}"
        every = programs(self._options, stage, command, directory, self._boots)
        chosen = [program for program in every if program.local_rank not in kept]
        self._error_file.begin()
        for program in chosen:
            _prepare(program.directory)
        if self._has_own_directory:
            self._keep_newest(directory)
        sources = [pages.make() if stage is ProgramStage.TRAIN else None for _ in chosen]
        oom_kills, started_at = facts.oom_kills(), self._clock()
        warm = self._warm_starts() if every[0].kind else None
        children, failure = self._start(chosen, sources, warm)
        self._watch_rules(command)
        if stage is ProgramStage.TRAIN:
            self._output.call(functools.partial(self._lines.begin, attempt, started_at))
        self._keep(kept, command)
        for program, child, page in zip(chosen, children, sources, strict=False):
            rank, rhythm = command.rank * self._options.nproc + program.local_rank, WriteTimes()
            streams = self._streams(attempt, program, child, rank, rhythm)
            pidfd = os.pidfd_open(child.pid)
            self._workers[child.pid] = WorkerProcess(
                attempt, stage, program, child.pid, pidfd, rank, streams, oom_kills, page, rhythm
            )
            self._loop.add_reader(pidfd, self._reap)
        if failure is not None:
            self._feed(SpawnFailed(attempt, stage, failure.local_rank, str(failure)))
            return
        ranks = tuple(program.local_rank for program in chosen)
        pids = tuple(child.pid for child in children)
        starts = tuple("warm" if child.is_warm else "cold" for child in children)
        self._feed(StageStarted(attempt, stage, pids, ranks, starts))
        if warm is not None:
            warm.began(attempt, [child.is_warm for child in children])
        if stage is ProgramStage.TRAIN:
            self._watch_workers(command)

    def _keep_newest(self, directory: str) -> None:
        """Remove the output of old attempts: nobody else would, and the disk is the node's."""
        self._made.pop(directory, None)
        self._made[directory] = None
        used = {os.path.dirname(worker.program.directory) for worker in self._workers.values()}
        for oldest in list(self._made)[:-ATTEMPTS_KEPT]:
            if oldest not in used:
                del self._made[oldest]
                self._loop.run_in_executor(None, shutil.rmtree, oldest, True)

    def _warm_starts(self) -> WarmStarts:
        if self._warm is None:
            from .warm import WarmStarts

            self._warm = WarmStarts(
                self._options, self._lease, self._clock,
                self._turned_cold, self._nothing_lives, self._imports_changed,
            )  # fmt: skip
        return self._warm

    def _turned_cold(self, pid: int) -> None:
        worker = self._workers.get(pid)
        if worker is not None:
            local_rank = worker.program.local_rank
            self._feed(TurnedCold(worker.attempt, worker.stage, local_rank, pid))

    def _start(
        self,
        chosen: Sequence[Program],
        sources: Sequence[PageSource | None],
        warm: WarmStarts | None,
    ) -> tuple[list[Child], NotStartedError | None]:
        try:
            lent = [pages.lend(*one) for one in zip(chosen, sources, strict=True)]
            if warm is not None:
                warm.prepare(lent)
            return spawn_all(lent, self._lease, warm), None
        except NotStartedError as error:
            for source in filter(None, sources[len(error.children) :]):
                source.close()
            return error.children, error

    def _watch_workers(self, command: StartCommand) -> None:
        from unbroken.agent.evidence.watch import AttemptWatch, WatchedWorker

        before, nproc = self._watch, self._options.nproc
        if before is not None:
            before.close()
        self._watch = AttemptWatch.make(command, nproc, self._clock, self._watched, before)
        seen = self._workers.values()
        self._watch.begin(
            {worker.rank: WatchedWorker(worker.pid, worker.page, worker.rhythm) for worker in seen}
        )

    def _watched(self, event: WatchRead) -> None:
        self._feed(event)
        if self._warm is not None and any(view.step is not None for view in event.views):
            self._warm.step_reported()

    def _watch_rules(self, command: StartCommand) -> None:
        """Notify the rules that workers run. They are loaded while those start."""
        if self._command is not command:
            self._command, self._rules = command, None
            if command.log_rules:
                from unbroken.agent.evidence.log_watch import LogWatch

                nproc = self._options.nproc
                self._rules = LogWatch.make(command, nproc, self._clock, self._feed_from_thread)
            self._output.watch(self._rules)
        if self._rules is not None:
            self._output.call(self._rules.start)

    def _feed_from_thread(self, event: AgentEvent) -> None:
        """Feed an event from another thread."""
        _call_soon(self._loop, lambda: self._feed(event))

    def last_output(self, pid: int) -> tuple[float | None, str]:
        """Return when a worker last wrote, and its last line, errors first."""
        worker = self._workers.get(pid)
        if worker is None:
            return None, ""
        stdout, stderr = worker.streams
        return worker.rhythm.newest(), last_line(stderr) or last_line(stdout)

    def signal(self, number: int, but: tuple[int, ...] = ()) -> None:
        """Signal the process group of every living worker, except for these local ranks."""
        # A worker that is dead or dying by now has another cause, which is the one to find.
        self._reap()
        for pid, worker in self._workers.items():
            if worker.stage is ProgramStage.TRAIN and worker.program.local_rank in but:
                continue
            worker.is_signalled |= not lineage.is_dying(pid)
            lineage.kill_group(pid, number)
            # A stopped process would receive no signal but SIGKILL.
            if number != SIGKILL:
                lineage.kill_group(pid, signal.SIGCONT)

    def local_ranks(self) -> Mapping[int, int]:
        """Return the local ranks of the living training workers, by pid."""
        alive = self._workers.values()
        return {
            worker.pid: worker.program.local_rank
            for worker in alive
            if worker.stage is ProgramStage.TRAIN
        }

    def _keep(self, kept: tuple[int, ...], command: StartCommand) -> None:
        """Move kept workers into an attempt; they continue to write to the files that they have."""
        for worker in self._workers.values():
            local_rank = worker.program.local_rank
            if worker.stage is not ProgramStage.TRAIN or local_rank not in kept:
                continue
            worker.attempt, worker.is_signalled = command.attempt, False
            worker.rank = command.rank * self._options.nproc + local_rank
            if worker.page is not None:
                worker.page.begin_anew()
            for name, stream in zip(("stdout", "stderr"), worker.streams, strict=True):
                rules = self._rules
                on_read = None if rules is None else rules.reader(worker.rank, name)
                self._output.call(functools.partial(setattr, stream, "on_read", on_read))
                on_lines = functools.partial(self._take_lines, command.attempt, local_rank)
                self._output.call(functools.partial(setattr, stream, "on_lines", on_lines))

    def _take_lines(self, attempt: int, local_rank: int, lines: Sequence[bytes]) -> None:
        """Look for lines that recur in training; called in the output's thread."""
        at = self._lines.take(attempt, local_rank, lines, self._clock())
        if at is not None:
            self._feed_from_thread(RecurringLine(attempt, local_rank, at))

    def kill_all(self, kept: tuple[int, ...] = ()) -> None:
        """Kill everything below but the kept workers and their descendants.

        Feed `NothingLives` when nothing else is left, at once if that is so already.
        """
        self._kept = kept
        self.signal(SIGKILL, but=kept)
        self._is_killing = True
        if self._warm is not None:
            self._warm.stop_began()
        if self._alarm is None:
            self._alarm = self._loop.call_later(UNKILLABLE_SECONDS, self._complain)
        self._reap()

    def _children_changed(self) -> None:
        self._note_stops()
        self._reap()

    def _note_stops(self) -> None:
        """Take pending stops by signals; stops by a debugger are reported to the debugger alone."""
        with contextlib.suppress(ChildProcessError):
            while result := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG):
                worker = self._workers.get(result.si_pid)
                if (
                    worker is not None
                    and worker.stage is ProgramStage.TRAIN
                    and self._watch is not None
                ):
                    self._watch.halted(worker.rank, result.si_code == os.CLD_CONTINUED)

    def _descendants(self) -> list[int]:
        """Return children that descend from workers, except kept ones; the template's belong to the
        agent itself."""
        result = lineage.children()
        spared = {pid for pid, rank in self.local_ranks().items() if rank in self._kept}
        others = spared.union(() if self._warm is None else self._warm.pids())
        result = [pid for pid in result if pid not in others]
        return [pid for pid in result if lineage.session(pid) not in spared] if spared else result

    def _reap(self) -> None:
        while True:
            if self._is_killing:
                left = self._descendants()
                if self._warm is not None:
                    self._warm.doomed.update(left)
                for child in left:
                    lineage.kill(child)
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            worker, code = self._workers.pop(pid, None), os.waitstatus_to_exitcode(status)
            if worker is not None:
                self._ended(worker, code)
            if self._warm is not None:
                self._warm.doomed.discard(pid)
                if worker is None:
                    self._warm.reaped(pid, code)
        self._nothing_lives()

    def _nothing_lives(self) -> None:
        if self._is_killing and not self._last_words and not self._descendants():
            self._is_killing = False
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            self._feed(NothingLives(self._kept))

    def _complain(self) -> None:
        self._alarm = None
        if self._is_killing:
            left = self._descendants()
            log.warning("killed processes are still there", seconds=UNKILLABLE_SECONDS, pid=left)

    def _ended(self, worker: WorkerProcess, code: int) -> None:
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        self._last_words += 1
        if code and not worker.is_signalled:
            self._error_file.failed(worker.program.directory, code)
        if not self._workers:
            self._error_file.rest()
        at, step = self._clock(), self._last_step(worker)
        is_told = False

        def tell() -> None:
            nonlocal is_told
            if is_told:
                return
            is_told = True
            patience.cancel()
            self._last_words -= 1
            told = (worker.program.local_rank, _end(worker, code), step, at, worker.is_signalled)
            self._feed(WorkerEnded(worker.attempt, worker.stage, *told, worker.pid))
            self._nothing_lives()

        rules, is_last = self._rules, not self._workers

        def drained() -> None:
            if rules is not None and worker.stage is ProgramStage.TRAIN and code == 0:
                rules.end_rank(worker.rank)
            if rules is not None and is_last:
                rules.pause()
            _call_soon(self._loop, tell)

        patience = self._loop.call_later(LAST_WORDS_SECONDS, tell)
        self._output.finish(worker.streams, drained)

    def _last_step(self, worker: WorkerProcess) -> int | None:
        if self._watch is not None and worker.stage is ProgramStage.TRAIN:
            self._watch.end(worker.rank)
        if worker.page is None:
            return None
        step = worker.page.look().step
        worker.page.close()
        return step

    def _streams(
        self, attempt: int, program: Program, child: Child, rank: int, rhythm: WriteTimes
    ) -> tuple[Stream, ...]:
        ranks = self._options.local_ranks
        is_shown = ranks is None or program.local_rank in ranks
        hidden = kept_only(self._options, program.local_rank)

        def first() -> None:
            self._feed_from_thread(FirstOutput(attempt, program.local_rank))

        streams = []
        for number, (name, source) in enumerate(
            (("stdout", child.stdout), ("stderr", child.stderr)), 1
        ):
            stream = Stream(
                source=source,
                file=_open(f"{program.directory}/{name}.log"),
                path=f"{program.directory}/{name}.log",
                most_bytes=FILE_BYTES_MAX if self._has_own_directory else None,
                console=number if is_shown and not hidden & number else None,
                prefix=program.prefix,
                on_first=first,
                on_read=self._rules.reader(rank, name) if self._rules is not None else None,
                on_lines=functools.partial(self._take_lines, attempt, program.local_rank),
                rhythm=rhythm,
            )
            self._output.add(stream)
            streams.append(stream)
        return tuple(streams)


def can_boot(options: LaunchOptions) -> bool:
    """True if workers are started by boot.py."""
    if not options.is_warm or not kind_of(options.script) or not os.access(BOOT, os.R_OK):
        return False
    own, theirs = os.path.realpath(sys.executable), shutil.which(python())
    return theirs is not None and (os.path.realpath(theirs) == own or _is_recent(theirs))


def _is_recent(interpreter: str) -> bool:
    """True if it is a Python that can run boot.py."""
    asks = "import sys; sys.exit(sys.version_info < (3, 10))"
    try:
        # Loaded if workers have another interpreter than the agent.
        import subprocess

        done = subprocess.run(
            (interpreter, "-S", "-c", asks), capture_output=True, timeout=INTERPRETER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def given_directory(options: LaunchOptions) -> str:
    """Return the folder that was given for the output; empty: a new one is made."""
    return options.log_dir or os.environ.get("UNBROKEN_LOG_DIR", "")


def log_directories(options: LaunchOptions) -> dict[ProgramStage, str]:
    """Make this run's directory for each stage. Raises WorldError."""
    stages = {ProgramStage.TRAIN: ""}
    if options.pre_train is not None:
        stages[ProgramStage.PRE_TRAIN] = "pre_train_"
    if options.post_train is not None:
        stages[ProgramStage.POST_TRAIN] = "post_train_"
    given = given_directory(options)
    base = given or tempfile.gettempdir()
    try:
        os.makedirs(base, exist_ok=True)
        if not given:
            base = tempfile.mkdtemp(prefix="unbroken_")
        return {
            stage: tempfile.mkdtemp(prefix=f"{prefix}{options.run_id}_", dir=base)
            for stage, prefix in stages.items()
        }
    except OSError as error:
        raise WorldError(f"cannot write in {base}: {error.strerror}; choose --log-dir") from error


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call from another thread; if the loop has ended, nothing waits for the call."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _end(worker: WorkerProcess, code: int) -> WorkerEnd:
    if code == 0:
        return WorkerEnd(exit_code=0)
    stdout, stderr = worker.streams
    number = -code if code < 0 else None
    return WorkerEnd(
        exit_code=code if code > 0 else None,
        signal=number,
        lines=tail_text(stderr) or tail_text(stdout),
        error_file=facts.error_file(worker.program.directory),
        is_out_of_memory=number == SIGKILL and facts.oom_kills() > worker.oom_kills,
        is_shared_memory_full=number == SIGBUS and facts.is_shared_memory_full(),
    )


def _prepare(directory: str) -> None:
    """Make the directory of a worker's files, without leftovers of an earlier run."""
    try:
        os.makedirs(directory, exist_ok=True)
        Path(facts.error_path(directory)).unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot write in a directory", file=directory, error=error)


def _open(path: str) -> int | None:
    try:
        return open_file(path)
    except OSError as error:
        log.warning("cannot write a file", file=path, error=error)
        return None
