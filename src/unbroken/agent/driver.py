"""The agent's loop: the clock, the machine, and everything that the machine orders."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import unbroken
from unbroken.agent.snapshots.messages import SnapshotMessages
from unbroken.agent.socket.conversation import Conversation
from unbroken.agent.workers.environment import environment
from unbroken.agent.workers.processes import Processes
from unbroken.agent_http.identity import Guard
from unbroken.agent_http.server import AgentServer
from unbroken.agent_http.snapshots import CopyStore
from unbroken.core.agent.events import (
    AgentEffect,
    AgentEvent,
    Commanded,
    Exit,
    HoldLease,
    KillAll,
    OfferPort,
    PortFound,
    Prepared,
    ProgramStage,
    Publish,
    Recall,
    ReleaseWorkers,
    Renewed,
    Settings,
    SignalWorkers,
    Spawn,
    Terminated,
    Vouched,
)
from unbroken.core.agent.machine import Workers
from unbroken.core.tick import Tick
from unbroken.errors import WorldError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.log_lines import Log
from unbroken.runtime.drive import Alarm
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    PROCESS_RESTART,
    AgentReport,
    AgentState,
    Command,
    HistoryCommand,
    PeerAnswer,
    PeerQuestion,
    Request,
    StartCommand,
    WarmCommand,
    WarmReport,
    WorkerReport,
)
from unbroken.wire.agent_bodies import Status
from unbroken.wire.ipc import VARIABLE as SOCKET_VARIABLE
from unbroken.wire.observation import CollectCommand, Evidence

from .options import LaunchOptions
from .peers import PeerQuestions
from .ports import OfferedPorts
from .workers.environment import DIRECTORY, DIRECTORY_VARIABLE, RankTable
from .workers.expiry import Expiry
from .workers.keeper import boot_seconds

if TYPE_CHECKING:
    from unbroken.agent.evidence.examine import RankExamination, Sampling

log = Log(__name__)

PORT_RETRY_SECONDS = 1.0
"""Seconds from a search that found no free port to the next one."""
HOLD_SECONDS = 2.0
"""Seconds for an operator to answer whether a start is still wanted."""
UID_VARIABLE = "UNBROKEN_POD_UID"
"""Environment variable with the uid of the agent's own pod, which the agent proves to its peers."""
ARRIVE_SECONDS = 5.0
"""Seconds for a worker to leave its training."""
ARRIVE_VARIABLE = "UNBROKEN_ARRIVE_SECONDS"
"""Environment variable that replaces `ARRIVE_SECONDS` by another whole number."""


class WorkerOwner(Protocol):
    """The program that owns the workers' processes: the agent's own `Processes`, or torchrun."""

    note: str
    """Destination of the output, in words for people."""
    keeps: bool
    """Workers can be kept over a stop, and are served a socket."""

    def start(self, imports_changed: Callable[[], None]) -> None:
        """Take charge."""

    async def warm_up(self) -> None:
        """Return when workers can start, warm if what they import is known by now."""

    def spawn(self, stage: ProgramStage, command: StartCommand, kept: tuple[int, ...] = ()) -> None:
        """Start the workers of a stage, except for the kept local ranks, which belong to this
        attempt from now on; feed `StageStarted` or `SpawnFailed`."""

    def last_output(self, pid: int) -> tuple[float | None, str]:
        """Return when a worker last wrote, and its last line; None: not known."""

    def signal(self, number: int) -> None:
        """Signal every living worker."""

    def kill_all(self, kept: tuple[int, ...] = ()) -> None:
        """End everything that descends from a worker, except for these local ranks; feed
        `NothingLives`."""

    def local_ranks(self) -> Mapping[int, int]:
        """Return the local ranks of the living training workers, by pid."""

    def imports(self) -> Collection[str] | None:
        """Return the names of modules that workers started warm have imported; None: no worker ever
        starts warm."""

    def warm(self) -> WarmReport | None:
        """Return how the workers would start next; None: always cold, or nothing has started."""

    def import_beforehand(self, names: Sequence[str]) -> None:
        """Take the names of modules that workers of other agents import."""

    def close(self) -> None:
        """Write out pending output."""


MakeOwner = Callable[
    [LaunchOptions, Callable[[AgentEvent], None], Callable[[], float]], WorkerOwner
]
"""The last argument gives the machine's time, from any thread."""


