"""What the agent does with its workers: start, watch, stop, and say how it stands.

The machine is told commands, ends of processes and the passing of time, and orders processes to be
started and signalled.  An attempt is fenced here: nothing is started for one older than the newest
that was seen, nor twice for one that has ended, nor while any process of an earlier one lives.

States are those of the HyperPod agent 1.1.3 (process-level mode).  FAULTED and COMPLETED wait for a
command.  READY is entered only after `NothingLives`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from unbroken.wire.agent import (
    AgentReport,
    AgentState,
    Command,
    FaultKind,
    RuleView,
    ShutdownCommand,
    StartCommand,
    StopCommand,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.observation import RankWatch

from .faults import SIGKILL, Place, WorkerEnd, has_failed, judge, judge_stopped

if TYPE_CHECKING:
    # Where a job has no rules, the agent does not load what evaluates them.
    from .log_rule_events import RuleViolated

SIGTERM, SIGUSR1 = 15, 10
HEADING = "Worker processes failed:"


class Stage(Enum):
    """The programs of an attempt, in order; values are prefixes of log directories."""

    PRE_TRAIN = "pre_train"
    TRAIN = "train"
    POST_TRAIN = "post_train"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent was started with."""

    agent_id: str
    nproc: int
    pid: int | None = None
    has_pre_train: bool = False
    has_post_train: bool = False
    stop_signal: int = SIGKILL
    """For a stop that is not graceful: SIGKILL or SIGTERM."""
    shutdown_timeout_seconds: float = 15.0
    """From a signal that asks to SIGKILL, where the command names no time."""
    agent_version: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The agent listens; it may be told to start."""


@dataclass(frozen=True, slots=True)
class Commanded:
    """An operator, or whoever holds the token, has said what should be."""

    command: Command


@dataclass(frozen=True, slots=True)
class StageStarted:
    """Every worker of the stage has a process; `pids` by local rank."""

    attempt: int
    stage: Stage
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A worker could not be started; those before it may run."""

    attempt: int
    stage: Stage
    local_rank: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker's own process ended; what it has started may still live."""

    attempt: int
    stage: Stage
    local_rank: int
    end: WorkerEnd
    step: int | None = None
    """Newest that it had told."""
    at: float | None = None
    """When it was seen to have ended; its last words are read after that.  None: just now."""
    is_signalled: bool = True
    """The agent had sent it a signal by then, of which it may have died."""


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """A worker of the training stage wrote its first byte."""

    attempt: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class RulesRead:
    """What the log rules say of the output read so far."""

    attempt: int
    views: tuple[RuleView, ...]
    violations: tuple[RuleViolated, ...] = ()
    """New ones, in order."""


@dataclass(frozen=True, slots=True)
class WatchRead:
    """What the watchdog says of the training workers."""

    attempt: int
    views: tuple[RankWatch, ...]


@dataclass(frozen=True, slots=True)
class NothingLives:
    """Answer to `KillAll`: no process that descends from any worker lives."""


@dataclass(frozen=True, slots=True)
class PortFound:
    """Answer to `OfferPort`: a free one, never offered before by this agent."""

    port: int


@dataclass(frozen=True, slots=True)
class Terminated:
    """The agent itself was sent SIGTERM, SIGINT or the like."""

    signal: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; nothing else happened."""


ProcessEvent = StageStarted | SpawnFailed | WorkerEnded | FirstOutput
RunEvent = ProcessEvent | RulesRead | WatchRead
"""Of one attempt."""
Event = RunEvent | Prepared | Commanded | NothingLives | PortFound | Terminated | Tick


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the stage's workers: `nproc` for training, one for a script.  Answer: `StageStarted`
    or `SpawnFailed`."""

    stage: Stage
    command: StartCommand


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send to the process group of every worker that lives."""

    signal: int


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill every process that descends from a worker, until none is left.  Answer: `WorkerEnded`
    for each worker that lived, then `NothingLives`; at once where nothing lives."""


@dataclass(frozen=True, slots=True)
class OfferPort:
    """Find a free port for the store of the next attempt.  Answer: `PortFound`."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell everyone who listens; the newest replaces the older ones that are still unsent."""

    report: AgentReport


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent's process; nothing of it lives any more."""

    code: int


Effect = Spawn | SignalWorkers | KillAll | OfferPort | Publish | Exit


