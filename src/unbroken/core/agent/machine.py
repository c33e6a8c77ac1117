"""The agent's machine for its workers: start, watch and stop them, and report their state.

Input: commands, ends of processes, time. Output: orders to start and signal processes. Attempts are
fenced here: none older than the newest known one is started, and no ended one a second time.
Nothing is started while a process of an earlier attempt is alive, unless it is at the barrier.

States are those of the HyperPod agent 1.1.3. FAULTED and COMPLETED wait for a command. READY is
entered only after `NothingLives`, with every kept worker at the barrier.

`Lease` is the lease on the workers: the time that they may run while no operator can stop them. A
node that is cut off cannot be asked whether its workers still run. So the workers end by
themselves when their lease has run out, and the operator takes them as ended after that time
(`core.job.leases`). The lease is renewed by the operator, or by all peers of the attempt together:

- The agent sends the operator the time on its own clock. The operator sends that time back, and the
  lease counts from it. A delayed renewal is worth less, and never too much.
- Without an operator the agents of the attempt vouch for each other (`peers`). A stopped agent
  vouches no more, so the operator needs to stop only one peer to let the lease run out. As long as
  no agent is stopped, an absent operator stops nothing.

Times are seconds on the agent's clock, which must count the time for which the machine was
suspended.

`Members` are workers that can leave their training on request, and so can be kept over attempts. A
member is one process. It trains, or waits at the barrier. There it has left its process groups
and does nothing until it is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.core.tick import Tick
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    LEASE_OVER,
    PROCESS_RESTART,
    AgentReport,
    AgentState,
    Command,
    FaultKind,
    ShutdownCommand,
    StartCommand,
    StopCommand,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.ipc import STUCK_CODE

from .events import (
    AgentEffect,
    AgentEvent,
    Arrived,
    CheckpointsReported,
    Commanded,
    Disconnected,
    Exit,
    FaultReported,
    FirstOutput,
    HoldLease,
    KillAll,
    LeaseEvent,
    MemberEvent,
    NothingLives,
    OfferPort,
    OutputEvent,
    Passed,
    PortFound,
    Prepared,
    ProcessEvent,
    ProgramStage,
    Publish,
    Recall,
    RecurringLine,
    Registered,
    ReleaseWorkers,
    Renewed,
    RulesRead,
    RunEvent,
    Settings,
    SignalWorkers,
    Spawn,
    SpawnFailed,
    StageStarted,
    Terminated,
    TurnedCold,
    Vouched,
    WatchRead,
    WorkerEnded,
)
from .faults import SIGKILL, SIGTERM
from .run import Run, message, refusal_of

URGENT_SHARE = 0.4
"""Share of a lease at whose end it is urgent. The operator needs less than the rest to notice that
an agent is silent, and to stop the other ranks."""


class Lease:
    """The lease on the workers of the newest attempt that an agent has started."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length in seconds; 0: the workers need no lease."""
        self.is_over = False
        """The workers were ended because the lease ran out."""
        self.unvouched: int | None = None
        """The newest attempt, as long as this agent has not vouched for it to a peer."""
        self._attempt = -1
        self._operator_at = self._peers_at = -math.inf
        """The newest time at which the operator certainly still wanted the agent to run."""
        self._held_until: float | None = None
        """Deadline that the keeper has received; None: no worker may be alive."""

    def begin(self, attempt: int, seconds: float) -> None:
        """Start the workers of an attempt under a lease of this length."""
        self._attempt, self.seconds, self.is_over = attempt, seconds, False
        self.unvouched = attempt
        self._peers_at = -math.inf

    def take(self, event: LeaseEvent) -> None:
        """Renew the lease."""
        match event:
            case Renewed(at):
                self._operator_at = max(self._operator_at, at)
            case Vouched(attempt, at) if attempt == self._attempt:
                self._peers_at = max(self._peers_at, at)
            case Vouched():
                pass  # The renewal is for an attempt that this agent has left.

    def vouch(self, *, vouches: bool) -> bool:
        """Record whether the agent vouches for the attempt to a peer, and return it."""
        if vouches:
            self.unvouched = None
        return vouches

    def may_start(self, command: StartCommand, now: float) -> bool:
        """Return whether workers may start. A start order that was long under way must not start
        workers that the operator takes as ended."""
        return not command.lease_seconds or now < self._operator_at + command.lease_seconds

    def due(self) -> float | None:
        """Return when the workers are to be ended; None: never, or they have been."""
        return None if self.is_over else self._held_until

    def is_urgent(self, now: float) -> bool:
        """Return whether the workers must end soon."""
        due = self.due()
        return due is not None and now >= due - URGENT_SHARE * self.seconds

    def hold(self, run: Run | None, *, has_leftovers: bool) -> list[HoldLease]:
        """Send the keeper the new deadline for workers, if it has changed. `has_leftovers`:
        processes left by workers were not seen to end."""
        until = self._until(run, has_leftovers=has_leftovers)
        if until == self._held_until:
            return []
        self._held_until = until
        return [HoldLease(until)]

    def _until(self, run: Run | None, *, has_leftovers: bool) -> float | None:
        """Return when the workers must have ended; None: none may be alive, or they need no
        lease."""
        if run is None or run.is_rankless or not self.seconds:
            return None
        if run.workers and not has_leftovers and not run.is_alive():
            return None
        return max(self._operator_at, self._peers_at) + self.seconds


