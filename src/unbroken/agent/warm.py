"""Warm workers: the template process, and workers that are parked until there is an order for them.

What is decided is decided in core/warm.py; wire/warm.py is what is said, and to whom.  The template
and the parked are children of this process that no stop ends: they descend from no worker.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.core import warm as core
from unbroken.wire.warm import LEARNT_VARIABLE, MESSAGE_BYTES_MAX, PER_RANK

from . import lineage
from .environment import BOOT, Program, python
from .lease import Lease
from .options import Options
from .spawn import posix_spawn

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.1
"""How long a start may wait for the template's answer."""
LEARNT = 61
"""Descriptor in a worker; the page's is the next."""
_LOWEST = 64
"""Of ours: the start of a worker overwrites lower ones."""
_PAIR = 4
"""Descriptor in the template."""
LEARNT_BYTES_MAX = 1024 * 1024
NAME_CHARACTERS = 300
WORD_CHARACTERS = 200


@dataclass(slots=True, eq=False)
class _Parked:
    """A worker that waits, or that the template is about to park."""

    pair: socket.socket
    pid: int = 0


class _Template:
    """The process; what is sent to it waits until it reads."""

    def __init__(self, pid: int, pair: socket.socket, output: int) -> None:
        self.pid = pid
        self.pair = pair
        self.output = output
        """A file in memory with all that it has written."""
        self._unsent: collections.deque[tuple[bytes, list[socket.socket]]] = collections.deque()

    def send(self, message: Mapping[str, Any], *beside: socket.socket) -> None:
        """In order; what cannot be sent any more is told by the end of its pair."""
        self._unsent.append((json.dumps(message).encode(), list(beside)))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            data, beside = self._unsent[0]
            try:
                socket.send_fds(self.pair, [data], [one.fileno() for one in beside])
            except BlockingIOError:
                loop.add_writer(self.pair, self._flush)
                return
            except OSError:
                self._unsent.clear()
                break
            for one in beside:
                one.close()
            self._unsent.popleft()
        loop.remove_writer(self.pair)

    def last_words(self) -> str:
        """The last line that it wrote."""
        size = os.fstat(self.output).st_size
        text = os.pread(self.output, 4096, max(0, size - 4096)).decode(errors="replace")
        return (text.strip().splitlines() or [""])[-1][:WORD_CHARACTERS]

    def end(self) -> None:
        """Kill it; who owns our children reaps it."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self.pair)
        loop.remove_reader(self.pair)
        lineage.kill_group(self.pid)
        self.pair.close()
        os.close(self.output)


class WarmStarts:
    """Feed it what happens to training workers; `hand` starts one from those that are parked."""

    def __init__(self, options: Options, lease: Lease, clock: Callable[[], float]) -> None:
        self._machine = core.Warm(options.nproc)
        self._preload = options.preload
        self._lease = lease
        self._clock = clock
        self._learnt: list[int] = []
        """Descriptors of files with the names of modules, by local rank, of the newest attempt."""
        self._modules: dict[str, None] = {}
        """Of the workers that learned last."""
        self._program: Program | None = None
        """The newest attempt's first."""
        self._given: Mapping[str, str] = {}
        """The template's environment."""
        self._template: _Template | None = None
        self._parked: list[_Parked] = []
        self._ending: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._refusal = ""

    def pids(self) -> Collection[int]:
        """Processes that descend from no worker."""
        pids = {one.pid for one in self._parked if one.pid} | self._ending
        return pids | {self._template.pid} if self._template is not None else pids

    def prepare(self, programs: Sequence[Program]) -> None:
        """A start is about to come: wait a moment for the template, if only its answer lacks."""
        if not programs:
            return
        for fd in self._learnt:
            os.close(fd)
        self._learnt.clear()
        self._program = programs[0]
        now = self._loop.time()
        due = now + PATIENCE_SECONDS
        if self._machine.is_unsure(self._clock()):
            self._act(self._machine.ask(self._clock()))
        while self._machine.is_unsure(self._clock()) and self._template is not None:
            left = due - self._loop.time()
            if left <= 0 or not select.select([self._template.pair], [], [], left)[0]:
                break
            self._read()
        self._refusal = self._machine.refusal(self._clock())
        if not self._refusal and _shared(programs[0].environment) != self._given:
            self._refusal = "the environment has changed"

    def hand(
        self, program: Program, inherited: Mapping[int, int], bind: Callable[[int], None]
    ) -> int | None:
        """Let a parked worker become the program; its pid.  None: it has to be started cold."""
        order = {
            "type": "run",
            "environment": dict(program.environment),
            "directory": os.getcwd(),
            "kind": program.kind,
            "arguments": program.arguments,
            "numbers": list(inherited),
        }
        data = json.dumps(order).encode()
        if len(data) > MESSAGE_BYTES_MAX:
            self._refusal = self._refusal or f"its environment and arguments take {len(data)} bytes"
        if self._refusal:
            return None
        for one in [each for each in self._parked if each.pid]:
            self._parked.remove(one)
            try:
                bind(one.pid)
                socket.send_fds(one.pair, [data], list(inherited.values()))
            except OSError:
                # It has ended, and is about to be reaped.
                one.pair.close()
                self._feed(core.ParkedEnded())
                continue
            self._loop.add_reader(one.pair, self._hear, one)
            return one.pid
        self._refusal = "nobody is parked any more"
        return None

    def _hear(self, one: _Parked) -> None:
        """Of a worker that has its order: that it cannot be warm, or nothing."""
        with contextlib.suppress(OSError):
            data = one.pair.recv(MESSAGE_BYTES_MAX)
            if data:
                logger.info("pid=%d start=cold reason=%r", one.pid, json.loads(data).get("reason"))
                return
        self._loop.remove_reader(one.pair)
        one.pair.close()

    def learning(self, program: Program) -> Program:
        """The program for a cold start, which tells what it imports."""
        try:
            made = os.memfd_create("unbroken-learnt", os.MFD_CLOEXEC)
            with os.fdopen(made, "wb", buffering=0):
                kept = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
        except OSError as error:
            logger.warning("imports are not learned reason=%r", error.strerror)
            return program
        self._learnt.append(kept)
        return replace(
            program,
            environment={**program.environment, LEARNT_VARIABLE: str(LEARNT)},
            lent={**program.lent, LEARNT: kept},
        )

    def began(self, attempt: int, starts: Sequence[bool]) -> None:
        """The workers of an attempt have been started; warm or not."""
        if not all(starts):
            is_usual = self._template is None and self._refusal == core.FIRST
            level = logging.DEBUG if is_usual else logging.INFO
            logger.log(level, "attempt=%s start=cold reason=%r", attempt, self._refusal)
        self._feed(core.Began(warm=sum(starts)))

    def step_told(self) -> None:
        """A worker has told a step."""
        self._feed(core.StepTold())

    def stop_began(self) -> None:
        """The workers are being ended."""
        if self._template is not None:
            self._read()
        self._feed(core.StopBegan())

    def reaped(self, pid: int, code: int) -> None:
        """A child that is no worker has ended."""
        self._ending.discard(pid)
        if self._template is not None and pid == self._template.pid:
            self._failed(f"the template ended with code {code}")
        for one in [each for each in self._parked if each.pid == pid]:
            self._parked.remove(one)
            one.pair.close()
            self._feed(core.ParkedEnded())

    def close(self) -> None:
        """Let nothing of it live; nobody reaps it here."""
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def _feed(self, event: core.Event) -> None:
        self._act(self._machine.step(event, self._clock()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._machine.deadline()
        if due is not None:
            delay = max(0.0, due - self._clock())
            self._timer = self._loop.call_later(delay, self._feed, core.Tick())

    def _act(self, effects: Sequence[core.Effect]) -> None:
        for effect in effects:
            match effect:
                case core.LookAtImports():
                    self._feed(core.Imported(self._last_import()))
                case core.StartTemplate():
                    self._start()
                case core.EndTemplate():
                    self._end()
                case core.Park(count):
                    self._park(count)
                case core.AskFresh():
                    assert self._template is not None
                    self._template.send({"type": "check"})

    def _last_import(self) -> float | None:
        times = [os.fstat(fd).st_mtime for fd in self._learnt]
        return min(max(times), self._clock()) if times else None

    def _start(self) -> None:
        assert self._program is not None
        if self._learnt and not self._preload:
            self._modules = dict.fromkeys(_learnt(self._learnt))
        self._given = _shared(self._program.environment)
        try:
            self._template = self._spawn(self._program)
        except OSError as error:
            self._feed(core.TemplateFailed(f"the template cannot be started: {error.strerror}"))
            return
        self._loop.add_reader(self._template.pair, self._read)
        for message in _imports(self._preload or tuple(self._modules), bool(self._preload)):
            self._template.send(message)

    def _spawn(self, program: Program) -> _Template:
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(theirs)
            output = os.memfd_create("unbroken-template", os.MFD_CLOEXEC)
            lent = self._lease.lend()
            stack.callback(os.close, lent)
            given = {_PAIR: theirs.fileno(), 3: lent, 1: output, 2: output}
            raised = {}
            for number, fd in given.items():
                raised[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
                stack.callback(os.close, raised[number])
            words = ("template", str(_PAIR), program.kind, *program.arguments)
            pid = posix_spawn((python(), "-u", BOOT, *words), self._given, raised)
            self._lease.bind(lent, pid)
        ours.setblocking(False)
        return _Template(pid, ours, output)

    def _park(self, count: int) -> None:
        assert self._template is not None
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._parked.append(_Parked(ours))
            self._template.send({"type": "park"}, theirs)

    def _read(self) -> None:
        """Take what the template has said."""
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
            case "ready":
                self._ready(message)
            case "unsafe":
                self._failed(f"unsafe: {message['reason']}")
            case "parked":
                self._take_parked(message["pid"])
            case "fresh":
                self._feed(core.Checked())
            case "stale":
                logger.info("warm: %s has changed; the next start is cold", message["file"])
                self._feed(core.Checked(str(message["file"])))
            case _:
                logger.debug("warm: the template says %.80s", message)

    def _ready(self, message: Mapping[str, Any]) -> None:
        for name, why in message["skipped"].items():
            logger.debug("warm: %s is not imported beforehand: %s", name, why)
        shared = message.get("rss_bytes")
        told = f", {shared >> 20} MiB shared" if shared else ""
        logger.info("warm: %d modules%s", message["modules"], told)
        self._feed(core.TemplateReady())

    def _take_parked(self, pid: int) -> None:
        one = next(each for each in self._parked if not each.pid)
        if pid not in lineage.children():
            # It ended before it was known, and was taken for what a worker had left.
            self._parked.remove(one)
            one.pair.close()
            self._feed(core.Parked())
            self._feed(core.ParkedEnded())
            return
        one.pid = pid
        self._feed(core.Parked())
        if all(each.pid for each in self._parked):
            logger.info("warm: %d are parked", len(self._parked))

    def _failed(self, reason: str) -> None:
        if self._template is not None:
            words = self._template.last_words()
            told = f"{reason} ({words})" if words else reason
            logger.info("warm: the next start is cold reason=%r", told)
            self._feed(core.TemplateFailed(told))

    def _end(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            self._ending.add(template.pid)
            template.end()
        for one in self._parked:
            one.pair.close()
            if one.pid:
                self._ending.add(one.pid)
                lineage.kill(one.pid, signal.SIGKILL)
        self._parked.clear()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    """What is the same for every rank and attempt."""
    return {name: value for name, value in environment.items() if name not in PER_RANK}


def _learnt(files: Sequence[int]) -> Iterator[str]:
    """Names of modules, in the order in which they were imported."""
    for fd in files:
        # What follows the last line is half a name.
        text = os.pread(fd, LEARNT_BYTES_MAX, 0).decode(errors="replace").rpartition("\n")[0]
        yield from (line for line in text.split("\n") if 0 < len(line) <= NAME_CHARACTERS)


def _imports(names: Sequence[str], is_given: bool) -> Iterator[Mapping[str, Any]]:
    """Messages that name them, none too long."""
    most = MESSAGE_BYTES_MAX // (6 * NAME_CHARACTERS)
    starts = range(0, max(1, len(names)), most)
    for start in starts:
        yield {
            "type": "import",
            "modules": list(names[start : start + most]),
            "is_given": is_given,
            **({"more": True} if start != starts[-1] else {}),
        }