@dataclass(slots=True)
class _Run:
    """One attempt, from its start to NothingLives."""

    command: StartCommand
    stage: Stage
    workers: dict[int, WorkerReport] = field(default_factory=dict)
    faults: list[WorkerFault] = field(default_factory=list)
    rules: tuple[RuleView, ...] = ()
    watch: tuple[RankWatch, ...] = ()
    reason: str = "WorkerCrash"
    """Of FAULTED."""
    is_killed: bool = False
    is_asked: bool = False
    """Its workers were sent a signal that asks them to end."""


class Workers:
    """The machine.  Feed `step`, carry out what it returns in order, `Tick` at `deadline()`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = AgentState.INIT
        self.entered: dict[AgentState, float] = {}
        """Latest entry of each state."""
        self._run: _Run | None = None
        self._newest: int | None = None
        self._ended = -1
        """Attempts up to this one are never started (again)."""
        self._rank: int | None = None
        self._port: int | None = None
        self._kill_at: float | None = None
        self._exit_code: int | None = None
        self._published: AgentReport | None = None

    def deadline(self) -> float | None:
        """When `Tick` is due; None: time changes nothing."""
        return self._kill_at

    def refusal(self, command: Command) -> str:
        """Why the command cannot be followed now; empty: it can, or asks for what already is."""
        if self.state is AgentState.SHUTDOWN and not isinstance(command, ShutdownCommand):
            return "the agent is shutting down"
        if not isinstance(command, StartCommand):
            return ""
        run = self._run
        if run is not None and self.state is not AgentState.STOPPING:
            if _same(run.command, command):
                return ""
            if run.command.attempt == command.attempt:
                return f"attempt {command.attempt} was started with another rank or address"
        if command.attempt <= self._ended or command.attempt < (self._newest or 0):
            return f"attempt {command.attempt} is over; the newest is {self._newest}"
        if self.state is not AgentState.READY:
            return f"cannot start attempt {command.attempt} in state {self.state.value}"
        return ""

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what must be done, in order."""
        effects = self._take(event, now)
        self._check()
        report = self.report()
        if report != self._published:
            self._published = report
            effects.append(Publish(report))
        return effects

    def report(self) -> AgentReport:
        """How the agent stands."""
        run, settings = self._run, self.settings
        return AgentReport(
            agent_id=settings.agent_id,
            state=self.state,
            newest_attempt=self._newest,
            attempt=run.command.attempt if run else None,
            rank=self._rank,
            master_addr=run.command.master_addr if run else None,
            master_port=run.command.master_port if run else None,
            nproc=settings.nproc,
            pid=settings.pid,
            offered_port=self._port,
            workers=tuple(run.workers[i] for i in sorted(run.workers)) if run else (),
            faults=tuple(run.faults) if run else (),
            log_rules=run.rules if run else (),
            watch=run.watch if run else (),
            reason=self._reason(),
            message=_message(run.faults) if run and self.state is AgentState.FAULTED else "",
            agent_version=settings.agent_version,
        )

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Prepared():
                self._enter(AgentState.INIT, now)
                self._enter(AgentState.READY, now)
                return [OfferPort()]
            case Commanded(command):
                return self._commanded(command, now)
            case Terminated(signal):
                code = 0 if self.state is AgentState.COMPLETED else 128 + signal
                return self._shut_down(signal, code, now)
            case NothingLives():
                return self._nothing_lives(now)
            case PortFound(port):
                self._port = port
                return []
            case Tick():
                return self._kill() if self._kill_at is not None and now >= self._kill_at else []
            case _:
                if self._run is None or event.attempt != self._run.command.attempt:
                    return []
                return self._run_event(self._run, event, now)

    def _run_event(self, run: _Run, event: RunEvent, now: float) -> list[Effect]:
        match event:
            case RulesRead():
                return self._rules_read(run, event, now)
            case WatchRead(views=views):
                run.watch = views
                return []
            case _:
                return self._process_event(run, event, now)

    def _process_event(self, run: _Run, event: ProcessEvent, now: float) -> list[Effect]:
        if not isinstance(event, FirstOutput) and event.stage is not run.stage:
            return []
        match event:
            case StageStarted(pids=pids):
                for local_rank, pid in enumerate(pids):
                    rank = self._global_rank(run, local_rank)
                    run.workers[local_rank] = WorkerReport(local_rank, rank, pid, "running", now)
                return []
            case SpawnFailed(local_rank=local_rank, message=message):
                rank = self._global_rank(run, local_rank)
                kind = FaultKind.NOT_STARTED
                run.faults.append(WorkerFault(kind, local_rank, rank, 0, now, message=message))
                return self._fail(now) if self.state is AgentState.RUNNING else []
            case WorkerEnded():
                return self._worker_ended(run, event, now)
            case FirstOutput(local_rank=local_rank):
                worker = run.workers.get(local_rank)
                if worker is not None and worker.first_output_at is None:
                    run.workers[local_rank] = replace(worker, first_output_at=now)
                return []

    def _rules_read(self, run: _Run, event: RulesRead, now: float) -> list[Effect]:
        """Workers that break a rule run on until a stop, as with the HyperPod agent."""
        run.rules = event.views
        found = [violation for violation in event.violations if violation.is_decisive]
        if self.state is AgentState.RUNNING and found:
            run.reason = found[0].reason
            run.faults += [_rule_fault(run, each, self._global_rank(run, 0)) for each in found]
            self._enter(AgentState.FAULTED, now)
        return []

    def _commanded(self, command: Command, now: float) -> list[Effect]:
        if isinstance(command, ShutdownCommand):
            return self._shut_down(SIGTERM, 0, now)
        if self.refusal(command):
            return []
        if isinstance(command, StartCommand):
            return self._start(command, now) if self.state is AgentState.READY else []
        return self._stop(command, now)

    def _start(self, command: StartCommand, now: float) -> list[Effect]:
        self._newest = max(command.attempt, self._newest or 0)
        self._rank = command.rank
        first = Stage.PRE_TRAIN if self.settings.has_pre_train else Stage.TRAIN
        self._run = _Run(command, first)
        self._enter(AgentState.RUNNING, now)
        # The port that was offered may be this attempt's store's; the next one gets another.
        return [Spawn(first, command), OfferPort()]

    def _stop(self, command: StopCommand, now: float) -> list[Effect]:
        known = self._newest
        effects = self._stop_workers(command, now)
        # Its start may have been lost on the way, with the port that was offered for its store.
        return effects if self._newest == known else [*effects, OfferPort()]

    def _stop_workers(self, command: StopCommand, now: float) -> list[Effect]:
        run, attempt = self._run, command.attempt
        if attempt is not None:
            self._newest = max(attempt, self._newest or 0)
            self._ended = max(attempt, self._ended)
            if run is not None and run.command.attempt > attempt:
                return []  # It asks for the end of an attempt that ended long ago.
        if run is None or self.state is AgentState.INIT:
            return []
        if self.state is not AgentState.STOPPING:
            self._enter(AgentState.STOPPING, now)
        return self._end_workers(run, command, now)

    def _end_workers(self, run: _Run, command: StopCommand, now: float) -> list[Effect]:
        if run.is_killed:
            return [KillAll()]
        gentle = SIGUSR1 if command.is_graceful else self.settings.stop_signal
        if gentle == SIGKILL or not self._alive(run):
            return self._kill()
        self._kill_by(now + (command.timeout_seconds or self.settings.shutdown_timeout_seconds))
        if run.is_asked:  # A repeated command does not signal twice.
            return []
        run.is_asked = True
        return [SignalWorkers(gentle)]

    def _shut_down(self, signal: int, code: int, now: float) -> list[Effect]:
        if self.state is AgentState.SHUTDOWN:
            return []
        self._exit_code = code
        self._enter(AgentState.SHUTDOWN, now)
        run = self._run
        if run is None or run.is_killed or not self._alive(run):
            return self._kill()
        self._kill_by(now + self.settings.shutdown_timeout_seconds)
        run.is_asked = True
        return [SignalWorkers(signal)]

    def _worker_ended(self, run: _Run, event: WorkerEnded, now: float) -> list[Effect]:
        local_rank, end = event.local_rank, event.end
        worker = run.workers.get(local_rank)
        if worker is None or worker.state != "running":
            return []
        is_ours = run.is_asked or (run.is_killed and end.signal == SIGKILL)
        is_ours &= event.is_signalled
        state = "succeeded" if not has_failed(end) else "stopped" if is_ours else "failed"
        at = now if event.at is None else event.at
        run.workers[local_rank] = replace(worker, state=state, ended_at=at)
        if state != "succeeded":
            self._add_fault(run, run.workers[local_rank], event, at)
        if state == "failed" and self.state in (AgentState.RUNNING, AgentState.FAULTED):
            return self._fail(now) if self.state is AgentState.RUNNING else []
        if self._alive(run):
            return []
        if self.state is AgentState.RUNNING:
            return self._next_stage(run, now)
        return [] if run.is_killed else self._kill()

    def _add_fault(self, run: _Run, worker: WorkerReport, event: WorkerEnded, now: float) -> None:
        end, port = event.end, run.command.master_port
        place = Place(worker.local_rank, worker.rank, worker.pid, now, port)
        fault = judge_stopped(end, place) if worker.state == "stopped" else judge(end, place)
        if fault is None:
            return
        if run.stage is not Stage.TRAIN:
            kind = FaultKind.PRE_TRAIN if run.stage is Stage.PRE_TRAIN else FaultKind.POST_TRAIN
            fault = replace(fault, kind=kind)
        if fault.kind is FaultKind.PEER_LOST:
            run.faults += _early_exits(run, now)
        run.faults.append(replace(fault, step=event.step))

    def _fail(self, now: float) -> list[Effect]:
        self._enter(AgentState.FAULTED, now)
        return self._kill()

    def _next_stage(self, run: _Run, now: float) -> list[Effect]:
        if run.stage is Stage.PRE_TRAIN:
            run.stage = Stage.TRAIN
        elif run.stage is Stage.TRAIN and self.settings.has_post_train:
            run.stage = Stage.POST_TRAIN
        else:
            self._enter(AgentState.COMPLETED, now)
            return []
        run.workers.clear()
        return [Spawn(run.stage, run.command)]

    def _kill_by(self, due: float) -> None:
        """Who has been asked to end already gets no more time by being asked again."""
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _kill(self) -> list[Effect]:
        self._kill_at = None
        if self._run is not None:
            self._run.is_killed = True
        return [KillAll()]

    def _nothing_lives(self, now: float) -> list[Effect]:
        if self.state is AgentState.SHUTDOWN:
            assert self._exit_code is not None
            return [Exit(self._exit_code)]
        run = self._run
        if self.state is not AgentState.STOPPING or run is None or self._alive(run):
            return []
        self._run = None
        self._enter(AgentState.READY, now)
        return []

    def _enter(self, state: AgentState, now: float) -> None:
        self.state = state
        self.entered[state] = now

    def _alive(self, run: _Run) -> bool:
        return any(worker.state == "running" for worker in run.workers.values())

    def _global_rank(self, run: _Run, local_rank: int) -> int:
        return run.command.rank * self.settings.nproc + local_rank

    def _reason(self) -> str:
        if self.state is AgentState.RUNNING:
            return "Running"
        return self._run.reason if self._run and self.state is AgentState.FAULTED else ""

    def _check(self) -> None:
        """Invariants; cheap enough to stay on."""
        is_idle = self.state in (AgentState.INIT, AgentState.READY)
        assert not (is_idle and self._run), "ready beside an attempt"
        if self._run is not None:
            assert self._newest is not None
            assert self._run.command.attempt <= self._newest