@dataclass(slots=True)
class WorkerProcess:
    """One process."""

    pid: int
    attempt: int
    """Attempt that it trains in, or trained in last."""
    node_rank: int | None
    """Node rank that it trains with, or trained with last; None: it has had none."""
    is_at_barrier: bool = False
    has_passed: bool = False
    """True if it has reported `Passed` since its release, or was never at the barrier."""
    is_recalled: bool = False
    """True if it received the request to come to the barrier and has not been released since."""


class Members:
    """Members of a node, by local rank."""

    def __init__(self) -> None:
        self._known: dict[int, WorkerProcess] = {}

    def __contains__(self, local_rank: object) -> bool:
        return local_rank in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, local_rank: int, pid: int | None) -> WorkerProcess | None:
        """Return the member, if it is this process."""
        member = self._known.get(local_rank)
        return member if member is not None and pid in (None, member.pid) else None

    def add(self, local_rank: int, member: WorkerProcess) -> None:
        """Add a member; a process that is a member already keeps its record."""
        known = self._known.get(local_rank)
        if known is None or known.pid != member.pid:
            self._known[local_rank] = member

    def drop(self, local_rank: int) -> None:
        """Remove the member: it cannot be kept."""
        self._known.pop(local_rank, None)

    def clear(self) -> None:
        """Remove all members: none can be kept."""
        self._known.clear()

    def ranks(self) -> tuple[int, ...]:
        """Return local ranks, in order."""
        return tuple(sorted(self._known))

    def pid(self, local_rank: int) -> int:
        """Return the pid of a member."""
        return self._known[local_rank].pid

    def absent(self) -> tuple[int, ...]:
        """Return local ranks that are not at the barrier."""
        return tuple(rank for rank in self.ranks() if not self._known[rank].is_at_barrier)

    def oldest(self) -> int | None:
        """Return the attempt of the oldest member."""
        return min((member.attempt for member in self._known.values()), default=None)

    def recall(self) -> tuple[int, ...]:
        """Return local ranks that must now be requested to come to the barrier."""
        fresh = [rank for rank in self.absent() if not self._known[rank].is_recalled]
        for rank in fresh:
            self._known[rank].is_recalled = True
        return tuple(fresh)

    def arrive(self, member: WorkerProcess) -> bool:
        """Note that the member is at the barrier; return False if it reported so before its
        release, or twice."""
        if member.is_at_barrier or not member.has_passed:
            return False
        member.is_at_barrier = True
        return True

    def release(self, ranks: Iterable[int], attempt: int, node_rank: int) -> None:
        """Note that the members leave the barrier."""
        for rank in ranks:
            self._known[rank] = WorkerProcess(self._known[rank].pid, attempt, node_rank)

    def keep_rank(self, node_rank: int) -> bool:
        """Return True if no member trained with another node rank; else remove all members.

        A process has data and state of its rank, and must not continue as another one. With
        `--inprocess-restart` the workers expect any rank, and this is not called.
        """
        is_same = all(one.node_rank in (None, node_rank) for one in self._known.values())
        if not is_same:
            self.clear()
        return is_same


JOB_RESTART = "job_level_restart"
_ON = (AgentState.INIT, AgentState.RUNNING)


