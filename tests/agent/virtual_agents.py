"""Agents of one process in virtual time: everything of them is real but the workers' processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tests.agent.running import KEY, Operator, linked
from unbroken.agent.driver import Driver
from unbroken.agent.evidence.log_watch import LogWatch
from unbroken.agent.options import LaunchOptions, Script
from unbroken.core.agent.events import (
    AgentEvent,
    FirstOutput,
    NothingLives,
    ProgramStage,
    StageStarted,
    WorkerEnded,
)
from unbroken.core.agent.faults import SIGKILL, WorkerEnd
from unbroken.runtime.drive import Alarm
from unbroken.wire.agent import AgentReport, ShutdownCommand, StartCommand

_PIDS = itertools.count(1 << 22)
"""Numbers that no process has: the kernel's are smaller."""


@dataclass
class Workers:
    """An owner whose workers live until they are killed, or `end` is called."""

    options: LaunchOptions
    feed: Callable[[AgentEvent], None]
    clock: Callable[[], float]
    note: str = "in virtual time"
    keeps: bool = False
    attempt: int = -1
    stage: ProgramStage = ProgramStage.TRAIN
    alive: dict[int, int] = field(default_factory=dict)
    """Local ranks of the living workers, by pid."""
    _command: StartCommand | None = None
    _rules: LogWatch | None = None
    _readers: dict[tuple[int, str], Callable[[bytes, bool], None]] = field(default_factory=dict)
    """What takes the output, by local rank and stream."""

    def __post_init__(self) -> None:
        self._alarm = Alarm(self.clock, lambda: self._look(LogWatch.tick))

    def start(self, imports_changed: Callable[[], None]) -> None:
        """Do nothing: there are no processes."""

    def spawn(self, stage: ProgramStage, command: StartCommand, kept: tuple[int, ...] = ()) -> None:
        """Start the workers; each writes a line at once."""
        self.attempt, self.stage = command.attempt, stage
        count = self.options.nproc if stage is ProgramStage.TRAIN else 1
        self.alive = {next(_PIDS): local_rank for local_rank in range(count)}
        if self._command is not command:
            self._command, self._rules = command, None
            self._readers.clear()
            if command.log_rules:
                self._rules = LogWatch.make(command, self.options.nproc, self.clock, self.feed)
        self._look(LogWatch.start)
        self.feed(StageStarted(command.attempt, stage, tuple(self.alive)))
        for local_rank in self.alive.values():
            self.feed(FirstOutput(command.attempt, local_rank))

    def write(self, local_rank: int, text: str, stream: str = "stdout") -> None:
        """Let a worker write."""
        key, rank = (local_rank, stream), self._rank(local_rank)

        def read(rules: LogWatch) -> None:
            self._readers.setdefault(key, rules.reader(rank, stream))(text.encode(), True)

        self._look(read)

    def _rank(self, local_rank: int) -> int:
        assert self._command is not None
        return self._command.rank * self.options.nproc + local_rank

    def _look(self, step: Callable[[LogWatch], None]) -> None:
        """Tell the job's log rules something, if there are any."""
        if self._rules is not None:
            step(self._rules)
        self._alarm.set(None if self._rules is None else self._rules.deadline())

    def end(self, local_rank: int, end: WorkerEnd) -> None:
        """Let a worker end."""
        self.alive = {pid: rank for pid, rank in self.alive.items() if rank != local_rank}
        if self.stage is ProgramStage.TRAIN and end.exit_code == 0:
            self._look(lambda rules: rules.end_rank(self._rank(local_rank)))
        if not self.alive:
            self._look(LogWatch.pause)
        self.feed(WorkerEnded(self.attempt, self.stage, local_rank, end))

    def last_output(self, pid: int) -> tuple[float | None, str]:
        """Return None: there is no output."""
        return None, ""

    def signal(self, number: int) -> None:
        """End the workers, all of which obey."""
        for local_rank in list(self.alive.values()):
            self.end(local_rank, WorkerEnd(signal=number))

    def kill_all(self, kept: tuple[int, ...] = ()) -> None:
        """Kill the workers."""
        self.signal(SIGKILL)
        self.feed(NothingLives())

    def local_ranks(self) -> Mapping[int, int]:
        """Return the local ranks of the living workers, by pid."""
        return self.alive

    async def warm_up(self) -> None:
        """Return at once: no worker starts warm."""

    def imports(self) -> Collection[str] | None:
        """Return None: no worker starts warm."""
        return None

    def warm(self) -> None:
        """Return None: no worker starts warm."""

    def import_beforehand(self, names: Sequence[str]) -> None:
        """Do nothing: no worker starts warm."""

    def close(self) -> None:
        """Do nothing: there is no output."""


class _Driver(Driver):
    """The agent, by the clock of the loop."""

    def __init__(self, options: LaunchOptions, key: bytes | None, *, link: bool) -> None:
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        super().__init__(options, key, self._own, link)

    def _own(
        self, options: LaunchOptions, feed: Callable[[AgentEvent], None], clock: Callable[[], float]
    ) -> Workers:
        self.workers = Workers(options, feed, clock)
        return self.workers

    def now(self) -> float:
        """Return the time of the loop, which never goes back."""
        return asyncio.get_running_loop().time()

    def _announce(self, port: int) -> None:
        self.port.set_result(port)


@dataclass
class Wire:
    """The way to an agent, which can carry nothing, or be cut."""

    target: int
    port: int = 0
    _flows: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._flows.set()
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """Carry nothing, as if the agent were stopped: its kernel still accepts connections."""
        self._flows.clear()

    def release(self) -> None:
        """Carry everything again."""
        self._flows.set()

    def cut(self) -> None:
        """End all connections and listen no more, as if the agent were killed."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(OSError):
            await self._flows.wait()
            back, onward = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.append(onward)
            ways = (self._one_way(reader, onward), self._one_way(back, writer))
            await asyncio.gather(*ways, return_exceptions=True)

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)


@dataclass
class Agent:
    """An agent that listens."""

    driver: _Driver
    port: int
    ended: asyncio.Task[int]
    """Ends with the exit code."""
    key: bytes | None

    @property
    def workers(self) -> Workers:
        """The owner of its workers."""
        return self.driver.workers

    def report(self) -> AgentReport:
        """Return the whole state."""
        return self.driver.report()

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        """Connect an operator."""
        async with linked(self.port, self.key, None) as operator:
            yield operator

    @contextlib.asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        """Put a wire before the agent."""
        wire = Wire(self.port)
        await wire.start()
        try:
            yield wire
        finally:
            wire.cut()


@contextlib.asynccontextmanager
async def agent(
    nproc: int = 2,
    port: int = 0,
    key: bytes | None = KEY,
    *,
    link: bool = True,
    post_train: Script | None = None,
) -> AsyncIterator[Agent]:
    """Run an agent during the block; it is told to shut down afterwards."""
    script = Script("train.py")
    options = LaunchOptions(script, nproc, 1, "127.0.0.1", port, post_train=post_train)
    driver = _Driver(options, key, link=link)
    ended = asyncio.create_task(driver.run(None))
    await asyncio.wait((ended, driver.port), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield Agent(driver, await driver.port, ended, key)
    finally:
        driver.command(ShutdownCommand())
        await ended