def _same(a: StartCommand, b: StartCommand) -> bool:
    keys = ("attempt", "rank", "nnodes", "master_addr", "master_port")
    return all(getattr(a, key) == getattr(b, key) for key in keys)


def _early_exits(run: _Run, now: float) -> list[WorkerFault]:
    """Those that left before a peer complained that someone was gone."""
    known = {fault.local_rank for fault in run.faults}
    return [
        WorkerFault(
            FaultKind.EARLY_EXIT,
            worker.local_rank,
            worker.rank,
            worker.pid,
            worker.ended_at or now,
            exit_code=0,
            message="ended with exit code 0 while others still trained",
        )
        for worker in run.workers.values()
        if worker.state == "succeeded" and worker.local_rank not in known
    ]


def _rule_fault(run: _Run, found: RuleViolated, first_rank: int) -> WorkerFault:
    """Without a pid where no worker can be named."""
    named = (w for w in run.workers.values() if w.rank == found.rank)
    worker = next(named, WorkerReport(0, first_rank, 0, "", 0.0))
    return WorkerFault(
        FaultKind.LOG_RULE,
        worker.local_rank,
        worker.rank,
        worker.pid,
        found.at,
        message=f"{found.reason}: {found.why}",
        lines=(found.line,) if found.line else (),
        step=next((each.step for each in run.watch if each.rank == found.rank), None),
    )


def _message(faults: list[WorkerFault]) -> str:
    rules = [f for f in faults if f.kind is FaultKind.LOG_RULE]
    lines = ["; newest match: ".join((f.message, *f.lines)) for f in rules]
    ends = [f for f in faults if f.kind is not FaultKind.LOG_RULE]
    lines += [HEADING] if ends else []
    lines += [f"local rank {f.local_rank} ({_end_text(f)}): {f.message}" for f in ends]
    return "\n".join(lines)


def _end_text(fault: WorkerFault) -> str:
    if fault.signal is not None:
        return f"exit code {-fault.signal}"
    return "not started" if fault.exit_code is None else f"exit code {fault.exit_code}"
