"""One attempt in an agent, and the faults of its workers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unbroken.wire.agent import (
    AgentState,
    FaultKind,
    RuleView,
    StartCommand,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.observation import RankWatch

from .events import (
    FaultReported,
    ProgramStage,
    RulesRead,
    RunEvent,
    SpawnFailed,
    StageStarted,
    WorkerEnded,
)
from .faults import SIGKILL, WorkerPlace, has_failed, judge_reported, judge_stopped, name_fault

if TYPE_CHECKING:
    # If a job has no rules, the agent does not load their evaluator.
    from unbroken.core.logs.rule_events import RuleViolated

HEADING = "Worker processes failed:"
ENDED_BEFORE_START = (
    "ended with exit code 0; with --inprocess-restart the script must wait for its rank "
    "(unbroken.worker.restartable, or HyperPod's library): add that, or leave the option out"
)


@dataclass(slots=True)
class Run:
    """One attempt, from its start to NothingLives."""

    command: StartCommand
    stage: ProgramStage
    workers: dict[int, WorkerReport] = field(default_factory=dict)
    faults: list[WorkerFault] = field(default_factory=list)
    rules: tuple[RuleView, ...] = ()
    watch: tuple[RankWatch, ...] = ()
    reason: str = "WorkerCrash"
    """Reason of the state FAULTED."""
    spared: tuple[int, ...] | None = None
    """Local ranks that were not killed with the others; None: no worker was killed."""
    is_asked: bool = False
    """Its workers received a signal that requests their end, or were recalled."""
    signalled: int | None = None
    """The newest signal that requested their end."""
    is_hard: bool = False
    """No worker may be kept."""
    is_rankless: bool = False
    """Its workers wait for an attempt whose ranks are not known yet."""
    released: set[int] = field(default_factory=set)
    """Local ranks that were released from the barrier into it."""
    is_held: bool = False
    """Nothing is started yet: processes left by a worker at the barrier are being killed."""

    @property
    def is_killed(self) -> bool:
        """True if all workers were killed."""
        return self.spared == ()

    def is_to_die(self, local_rank: int) -> bool:
        """True if the worker was to be killed."""
        is_spared = self.stage is ProgramStage.TRAIN and local_rank in (self.spared or ())
        return self.spared is not None and not is_spared

    def has_ended(self, event: WorkerEnded) -> bool:
        """True if a worker died of a signal from the agent."""
        is_killed = self.is_to_die(event.local_rank) and event.end.signal == SIGKILL
        return event.is_signalled and (self.is_asked or is_killed)

    def is_of(self, attempt: int) -> bool:
        """True if its workers are ranks of the attempt."""
        return not self.is_rankless and self.command.attempt == attempt

    def is_alive(self, but: Container[int] = ()) -> bool:
        """True if any worker runs, other than these training workers."""
        kept = but if self.stage is ProgramStage.TRAIN else ()
        return any(w.state == "running" and w.local_rank not in kept for w in self.workers.values())

    def begin_stage(self, event: StageStarted, first: int, now: float) -> None:
        """Note the processes of a stage; `first`: the rank of local rank 0."""
        ranks = range(len(event.pids)) if event.local_ranks is None else event.local_ranks
        starts = event.starts or ("",) * len(event.pids)
        for local_rank, pid, start in zip(ranks, event.pids, starts, strict=True):
            rank = first + local_rank
            worker = WorkerReport(local_rank, rank, pid, "running", now, start=start)
            self.workers[local_rank] = worker

    def turn_cold(self, local_rank: int, pid: int) -> None:
        """Note that a worker planned to start warm starts cold."""
        known = self.workers.get(local_rank)
        if known is not None and known.pid == pid:
            self.workers[local_rank] = replace(known, start="cold")

    def note_life(self, local_rank: int, now: float) -> None:
        """Note the first sign that a worker's program runs."""
        worker = self.workers.get(local_rank)
        if worker is not None and worker.first_output_at is None:
            self.workers[local_rank] = replace(worker, first_output_at=now)

    def note_recurring_line(self, local_rank: int, at: float) -> None:
        """Note the first line of a kind that recurs in training."""
        worker = self.workers.get(local_rank)
        if worker is not None:
            self.workers[local_rank] = replace(worker, recurring_line_at=at)

    def end_worker(self, event: WorkerEnded, now: float, *, is_ours: bool) -> str:
        """Note the end of a process; return its state. `is_ours`: the agent has ended it."""
        worker, end = self.workers[event.local_rank], event.end
        is_ours |= self.has_ended(event)
        state = "succeeded" if not has_failed(end) else "stopped" if is_ours else "failed"
        at = now if event.at is None else event.at
        self.workers[event.local_rank] = replace(worker, state=state, ended_at=at)
        if state != "succeeded":
            self.add_end(self.workers[event.local_rank], event)
        return state

    def take_rules(self, event: RulesRead, first: int, *, adds: bool) -> bool:
        """Take the result of the log rules; return whether a rule is broken. `first`: the rank of
        local rank 0; `adds`: a broken rule is a fault."""
        self.rules = event.views
        result = [violation for violation in event.violations if violation.is_decisive]
        if result and adds:
            self.reason = result[0].reason
            self.faults += [rule_fault(self, each, first) for each in result]
        return bool(result and adds)

    def add_unstarted(self, event: SpawnFailed, rank: int, now: float) -> None:
        """Add the fault of a worker that could not be started."""
        kind = FaultKind.NOT_STARTED
        fault = WorkerFault(kind, event.local_rank, rank, 0, now, message=event.message)
        self.faults.append(fault)

    def lists(self, event: RunEvent) -> bool:
        """True if the event is the end of one of its processes, even if it names the earlier
        attempt that the process came from."""
        if not isinstance(event, WorkerEnded) or event.stage is not self.stage:
            return False
        worker = self.workers.get(event.local_rank)
        return worker is not None and worker.pid == event.pid

    def add_end(self, worker: WorkerReport, event: WorkerEnded) -> None:
        """Add the fault of a worker that has failed or was stopped, if it has one."""
        end, at = event.end, worker.ended_at or 0.0
        place = WorkerPlace(
            worker.local_rank, worker.rank, worker.pid, at, self.command.master_port
        )
        fault = judge_stopped(end, place) if worker.state == "stopped" else name_fault(end, place)
        if fault is None:
            return
        if self.stage is not ProgramStage.TRAIN:
            kind = (
                FaultKind.PRE_TRAIN
                if self.stage is ProgramStage.PRE_TRAIN
                else FaultKind.POST_TRAIN
            )
            fault = replace(fault, kind=kind)
        if fault.kind is FaultKind.PEER_LOST:
            self.faults += _early_exits(self, at)
        self.faults.append(replace(fault, step=event.step))

    def add_end_before_start(self, worker: WorkerReport) -> None:
        """Add the fault of a worker that has ended without an error and without a rank."""
        if worker.state == "succeeded":
            kind = FaultKind.EARLY_EXIT
            place = (worker.local_rank, worker.rank, worker.pid, worker.ended_at or 0.0)
            self.faults.append(WorkerFault(kind, *place, exit_code=0, message=ENDED_BEFORE_START))

    def add_report(self, event: FaultReported, now: float) -> None:
        """Add the fault that a worker has reported."""
        worker = self.workers[event.local_rank]
        text = event.message or event.reason or "reported a fault"
        fault = judge_reported(text, WorkerPlace(worker.local_rank, worker.rank, worker.pid, now))
        if fault.kind is FaultKind.PEER_LOST:
            self.faults += _early_exits(self, now)
        self.faults.append(fault)


