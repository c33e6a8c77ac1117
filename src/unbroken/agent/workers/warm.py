"""Warm workers: the template process, and workers that are parked until an order comes.

core/agent/warm.py decides; wire/warm.py defines the messages and their receivers. The template and
the parked workers are children of this process that no stop ends: they descend from no worker.

The template leaves out modules that read a variable of one rank while they are imported, and those
whose library starts threads then. A parked worker may import them, because it is forked no more: it
is told the variables of the rank that it will probably become. If the rank that starts has other
values, another parked worker takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.agent.evidence import procfs
from unbroken.agent.options import LaunchOptions
from unbroken.core.agent import warm as core
from unbroken.core.tick import Tick
from unbroken.log_lines import Log
from unbroken.runtime.drive import Alarm
from unbroken.wire.agent import IMPORTS_MAX, WarmReport
from unbroken.wire.warm import LATER, LEARNT_VARIABLE, MESSAGE_BYTES_MAX, PER_ATTEMPT, PER_RANK

from . import facts, learned, lineage
from .environment import Program
from .spawn import LifePipe
from .template import LOWEST, NAME_CHARACTERS, TemplateProcess

log = Log(__name__)

TRIALS_MAX = 8
"""Parked workers that may end because a module is unfit for them; then no other one imports."""
_NAMES = tuple(name for name in PER_RANK if name not in PER_ATTEMPT)


@dataclass(slots=True, eq=False)
class ParkedWorker:
    """A worker that waits, or that the template is about to park."""

    pair: socket.socket
    pid: int = 0
    rank: Mapping[str, str] | None = None
    """Variables of the rank that it imports for; None: it may become any rank."""
    is_prepared: bool = False
    """True if it has imported for its rank."""

    def suits(self, program: Program) -> bool:
        """Return whether its imports allow it to become the program."""
        return self.rank is None or (self.is_prepared and self.rank == rank_of(program))

    def is_importing(self) -> bool:
        """Return whether it is importing for its rank."""
        return self.rank is not None and not self.is_prepared


@dataclass(slots=True)
class ParkedRanks:
    """Ranks of this node, and what parked workers import for them."""

    programs: dict[int, Program] = field(default_factory=dict)
    """Newest program of each local rank."""
    later: int = 0
    """Modules that the template leaves to parked workers."""
    imported: int = 0
    """Most modules that a parked worker has imported for its rank."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Reasons, by module that no parked worker must import either."""
    trials: int = 0
    """Parked workers that have ended because a module was unfit for them."""

    def left_out(self, template: Mapping[str, str]) -> dict[str, str]:
        """Return the reasons by module that every start imports, of those that the template leaves
        out."""
        if not self.imported:
            return dict(template)
        rest = {name: why for name, why in template.items() if not why.endswith(LATER)}
        return {**rest, **self.unfit}

    def may_try(self) -> bool:
        """Return whether parked workers import for their ranks."""
        return self.trials < TRIALS_MAX

    def prepare_next(self, parked: Sequence[ParkedWorker]) -> ParkedWorker | None:
        """Have one of the workers import for a rank that none has imported for, unless one does so
        now: they must not take all processors from the training. Return it."""
        taken = [each.rank for each in parked if each.rank is not None]
        ranks = [rank for rank in map(rank_of, self.programs.values()) if rank not in taken]
        free = [each for each in parked if each.pid and each.rank is None]
        may_try = self.later and self.may_try()
        if not (may_try and ranks and free) or any(each.is_importing() for each in parked):
            return None
        order = {"type": "prepare", "environment": ranks[0], "left_out": self.unfit}
        try:
            free[0].pair.send(json.dumps(order).encode())
        except OSError:
            return None  # It has ended, and will be reaped.
        free[0].rank = ranks[0]
        return free[0]

    def take_answer(self, parked: ParkedWorker) -> bool:
        """Read the answer of a worker that imports for its rank; return False if there is none
        yet."""
        try:
            data = parked.pair.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        answer = json.loads(data or "null")
        if answer is None:
            self.trials = TRIALS_MAX
            log.warning("a parked worker ended while it imported for its rank", pid=parked.pid)
        elif answer["left_out"]:
            self.trials += 1
            self.unfit.update(answer["left_out"])
            log.info("parked workers leave out modules", count=len(answer["left_out"]))
        else:
            parked.is_prepared, self.imported = True, max(self.imported, answer["modules"])
            log.info("parked worker has imported for its rank", count=answer["modules"])
        return True

    def unsuitable(self, parked: Sequence[ParkedWorker]) -> list[ParkedWorker]:
        """Return the workers that are of no use for the newest programs, or not yet."""
        ranks = [rank_of(program) for program in self.programs.values()]
        own = [each for each in parked if each.rank is not None]
        return [each for each in own if not each.is_prepared or each.rank not in ranks]