class Driver:
    """Runs the machine; the HTTP server represents it."""

    def __init__(
        self,
        options: LaunchOptions,
        key: bytes | None,
        make: MakeOwner,
        has_link: bool = True,
        has_keeper: bool = True,
    ) -> None:
        self._options = options
        self._machine = Workers(settings(options, has_keeper=has_keeper))
        guard = None if key is None else Guard(key, os.environ.get(UID_VARIABLE, ""))
        self._server = AgentServer(self, guard, has_link)
        self._key = key
        self._processes = make(options, self.feed, self.now)
        self._conversation = Conversation(
            self.feed,
            self._processes.local_ranks,
            lambda command, local_rank: environment(options, command, local_rank, ""),
            options.nproc,
            options.is_inprocess,
            SnapshotMessages(options.nproc, key, self._keep, self._restate),
        )
        self._table = RankTable(Path(os.environ.get(DIRECTORY_VARIABLE, DIRECTORY)))
        self._ports = OfferedPorts()
        self._is_spare = True
        self._inbox: collections.deque[AgentEvent] = collections.deque()
        self._is_stepping = False
        self._alarm = Alarm(self.now, lambda: self.feed(Tick()))
        self._learning: asyncio.Task[None] | None = None
        self._examination: RankExamination | None = None
        self._sampling: Sampling | None = None
        """The newest sampling; a further request during it gets its result."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Examinations, and pending answers."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        self._booted_at = time.time() - boot_seconds()
        self._expiry = Expiry(None, self._booted_at)
        self._held_start: tuple[StartCommand, float] | None = None
        """A start that waits for a lease, and its deadline; the operator sends it again after
        that."""
        self._peers = PeerQuestions(
            self._machine,
            key,
            self.now,
            lambda attempt, at: self.feed(Vouched(attempt, at)),
            self._keep,
            self._restate,
        )

    async def run(self, keeper: int | None, lease_pipe: int | None = None) -> int:
        """Listen and work until the end is ordered; return the exit code. Raises WorldError."""
        self._expiry = Expiry(lease_pipe, self._booted_at)
        self._table.load()
        self._processes.start(self._restate)
        if self._options.stdin:
            from .shell import borrow_stdin

            borrow_stdin(self._options.stdin, self._loop)
        for number in self._options.signals:
            self._loop.add_signal_handler(number, self.feed, Terminated(number))
        if keeper is not None:
            self._loop.add_reader(keeper, self._keeper_ended, keeper)
        if self._processes.keeps:
            # Inherited by the workers, like everything else.
            os.environ[SOCKET_VARIABLE] = self._conversation.start()
        port = await self._server.start(self._options.host, self._options.port)
        self._keep(self._prepare(port))
        code = await self._end
        self._stop_examining()
        self._peers.close()
        await self._server.close()
        self._conversation.close()
        self._processes.close()
        self._ports.close()
        return code

    async def _prepare(self, port: int) -> None:
        await self._processes.warm_up()
        self.feed(Prepared())
        self._announce(port)

    def refusal(self, command: Command) -> str:
        """Return why the command cannot be followed now; empty: it can."""
        return self._machine.refusal(command)

    def command(self, command: Command) -> None:
        """Follow a command."""
        is_ready = self._machine.state is AgentState.READY
        self._held_start = None
        lease, now = self._machine.lease, self.now()
        if isinstance(command, StartCommand) and not lease.may_start(command, now):
            self._held_start = (command, now + HOLD_SECONDS)
            self._server.beat()
            return
        if isinstance(command, StartCommand) and is_ready and not self.refusal(command):
            self._take(command)
            self._conversation.begin(command)
            self._peers.begin(command)
        self.feed(Commanded(command))

    def renew(self, at: float) -> None:
        """Take the operator's answer to a Beat."""
        self._peers.renewed(self.now())
        self.feed(Renewed(at))
        held, self._held_start = self._held_start, None
        if held is not None and self.now() < held[1]:
            self.command(held[0])

    def vouch(self, question: PeerQuestion) -> PeerAnswer | None:
        """Answer another agent of the attempt; None: it is of another one."""
        return self._peers.answer_child(question)

    def update(self, command: StartCommand) -> None:
        """Take over the addresses of the ranks and whether this is a spare."""
        self._take(command)
        self._conversation.update(command)

    def _take(self, command: StartCommand) -> None:
        self._is_spare = command.spare
        self._table.take(command)

    def ask(self, request: Request, answer: Callable[[Evidence], None]) -> None:
        """Follow a request; one for evidence is answered once, within its time."""
        match request:
            case CollectCommand():
                self._collect(request, answer)
            case WarmCommand():
                self._warm(request)
            case HistoryCommand():
                self._conversation.history = request

    def _collect(self, command: CollectCommand, answer: Callable[[Evidence], None]) -> None:
        """Look at the workers of an attempt, and answer within the command's time."""
        from unbroken.agent.evidence.examine import RankExamination  # needed in trouble only

        if command.samples_per_second:
            self._keep(self._sample(command, answer))
            return
        current = self._examination
        if current is None or current.is_over or current.attempt != command.attempt:
            workers = self._running(command.attempt)
            current = self._examination = RankExamination(
                command.attempt, workers, command.seconds, self._processes.last_output
            )
            self._keep(current.run())
        self._keep(self._answer(current, command, answer))

    async def _answer(
        self,
        examination: RankExamination,
        command: CollectCommand,
        answer: Callable[[Evidence], None],
    ) -> None:
        await examination.wait(command.seconds)
        report = self._machine.report()
        ranks = examination.evidence(report.watch if report.attempt == command.attempt else ())
        answer(Evidence(command.request, command.attempt, report.agent_id, self.now(), ranks))

    async def _sample(self, command: CollectCommand, answer: Callable[[Evidence], None]) -> None:
        from unbroken.agent.evidence.examine import Sampling  # needed in trouble only

        if self._sampling is not None:
            self._sampling.stop()
        sampling = self._sampling = Sampling(
            self._running(command.attempt), command.seconds, command.samples_per_second
        )
        ranks = await sampling.run()
        agent_id = self._machine.report().agent_id
        answer(Evidence(command.request, command.attempt, agent_id, self.now(), ranks))

    def _running(self, attempt: int) -> list[WorkerReport]:
        """Return the running workers of an attempt."""
        report = self._machine.report()
        if report.attempt != attempt:
            return []
        return [worker for worker in report.workers if worker.state == "running"]

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _warm(self, command: WarmCommand) -> None:
        """Get the modules to import beforehand from other agents, if that is useful."""
        is_free = self._learning is None or self._learning.done()
        if is_free and self._machine.state is AgentState.READY and self.imports() is not None:
            self._learning = self._keep(self._learn(command))

    async def _learn(self, command: WarmCommand) -> None:
        from .peers import fetch  # needed by spares only

        names = await fetch(command.peers, self._key)
        # If a start has come meanwhile, its own workers report what they import.
        if names and self._machine.state is AgentState.READY:
            self._processes.import_beforehand(names)

    def imports(self) -> Collection[str] | None:
        """Modules that workers import, for other agents."""
        return self._processes.imports()

    def snapshots(self) -> CopyStore:
        """Copies of other nodes' snapshots."""
        return self._conversation.snapshots.replication()

    def _restate(self) -> None:
        """Publish facts that the machine does not know."""
        self._server.publish(self.report())

    def _stop_examining(self) -> None:
        """Stop looking at workers that are being ended, and answer with the evidence so far."""
        if self._examination is not None:
            self._examination.stop()
        if self._sampling is not None:
            self._sampling.stop()

    def report(self) -> AgentReport:
        """Return the agent's state."""
        return self._whole(self._machine.report())

    def _whole(self, report: AgentReport) -> AgentReport:
        known = self.imports()
        count = None if known is None else len(known)
        whole = self._conversation.snapshots.add_to(report)
        away, warm = self._peers.unreached, self._processes.warm()
        history = self._conversation.history_version()
        return replace(whole, imports=count, unreached=away, warm=warm, history=history)

    def status(self) -> Status:
        """Return the rest of the documented status."""
        told, is_inprocess = self._conversation, self._options.is_inprocess
        own_mode = IN_PROCESS_RESTART if is_inprocess else PROCESS_RESTART
        return Status(
            transitions=self._machine.entered,
            ip_version=self._table.version,
            spare=self._is_spare,
            warning=self._table.warning,
            restart_mode=told.asked_mode or own_mode,
            worker_data=told.worker_data(),
            rank_labels=told.rank_labels if is_inprocess or told.rank_labels else None,
            priority=is_inprocess and bool(self._machine.report().kept),
        )

    def feed(self, event: AgentEvent) -> None:
        """Give the machine an event, and carry out its orders, in order."""
        self._inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._inbox:
                taken = self._inbox.popleft()
                for effect in self._machine.step(taken, self.now()):
                    self._act(effect)
        finally:
            self._is_stepping = False
        self._alarm.set(self._machine.deadline())

    def _act(self, effect: AgentEffect) -> None:
        match effect:
            case Spawn(stage, command, kept):
                self._processes.spawn(stage, command, kept)
            case SignalWorkers(number):
                self._stop_examining()
                self._processes.signal(number)
            case KillAll(kept):
                self._stop_examining()
                self._processes.kill_all(kept)
            case Recall():
                self._stop_examining()
                self._conversation.recall(effect)
            case ReleaseWorkers(local_ranks, command):
                self._conversation.release(local_ranks, command)
            case OfferPort(used):
                self._offer_port(used)
            case Publish(report):
                self._publish(report)
            case Exit(code):
                self._end.set_result(code)
            case HoldLease(until):
                self._expiry.hold(until)

    def _publish(self, report: AgentReport) -> None:
        log.debug("report sent", state=report.state, attempt=report.attempt)
        self._server.publish(self._whole(report))
        if report.state is AgentState.SHUTDOWN:
            self._server.stop_listening()

    def _offer_port(self, used: int | None = None) -> None:
        try:
            port = self._ports.next(used)
        except WorldError as error:
            # Without a port this agent starts no further attempt.
            log.warning(
                "no free port: no further attempt starts",
                retry_seconds=PORT_RETRY_SECONDS,
                error=error,
            )
            self._loop.call_later(PORT_RETRY_SECONDS, self._offer_port)
            return
        self.feed(PortFound(port))

    def _keeper_ended(self, keeper: int) -> None:
        """End the descendants of a dead keeper, as nothing else would."""
        self._loop.remove_reader(keeper)
        log.error("parent of the agent was killed: all its processes are ended")
        self.feed(Terminated(signal.SIGKILL))

    def now(self) -> float:
        """Return seconds since the epoch that never go back, and advance while the machine is
        suspended."""
        return self._booted_at + boot_seconds()

    def _announce(self, port: int) -> None:
        options = self._options
        text = (
            f"unbrokenrun: waits for an operator at http://{options.host}:{port} "
            f"({options.nproc} workers; {self._processes.note})"
        )
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def settings(options: LaunchOptions, *, has_keeper: bool) -> Settings:
    """Settings of the machine, from the options."""
    return Settings(
        agent_id=uuid.uuid4().hex,
        nproc=options.nproc,
        nnodes=options.nnodes,
        pid=os.getpid(),
        has_pre_train=options.pre_train is not None,
        has_post_train=options.post_train is not None,
        stop_signal=options.stop_signal,
        has_elastic_events=options.has_elastic_events,
        shutdown_timeout_seconds=options.shutdown_timeout_seconds,
        agent_version=f"unbroken {unbroken.__version__}",
        is_inprocess=options.is_inprocess,
        has_keeper=has_keeper,
        arrive_seconds=_arrive_seconds(options),
    )


def _arrive_seconds(options: LaunchOptions) -> float:
    given = whole_number(os.environ.get(ARRIVE_VARIABLE, ""), 0, INT32_MAX)
    if given is not None:
        return given
    return options.inprocess_seconds if options.is_inprocess else ARRIVE_SECONDS


def run(
    options: LaunchOptions,
    key: bytes | None,
    keeper: int | None,
    make: MakeOwner = Processes,
    has_link: bool = True,
    lease_pipe: int | None = None,
) -> int:
    """Run the agent from here to its end."""

    logging.basicConfig(
        level=options.log_level, format="%(levelname)s %(name)s %(message)s", force=True
    )

    async def main() -> int:
        return await Driver(options, key, make, has_link).run(keeper, lease_pipe)

    return asyncio.run(main())