class Workers:
    """The machine. Feed `step`, carry out its effects, and step `Tick` at `deadline()`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = AgentState.INIT
        self.entered: dict[AgentState, float] = {}
        """Latest entry of each state."""
        self._run: Run | None = None
        self._newest: int | None = None
        self._ended = -1
        """Attempts up to this one are never started (again)."""
        self._rank: int | None = None
        self._port: int | None = None
        self._members = Members()
        self._spare: tuple[int, ...] = ()
        """Local ranks spared by the newest `KillAll`."""
        self._is_clean = True
        """The newest `KillAll` was answered: nothing is alive that should not be."""
        self._dying: tuple[int, ...] = ()
        """Members that were to wait for the next attempt, and are being killed instead."""
        self._arrive_at: float | None = None
        """Time by which members have to be at the barrier."""
        self._kill_at: float | None = None
        self.lease = Lease()
        self._exit_code: int | None = None
        self._has_ended = False
        """Exit was ordered."""
        self._progress: Mapping[str, Any] = {}
        self._published: AgentReport | None = None

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None: time changes nothing."""
        times = (self._kill_at, self._arrive_at, self.lease.due())
        return min((at for at in times if at is not None), default=None)

    def refusal(self, command: Command) -> str:
        """Return why the command cannot be followed now; empty: it can, or is fulfilled already."""
        if self.state is AgentState.SHUTDOWN and not isinstance(command, ShutdownCommand):
            return "the agent is shutting down"
        if not isinstance(command, StartCommand):
            return ""
        if (why := refusal_of(command, self._run, self.state)) is not None:
            return why
        if command.attempt <= self._ended or command.attempt < (self._newest or 0):
            return f"attempt {command.attempt} is over; the newest is {self._newest}"
        if self.state is not AgentState.READY:
            return f"cannot start attempt {command.attempt} in state {self.state.value}"
        return ""

    def step(self, event: AgentEvent, now: float) -> list[AgentEffect]:
        """Take one event; return the effects to carry out, in order."""
        effects = self._take(event, now)
        self._check()
        effects[:0] = self.lease.hold(self._run, has_leftovers=not self._is_clean)
        report = self.report()
        if report != self._published:
            self._published = report
            effects.append(Publish(report))
        return effects

    def report(self) -> AgentReport:
        """Return the agent's state as a report."""
        run, settings = self._run, self.settings
        told = None if run is None or run.is_rankless else run
        return AgentReport(
            agent_id=settings.agent_id,
            state=self.state,
            newest_attempt=self._newest,
            attempt=told.command.attempt if told else None,
            rank=self._rank,
            master_addr=told.command.master_addr if told else None,
            master_port=told.command.master_port if told else None,
            nproc=settings.nproc,
            pid=settings.pid,
            offered_port=self._port,
            workers=tuple(run.workers[i] for i in sorted(run.workers)) if run else (),
            faults=tuple(run.faults) if run else (),
            log_rules=told.rules if told else (),
            watch=told.watch if told else (),
            reason=self._reason(),
            message=message(run.faults) if run and self.state is AgentState.FAULTED else "",
            agent_version=settings.agent_version,
            progress=self._progress,
            kept=self._kept(),
            lease_seconds=self.lease.seconds if settings.has_keeper else None,
            unvouched=self.lease.unvouched,
            has_ended=self._has_ended,
        )

    def _kept(self) -> tuple[int, ...]:
        if self.state is not AgentState.READY or self._rank is None:
            return ()
        first = self._rank * self.settings.nproc
        return tuple(first + rank for rank in sorted({*self._members.ranks(), *self._dying}))

    def _take(self, event: AgentEvent, now: float) -> list[AgentEffect]:
        match event:
            case Prepared():
                return [*self._prepare(now), OfferPort()] if self.state is AgentState.INIT else []
            case Commanded(command):
                return self._commanded(command, now)
            case Terminated(signal):
                code = 0 if self.state is AgentState.COMPLETED else 128 + signal
                return self._shut_down(signal, code, now)
            case NothingLives():
                return self._nothing_lives(event, now)
            case PortFound(port):
                self._port = port
                return []
            case CheckpointsReported(progress):
                self._progress = progress
                return []
            case Tick():
                return self._tick(now)
            case Registered() | Arrived() | Passed() | Disconnected() | FaultReported():
                return self._member_event(event, now)
            case Renewed() | Vouched():
                self.lease.take(event)
                return []
            case _:
                return self._attempt_event(event, now)

    def vouch(self, attempt: int) -> bool:
        """True if the agent vouches to a peer that this attempt may continue."""
        run, states = self._run, (AgentState.RUNNING, AgentState.COMPLETED, AgentState.FAULTED)
        is_of = run is not None and run.is_of(attempt)
        return self.lease.vouch(vouches=is_of and attempt > self._ended and self.state in states)

    def _lease_over(self, run: Run, now: float) -> list[AgentEffect]:
        """End the workers of the attempt, whatever else is under way, and never start it again."""
        self.lease.is_over, run.is_hard, run.is_held = True, True, False
        self._ended = max(run.command.attempt, self._ended)
        if self.state is not AgentState.SHUTDOWN:
            self._enter(AgentState.STOPPING, now)
        return self._kill()

    def _tick(self, now: float) -> list[AgentEffect]:
        if self._run is not None and (due := self.lease.due()) is not None and now >= due:
            return self._lease_over(self._run, now)
        if self._kill_at is not None and now >= self._kill_at:
            return self._kill()
        if self._arrive_at is None or now < self._arrive_at:
            return []
        self._arrive_at = None
        late = self._members.absent()
        for local_rank in late:
            self._members.drop(local_rank)
        return self._cull() if late else []

    def _attempt_event(self, event: RunEvent, now: float) -> list[AgentEffect]:
        run = self._run
        if isinstance(event, WorkerEnded) and self._member(event) is not None:
            is_listed = run is not None and run.stage is ProgramStage.TRAIN
            if run is None or not is_listed or event.local_rank not in run.workers:
                return self._lost(event.local_rank, now)
        elif run is None or not (event.attempt == run.command.attempt or run.lists(event)):
            return []
        return self._run_event(run, event, now)

    def _member(self, event: MemberEvent | WorkerEnded) -> WorkerProcess | None:
        """Return the member of an event, if the event is about this very process."""
        if isinstance(event, WorkerEnded) and (
            event.pid is None or event.stage is not ProgramStage.TRAIN
        ):
            return None
        return self._members.get(event.local_rank, event.pid)

    def _member_event(self, event: MemberEvent, now: float) -> list[AgentEffect]:
        if isinstance(event, Registered):
            self._register(event)
            return []
        member, run = self._member(event), self._run
        if member is None:
            return []
        if isinstance(event, Arrived | Passed) and event.attempt not in (None, member.attempt):
            return []  # It is late: from an attempt that this member has left.
        match event:
            case Passed(local_rank=local_rank):
                member.has_passed = True
                if run is not None:
                    run.note_life(local_rank, now)
            case Disconnected(local_rank=local_rank):
                return self._lost(local_rank, now)
            case Arrived(local_rank=local_rank) if self._members.arrive(member):
                return self._arrived(event, now)
            case FaultReported() if run is not None:
                self._fault_reported(run, event, now)
        return []

    def _register(self, event: Registered) -> None:
        """Register a worker, unless it is being ended: then it cannot be kept."""
        run = self._run
        if run is None or run.stage is not ProgramStage.TRAIN:
            return
        worker = run.workers.get(event.local_rank)
        is_ours = worker is not None and worker.pid == event.pid and worker.state == "running"
        if is_ours and event.attempt in (None, run.command.attempt) and self.state in _ON:
            rank = None if run.is_rankless else run.command.rank
            member = WorkerProcess(event.pid, run.command.attempt, rank, has_passed=True)
            self._members.add(event.local_rank, member)

    def _arrived(self, event: Arrived, now: float) -> list[AgentEffect]:
        run, local_rank = self._run, event.local_rank
        if self.state is not AgentState.RUNNING or run is None:
            return self._settle(now)
        if self.settings.is_inprocess and local_rank not in run.released:
            return self._release(run, (local_rank,), now)
        fault = FaultReported(local_rank, event.pid, message="left its training for the barrier")
        self._fault_reported(run, fault, now)
        return []

    def _fault_reported(self, run: Run, event: FaultReported, now: float) -> None:
        """Note a fault that a worker reports. The other workers run until a stop command."""
        if event.local_rank not in run.workers or run.stage is not ProgramStage.TRAIN:
            return
        if self.state not in (AgentState.RUNNING, AgentState.FAULTED):
            return
        run.is_hard |= event.restart_mode in (PROCESS_RESTART, JOB_RESTART)
        run.add_report(event, now)
        if self.state is AgentState.RUNNING:
            run.reason = event.reason or "WorkerReportedFault"
            self._enter(AgentState.FAULTED, now)

    def _lost(self, local_rank: int, now: float) -> list[AgentEffect]:
        """Handle a member that cannot be kept any more: it has ended, or receives no orders."""
        self._members.drop(local_rank)
        run = self._run
        if run is None or self.state is AgentState.STOPPING:
            return self._cull()
        if self.state is AgentState.INIT:
            text = "is gone from the barrier"
            kind = FaultKind.EARLY_EXIT
            run.faults.append(WorkerFault(kind, local_rank, local_rank, 0, now, message=text))
            return self._fail(now)
        # Processes that it left behind are killed before others are started in its place.
        self._is_clean &= run.stage is ProgramStage.TRAIN
        return []

    def _run_event(self, run: Run, event: RunEvent, now: float) -> list[AgentEffect]:
        match event:
            case RulesRead():
                return self._rules_read(run, event, now)
            case WatchRead(views=views):
                run.watch = views
                return []
            case _:
                return self._process_event(run, event, now)

    def _process_event(self, run: Run, event: ProcessEvent, now: float) -> list[AgentEffect]:
        if not isinstance(event, OutputEvent) and event.stage is not run.stage:
            return []
        match event:
            case StageStarted():
                run.begin_stage(event, self._global_rank(run, 0), now)
                return []
            case SpawnFailed():
                run.add_unstarted(event, self._global_rank(run, event.local_rank), now)
                return self._fail(now) if self.state in _ON else []
            case WorkerEnded():
                return self._worker_ended(run, event, now)
            case TurnedCold(local_rank=local_rank, pid=pid):
                run.turn_cold(local_rank, pid)
                return []
            case FirstOutput(local_rank=local_rank):
                run.note_life(local_rank, now)
                return []
            case RecurringLine(local_rank=local_rank, at=at):
                run.note_recurring_line(local_rank, at)
                return []

    def _rules_read(self, run: Run, event: RulesRead, now: float) -> list[AgentEffect]:
        """Workers that break a rule run on until a stop, as with the HyperPod agent."""
        if run.take_rules(event, self._global_rank(run, 0), adds=self.state is AgentState.RUNNING):
            self._enter(AgentState.FAULTED, now)
        return []

    def _commanded(self, command: Command, now: float) -> list[AgentEffect]:
        if isinstance(command, ShutdownCommand):
            return self._shut_down(SIGTERM, 0, now)
        if self.refusal(command):
            return []
        if isinstance(command, StartCommand):
            is_ready = self.state is AgentState.READY and self.lease.may_start(command, now)
            return self._start(command, now) if is_ready else []
        return self._stop(command, now)

    def _start(self, command: StartCommand, now: float) -> list[AgentEffect]:
        self._newest = max(command.attempt, self._newest or 0)
        self._rank = command.rank
        self._is_clean &= self.settings.is_inprocess or self._members.keep_rank(command.rank)
        first = ProgramStage.PRE_TRAIN if self.settings.has_pre_train else ProgramStage.TRAIN
        self._run = Run(command, first)
        self.lease.begin(command.attempt, command.lease_seconds)
        self._enter(AgentState.RUNNING, now)
        return [*self._begin(self._run, now), self._renew_port(command.master_port)]

    def _renew_port(self, used: int | None = None) -> OfferPort:
        """Withdraw the offered port: an attempt may have its store there.  Offer another one."""
        self._port = None
        return OfferPort(used)

    def _begin(self, run: Run, now: float) -> list[AgentEffect]:
        """Start the stage, as soon as nothing lives that should not."""
        run.is_held = not self._is_clean
        if run.is_held:
            return self._cull()
        kept = self._members.ranks() if run.stage is ProgramStage.TRAIN else ()
        effects: list[AgentEffect] = [Spawn(run.stage, run.command, kept)]
        return effects + self._release(run, kept, now) if kept else effects

    def _release(self, run: Run, ranks: tuple[int, ...], now: float) -> list[AgentEffect]:
        self._members.release(ranks, run.command.attempt, run.command.rank)
        run.released.update(ranks)
        for each in ranks:
            pid, rank = self._members.pid(each), self._global_rank(run, each)
            run.workers[each] = WorkerReport(each, rank, pid, "running", now)
        return [ReleaseWorkers(ranks, run.command)]

    def _prepare(self, now: float) -> list[AgentEffect]:
        self._enter(AgentState.INIT, now)
        if self.settings.is_inprocess:
            return self._await_ranks(now)
        self._enter(AgentState.READY, now)
        return []

    def _await_ranks(self, now: float) -> list[AgentEffect]:
        """Request missing members to come to the barrier, as the HyperPod agent does."""
        attempt = 0 if self._newest is None else self._newest + 1
        command = StartCommand(attempt, -1, self.settings.nnodes, "", -1)
        self._run = Run(command, ProgramStage.TRAIN, is_rankless=True)
        self._enter(AgentState.INIT, now)
        return [Spawn(ProgramStage.TRAIN, command, self._members.ranks())]

    def _stop(self, command: StopCommand, now: float) -> list[AgentEffect]:
        known, effects = self._newest, self._stop_workers(command, now)
        # The start of this attempt may have been lost, while the other agents have begun.
        return effects if self._newest == known else [*effects, self._renew_port()]

    def _stop_workers(self, command: StopCommand, now: float) -> list[AgentEffect]:
        run, attempt = self._run, command.attempt
        if attempt is not None:
            self._newest = max(attempt, self._newest or 0)
            self._ended = max(attempt, self._ended)
            if run is not None and not run.is_rankless and run.command.attempt > attempt:
                return []  # It requests the end of an attempt that ended long ago.
        if run is None or self.state is AgentState.INIT:
            return self._end_waiting(command, now)
        if self.state is not AgentState.STOPPING:
            self._enter(AgentState.STOPPING, now)
        return self._end_workers(run, command, now)

    def _is_hard(self, command: StopCommand) -> bool:
        """True if no worker may be kept; without a mode in the command, the agent's own decides."""
        mode = command.restart_mode.lower()
        return mode == PROCESS_RESTART if self.settings.is_inprocess else mode != IN_PROCESS_RESTART

    def _end_waiting(self, command: StopCommand, now: float) -> list[AgentEffect]:
        """End waiting members if needed. The harder of two stops of one attempt counts."""
        oldest = self._members.oldest()
        is_meant = command.attempt is None or (oldest is not None and oldest <= command.attempt)
        if oldest is None or not is_meant or not self._is_hard(command):
            return []
        if self._run is not None:
            self._enter(AgentState.STOPPING, now)
        self._dying = self._members.ranks()
        return self._kill()

    def _end_workers(self, run: Run, command: StopCommand, now: float) -> list[AgentEffect]:
        run.is_held = False
        run.is_hard |= self._is_hard(command)
        if not run.is_hard and (self._members or self.settings.is_inprocess):
            return self._recall(run, now, self.settings.save_seconds(command))
        if run.is_killed:
            return [KillAll()]
        self._members.clear()
        self._arrive_at = None
        gentle = self.settings.signal_of(command)
        if gentle == SIGKILL or not run.is_alive():
            return self._kill()
        self._kill_by(now + (command.timeout_seconds or self.settings.shutdown_timeout_seconds))
        if run.is_asked:  # A repeated command does not signal twice.
            return []
        run.is_asked, run.signalled = True, gentle
        return [SignalWorkers(gentle)]

    def _recall(self, run: Run, now: float, save_seconds: float) -> list[AgentEffect]:
        """Recall the members to the barrier; all other workers end."""
        called = self._members.recall()
        if called:
            run.is_asked = True
            self._arrive_at = now + self.settings.arrive_seconds
        order = Recall(called, run.command.attempt, save_seconds)
        return [order, *self._cull()] if called else self._cull()

    def _shut_down(self, signal: int, code: int, now: float) -> list[AgentEffect]:
        if self.state is AgentState.SHUTDOWN:
            return []
        self._exit_code = code
        self._enter(AgentState.SHUTDOWN, now)
        self._arrive_at = None
        run = self._run
        is_alive = run is not None and not run.is_killed and run.is_alive()
        if not is_alive and not self._members:
            return self._kill()
        self._kill_by(now + self.settings.shutdown_timeout_seconds)
        if run is not None:
            if run.signalled == signal:
                return []  # A second one would interrupt a script that is saving its state.
            run.is_asked, run.signalled = True, signal
        return [SignalWorkers(signal)]

    def _worker_ended(self, run: Run, event: WorkerEnded, now: float) -> list[AgentEffect]:
        local_rank, end = event.local_rank, event.end
        worker = run.workers.get(local_rank)
        if worker is None or worker.state != "running":
            return []
        member = self._members.get(local_rank, event.pid)
        if run.stage is ProgramStage.TRAIN:
            self._members.drop(local_rank)
        is_stuck = member is not None and member.is_recalled and end.exit_code == STUCK_CODE
        state = run.end_worker(event, now, is_ours=is_stuck)
        if state == "failed" and self.state in (AgentState.RUNNING, AgentState.FAULTED):
            return self._fail(now) if self.state is AgentState.RUNNING else []
        if self.state is AgentState.INIT:
            run.add_end_before_start(run.workers[local_rank])
            return self._fail(now)
        if run.is_alive():
            # It may have left processes behind, and nothing else would end those.
            return self._cull() if member and self.state is AgentState.STOPPING else []
        if self.state is AgentState.RUNNING:
            return self._next_stage(run, now)
        return [] if run.is_killed else self._cull()

    def _fail(self, now: float) -> list[AgentEffect]:
        self._enter(AgentState.FAULTED, now)
        return self._cull()

    def _next_stage(self, run: Run, now: float) -> list[AgentEffect]:
        if run.stage is ProgramStage.PRE_TRAIN:
            run.stage = ProgramStage.TRAIN
        elif run.stage is ProgramStage.TRAIN and self.settings.has_post_train:
            run.stage = ProgramStage.POST_TRAIN
        else:
            self._enter(AgentState.COMPLETED, now)
            return []
        run.workers.clear()
        return self._begin(run, now)

    def _kill_by(self, due: float) -> None:
        """Set the kill deadline; a second request gives a worker no more time."""
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _kill(self) -> list[AgentEffect]:
        self._kill_at = self._arrive_at = None
        self._members.clear()
        return self._order_kill(())

    def _cull(self) -> list[AgentEffect]:
        """Kill all workers but the members."""
        kept = self._members.ranks()
        return self._order_kill(kept) if kept else self._kill()

    def _order_kill(self, kept: tuple[int, ...]) -> list[AgentEffect]:
        self._spare, self._is_clean = kept, False
        if self._run is not None:
            self._run.spared = kept
        return [KillAll(kept)]

    def _nothing_lives(self, event: NothingLives, now: float) -> list[AgentEffect]:
        if event.kept != self._spare:
            return []  # Meanwhile other workers are to be killed as well.
        self._is_clean, self._dying = True, ()
        if self.state is AgentState.SHUTDOWN:
            assert self._exit_code is not None
            self._has_ended = not self._members
            return [Exit(self._exit_code)] if self._has_ended else []
        if self._run is not None and self._run.is_held:
            return self._begin(self._run, now)
        return self._settle(now)

    def _settle(self, now: float) -> list[AgentEffect]:
        """Enter READY, once every living worker is at the barrier."""
        run, members = self._run, self._members
        if run is None or not self._is_clean or members.absent():
            return []
        is_full = len(members) == self.settings.nproc
        if self.state is AgentState.INIT and is_full:
            self._run = None
            self._enter(AgentState.READY, now)
        if self.state is not AgentState.STOPPING or run.is_alive(but=members):
            return []
        self._kill_at = self._arrive_at = self._run = None
        if self.settings.is_inprocess and not is_full:
            return self._await_ranks(now)
        self._enter(AgentState.READY, now)
        return []

    def _enter(self, state: AgentState, now: float) -> None:
        self.state = state
        self.entered[state] = now

    def _global_rank(self, run: Run, local_rank: int) -> int:
        return local_rank + (0 if run.is_rankless else run.command.rank * self.settings.nproc)

    def _reason(self) -> str:
        if self.state is AgentState.RUNNING:
            return "Running"
        if self.lease.is_over and self.state in (AgentState.STOPPING, AgentState.READY):
            return LEASE_OVER
        return self._run.reason if self._run and self.state is AgentState.FAULTED else ""

    def _check(self) -> None:
        """Invariants; cheap enough to stay on."""
        assert self.state is not AgentState.READY or not self._run, "ready beside an attempt"
        if self.state is AgentState.READY:
            assert not self._members.absent(), "ready while a worker trains"
        if self._run is not None and not self._run.is_rankless:
            assert self._newest is not None
            assert self._run.command.attempt <= self._newest