def rank_of(program: Program) -> dict[str, str]:
    """Return the variables of a program's rank that no new attempt changes by itself."""
    variables = program.environment
    return {name: variables[name] for name in _NAMES if name in variables}


PATIENCE_SECONDS = 0.5
"""Seconds that a start waits for a template that sends nothing."""
RECALL_SECONDS, RECALL_SECONDS_MAX = 60.0, 300.0
"""Seconds that the first start waits for a template with learned imports, beyond twice the time
that they once took; and at most. The limit is for imports that hang: on a slow machine, where the
template takes long, its workers would take longer."""
LEARNT = 61
"""Descriptor in a worker; the page's is the next."""
LEARNT_BYTES_MAX = 1024 * 1024


class WarmStarts:
    """The agent's warm starts. Feed it events of training workers; `hand` starts one of the parked
    workers."""

    def __init__(
        self,
        options: LaunchOptions,
        lease: LifePipe,
        clock: Callable[[], float],
        turned_cold: Callable[[int], None],
        parked: Callable[[], None],
        imports_changed: Callable[[], None],
    ) -> None:
        """`turned_cold` takes the pid of a worker that had been handed out; `parked`: `pids` has
        another one."""
        self._machine = core.Warm(options.nproc, facts.processors() > options.nproc)
        self._preload = options.preload
        self._learners_max = 2 * options.nproc
        self._lease, self._clock = lease, clock
        self._turned_cold, self._report_parked = turned_cold, parked
        self._imports_changed = imports_changed
        self.doomed: set[int] = set()
        """Children that are not reaped, and were killed as leftovers of a worker."""
        self._learnt: list[int] = []
        """Descriptors of files with the names of modules, of the newest workers."""
        self._old_imports: dict[str, None] = {}
        """Modules that older workers have imported."""
        self._modules: dict[str, None] = {}
        """Modules that the template was ordered to import."""
        self._fit: dict[str, None] = {}
        """Modules that a usable template has imported."""
        self._unfit: set[str] = set()
        self._left_out: dict[str, str] = {}
        """Reasons, by module that templates have found unfit."""
        self._files: dict[str, str] = {}
        """States of the files that they have read."""
        self._recalled: learned.Learned | None = None
        """Result of an earlier run; None: there is none, or a template has failed with it."""
        self._is_prepared = asyncio.Event()
        """Workers are parked, or will not be soon."""
        self._program: Program | None = None
        """First program of the newest attempt."""
        self._ranks = ParkedRanks()
        self._given: Mapping[str, str] = {}
        """The template's environment."""
        self._template: TemplateProcess | None = None
        self._parked: list[ParkedWorker] = []
        self._ending: set[int] = set()
        self._alarm = Alarm(clock, lambda: self._feed(Tick()))
        self._loop = asyncio.get_running_loop()
        self._refusal, self._is_first = "", True
        self._modules_count, self._seconds = 0, 0.0
        """Modules that the template has imported, and the longest that it took."""
        self._published: tuple[int | None, WarmReport | None] = 0, None

    def pids(self) -> Collection[int]:
        """Return the processes that descend from no worker."""
        pids = {parked.pid for parked in self._parked if parked.pid} | self._ending
        return pids | {self._template.pid} if self._template is not None else pids

    def open(self, program: Program) -> None:
        """Begin before any start if the job has named the modules to import."""
        if self._preload:
            self._program = program
            self._feed(core.Named())

    def report(self) -> WarmReport:
        """Return how the workers would start next."""
        lines = core.left_out_lines(self._ranks.left_out(self._left_out))
        known = self._modules_count, self._seconds, lines, self._ranks.imported
        return WarmReport(self._machine.obstacle(), *known)

    async def recall(self, program: Program, known: learned.Learned) -> None:
        """Begin with what an earlier run has learned; return when workers are parked, or will not
        be soon."""
        self._program, self._recalled = program, known
        self._old_imports.update(dict.fromkeys(known.modules))
        self._left_out, self._files = dict(known.left_out), dict(known.files)
        self._seconds = known.seconds
        self._feed(core.Named())
        seconds = min(RECALL_SECONDS + 2 * known.seconds, RECALL_SECONDS_MAX)
        try:
            async with asyncio.timeout(seconds):
                await self._is_prepared.wait()
        except TimeoutError:
            log.warning("workers do not wait for the template", seconds=seconds)
            # No other start is delayed, unless this template becomes ready.
            learned.forget(learned.folder(), learned.entry_of(program))
            self._recalled = None

    def imports(self) -> Collection[str] | None:
        """Return the modules that a usable template was sent; None: no start will be warm, or the
        job names the modules."""
        if self._preload or self._machine.has_given_up:
            return None
        return () if self._template is None else self._fit

    def peer_imports(self, program: Program, names: Sequence[str]) -> None:
        """Take the names of modules that workers of other agents import; `program` is used before
        any start."""
        self._program = self._program or program
        if len(self._old_imports) < IMPORTS_MAX:
            self._old_imports.update(dict.fromkeys(names))
        self._feed(core.Named(bool(self._news())))

    def prepare(self, programs: Sequence[Program]) -> None:
        """Wait briefly for the template before a start, if only its answers are missing."""
        if not programs:
            return
        self._program = programs[0]
        if self._template is not None and _shared(programs[0].environment) != self._given:
            self._feed(core.Checked("the environment"))
        count = len(programs) + self._others(programs)
        self._act(self._machine.ask(count, self._clock()))
        while self._template is not None and self._machine.is_unsure(count, self._clock()):
            waiting = select.poll()
            waiting.register(self._template.pair, select.POLLIN)
            if not waiting.poll(PATIENCE_SECONDS * 1000):
                break
            self._read()
        self._refusal = self._machine.refusal(self._clock())

    def _others(self, programs: Sequence[Program]) -> int:
        """End parked workers that are prepared for no rank; return how many are for others than
        these."""
        self._ranks.programs.update({each.local_rank: each for each in programs})
        for parked in [each for each in self._parked if each.is_importing()]:
            self._take_prepared(parked)
        for parked in self._ranks.unsuitable(self._parked):
            self._parked.remove(parked)
            self._end_one(parked)
            self._feed(core.ParkedEnded())
        return sum(not any(map(each.suits, programs)) for each in self._parked)

    def hand(
        self, program: Program, inherited: Mapping[int, int], bind: Callable[[int], None]
    ) -> int | None:
        """Let a parked worker become the program; return its pid. None: it has to be started
        cold."""
        if self._refusal:
            return None
        taught = program if self._preload else self.learning(program)
        given = {**inherited, **taught.lent}
        order = {
            "type": "run",
            "environment": dict(taught.environment),
            "directory": os.getcwd(),
            "kind": program.kind,
            "arguments": program.arguments,
            "numbers": list(given),
        }
        data = json.dumps(order).encode()
        if len(data) > MESSAGE_BYTES_MAX:
            self._refusal = f"its environment and arguments take {len(data)} bytes"
            return None
        able = [each for each in self._parked if each.pid and each.suits(program)]
        for parked in sorted(able, key=lambda each: each.rank is None):
            self._parked.remove(parked)
            with contextlib.suppress(OSError):
                # A process that was killed takes the order until the kernel closes its files.
                if not lineage.is_dying(parked.pid):
                    bind(parked.pid)
                    socket.send_fds(parked.pair, [data], list(given.values()))
                    self._loop.add_reader(parked.pair, self._read_start, parked)
                    return parked.pid
            parked.pair.close()
            self._ending.add(parked.pid)
            self._feed(core.ParkedEnded())
        self._refusal = "nobody is parked any more"
        return None

    def _read_start(self, parked: ParkedWorker) -> None:
        """Read from a worker that has its order: it sends that it cannot be warm, or nothing."""
        with contextlib.suppress(OSError):
            data = parked.pair.recv(MESSAGE_BYTES_MAX)
            if data:
                log.info(
                    "worker started cold", pid=parked.pid, reason=json.loads(data).get("reason")
                )
                self._turned_cold(parked.pid)
                return
        self._loop.remove_reader(parked.pair)
        parked.pair.close()

    def learning(self, program: Program) -> Program:
        """Return the program, set up to report its imports."""
        try:
            made = os.memfd_create("unbroken-learnt", os.MFD_CLOEXEC)
            with os.fdopen(made, "wb", buffering=0):
                kept = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, LOWEST)
        except OSError as error:
            log.warning("imports of workers are not learned", error=error)
            return program
        self._learnt.append(kept)
        if len(self._learnt) > self._learners_max:
            oldest = self._learnt.pop(0)
            self._old_imports.update(dict.fromkeys(_learnt([oldest])))
            os.close(oldest)
        return replace(
            program,
            environment={**program.environment, LEARNT_VARIABLE: str(LEARNT)},
            lent={**program.lent, LEARNT: kept},
        )

    def began(self, attempt: int, starts: Sequence[bool]) -> None:
        """Note that the workers of an attempt have been started, warm or not."""
        if not all(starts):
            level = logging.DEBUG if self._is_first else logging.INFO
            log.log(level, "workers started cold", attempt=attempt, reason=self._refusal)
        self._is_first = False
        self._feed(core.Began(warm=sum(starts)))

    def step_reported(self) -> None:
        """Note that a worker has reported a step."""
        self._feed(core.StepReported())

    def stop_began(self) -> None:
        """Note that the workers are being ended."""
        if self._template is not None:
            self._read()
        self._feed(core.StopBegan())

    def reaped(self, pid: int, code: int) -> None:
        """Note that a child that is no worker has ended."""
        self._ending.discard(pid)
        if self._template is not None and pid == self._template.pid:
            self._failed(f"the template ended with code {code}")
        for parked in [each for each in self._parked if each.pid == pid]:
            if parked.is_importing():
                self._take_prepared(parked)
            self._parked.remove(parked)
            self._close(parked)
            self._feed(core.ParkedEnded())
            if parked.is_importing() and self._ranks.may_try():
                self._act(self._machine.ask(len(self._ranks.programs), self._clock()))

    def close(self) -> None:
        """End the template and the parked workers; they are not reaped here."""
        self._alarm.set(None)
        self._end()

    def _feed(self, event: core.WarmEvent) -> None:
        self._act(self._machine.step(event, self._clock()))
        if not self._machine.is_preparing:
            self._is_prepared.set()
        if self._machine.may_import_more:
            self._prepare_next()
        self._restate()
        self._alarm.set(self._machine.deadline())

    def _restate(self) -> None:
        known = self.imports()
        state = None if known is None else len(known), self.report()
        if state != self._published:
            self._published = state
            self._loop.call_soon(self._imports_changed)

    def _act(self, effects: Sequence[core.WarmEffect]) -> None:
        for effect in effects:
            match effect:
                case core.LookAtImports():
                    self._feed(core.Imported(self._last_import(), bool(self._news())))
                case core.StartTemplate():
                    self._start()
                case core.PauseTemplate():
                    assert self._template is not None
                    self._template.pause()
                case core.ResumeTemplate():
                    assert self._template is not None
                    self._template.resume()
                case core.Teach():
                    self._teach()
                case core.EndTemplate():
                    self._end()
                case core.Park(count):
                    self._park(count)
                case core.AskFresh():
                    assert self._template is not None
                    self._template.send({"type": "check"})

    def _last_import(self) -> float | None:
        result = [os.fstat(fd) for fd in self._learnt]
        # A warm worker may have nothing to write: its file is as old as the start.
        times = [one.st_mtime for one in result if one.st_size] or [one.st_mtime for one in result]
        return min(max(times), self._clock()) if times else None

    def _news(self) -> list[str]:
        """Return modules that workers have imported and the template was not sent."""
        if self._preload:
            return []
        heard = self._old_imports | dict.fromkeys(_learnt(self._learnt))
        return [name for name in heard if name not in self._modules and name not in self._unfit]

    def _teach(self) -> None:
        assert self._template is not None
        news = self._news()
        self._modules.update(dict.fromkeys(news))
        self._end_parked()
        self._template.teach(news, False)

    def _start(self) -> None:
        assert self._program is not None
        self._modules.update(dict.fromkeys(self._news()))
        self._given = _shared(self._program.environment)
        try:
            self._template = TemplateProcess.start(self._program, self._given, self._lease)
        except OSError as error:
            self._feed(core.TemplateFailed(f"the template cannot be started: {error.strerror}"))
            return
        self._loop.add_reader(self._template.pair, self._read)
        names = self._preload or tuple(self._modules)
        self._template.teach(names, bool(self._preload), self._left_out)

    def _park(self, count: int) -> None:
        assert self._template is not None
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._parked.append(ParkedWorker(ours))
            self._template.send({"type": "park"}, theirs)

    def _read(self) -> None:
        """Take the template's messages."""
        template = self._template
        while template is not None and template is self._template:
            try:
                data = template.pair.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._failed("the template ended")
                return
            self._take(json.loads(data))

    def _take(self, message: Mapping[str, Any]) -> None:
        match message.get("type"):
            case "found":
                self._left_out.update(message.get("left_out", {}))
                self._files.update(message.get("files", {}))
            case "ready":
                self._ready(message)
            case "unsafe":
                self._failed(f"unsafe: {message['reason']}")
            case "parked":
                self._take_parked(message["pid"])
            case "fresh":
                self._feed(core.Checked())
            case "stale":
                self._left_out.clear()
                self._files.clear()
                log.info("next start is cold: a file has changed", file=message["file"])
                self._feed(core.Checked(str(message["file"])))
            case _:
                log.debug("unknown message of the template", message=message)

    def _ready(self, message: Mapping[str, Any]) -> None:
        for name, why in message["skipped"].items():
            log.debug("module not imported beforehand", module=name, error=why)
        self._fit, self._modules_count = dict(self._modules), message["modules"]
        self._ranks.later = message["later"]
        # A lesson took less than all of the imports.
        self._seconds = max(self._seconds, message["seconds"])
        log.info("template is ready for warm starts", count=message["modules"])
        if not self._preload:
            self._write()
        self._feed(core.TemplateReady())

    def _write(self) -> None:
        """Keep what the template has learned for the next start of the program."""
        assert self._program is not None
        known = (dict(self._left_out), dict(self._files), self._seconds)
        now = learned.Learned(tuple(self._modules), *known)
        before = self._recalled
        if before is None or replace(before, seconds=self._seconds) != now:
            self._recalled = now
            place = learned.folder(), learned.entry_of(self._program)
            self._loop.run_in_executor(None, learned.write, *place, now)

    def _take_parked(self, pid: int) -> None:
        parked = next(each for each in self._parked if not each.pid)
        if pid in self.doomed or pid not in lineage.children():
            # Before it was known, it was taken as a leftover of a worker.
            self._parked.remove(parked)
            parked.pair.close()
            self._feed(core.Parked())
            self._feed(core.ParkedEnded())
            return
        parked.pid = pid
        self._feed(core.Parked())
        if all(each.pid for each in self._parked):
            memory = procfs.memory_bytes(pid) if log.is_on(logging.INFO) else None
            own, shared = (None, None) if memory is None else (n >> 20 for n in memory)
            log.info("workers are parked", count=len(self._parked), own_mib=own, shared_mib=shared)
        self._report_parked()

    def _failed(self, reason: str) -> None:
        if self._template is not None:
            words = self._template.last_words()
            told = f"{reason} ({words})" if words else reason
            log.info("next start is cold", reason=told)
            self._feed(core.TemplateFailed(told))

    def _end(self) -> None:
        if self._fit:
            # The modules it was sent last may have caused its end.
            self._unfit.update(self._modules.keys() - self._fit)
            self._modules = dict(self._fit)
        elif self._recalled is not None:
            self._unlearn()
        template, self._template = self._template, None
        if template is not None:
            self._ending.add(template.pid)
            template.end()
        self._end_parked()

    def _unlearn(self) -> None:
        """Forget what an earlier run has learned: no template was fit with it."""
        assert self._program is not None
        learned.forget(learned.folder(), learned.entry_of(self._program))
        self._recalled = None
        for each in (self._modules, self._old_imports, self._left_out, self._files):
            each.clear()

    def _end_parked(self) -> None:
        for parked in self._parked:
            self._end_one(parked)
        self._parked.clear()

    def _end_one(self, parked: ParkedWorker) -> None:
        self._close(parked)
        if parked.pid:
            self._ending.add(parked.pid)
            lineage.kill(parked.pid, signal.SIGKILL)

    def _close(self, parked: ParkedWorker) -> None:
        self._loop.remove_reader(parked.pair)
        parked.pair.close()

    def _prepare_next(self) -> None:
        parked = self._ranks.prepare_next(self._parked)
        if parked is not None:
            self._loop.add_reader(parked.pair, self._take_prepared, parked)

    def _take_prepared(self, parked: ParkedWorker) -> None:
        """Take the answer of a parked worker that imports for its rank, if there is one."""
        if self._ranks.take_answer(parked):
            self._loop.remove_reader(parked.pair)
            if parked.is_prepared and self._machine.may_import_more:
                self._prepare_next()
            self._restate()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are equal for every rank and attempt."""
    return {name: value for name, value in environment.items() if name not in PER_RANK}


def _learnt(files: Sequence[int]) -> Iterator[str]:
    """Return the names of modules, in the order in which they were imported."""
    for fd in files:
        # The text after the last line end is half a name.
        text = os.pread(fd, LEARNT_BYTES_MAX, 0).decode(errors="replace").rpartition("\n")[0]
        yield from (line for line in text.split("\n") if 0 < len(line) <= NAME_CHARACTERS)