def refusal_of(command: StartCommand, run: Run | None, state: AgentState) -> str | None:
    """Return why the start cannot be followed during the present run.

    Empty: it is the present run. None: the present run does not matter.
    """
    if run is None or run.is_rankless or state is AgentState.STOPPING:
        return None
    if same(run.command, command):
        return ""
    if run.command.attempt == command.attempt:
        return f"attempt {command.attempt} was started with another rank or address"
    return None


def same(a: StartCommand, b: StartCommand) -> bool:
    """True if both commands agree on how to run."""
    keys = ("attempt", "rank", "nnodes", "master_addr", "master_port")
    return all(getattr(a, key) == getattr(b, key) for key in keys)


def _early_exits(run: Run, now: float) -> list[WorkerFault]:
    """Return the workers that left before a peer reported a lost rank."""
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


def rule_fault(run: Run, rule_violated: RuleViolated, first_rank: int) -> WorkerFault:
    """Return the fault of a broken rule, without a pid if no worker can be named."""
    named = (w for w in run.workers.values() if w.rank == rule_violated.rank)
    worker = next(named, WorkerReport(0, first_rank, 0, "", 0.0))
    return WorkerFault(
        FaultKind.LOG_RULE,
        worker.local_rank,
        worker.rank,
        worker.pid,
        rule_violated.at,
        message=f"{rule_violated.reason}: {rule_violated.why}",
        lines=(rule_violated.line,) if rule_violated.line else (),
        step=next((each.step for each in run.watch if each.rank == rule_violated.rank), None),
        rule=rule_violated.rule,
        violation=rule_violated.kind,
    )


def message(faults: list[WorkerFault]) -> str:
    """Return the message for people about all faults."""
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
