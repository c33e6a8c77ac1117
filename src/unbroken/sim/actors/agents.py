"""The agent program of a pod: carries out what its machine orders, as the real one does.

Orders that take time are carried out one after another; a crash may come between any two of them.

An agent also checks whether its parent can be connected to (`unbroken.agent.peers`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from unbroken.core.agent import events
from unbroken.core.agent.events import ProgramStage
from unbroken.core.agent.faults import WorkerEnd
from unbroken.core.agent.link_order import LinkOrder
from unbroken.core.agent.machine import Workers
from unbroken.core.agent.peers import Vouching
from unbroken.core.tick import Tick
from unbroken.sim.scenario import Restartable
from unbroken.sim.schedule import EPOCH, Alarm, Schedule
from unbroken.wire.agent import (
    AgentReport,
    Command,
    HistoryCommand,
    PeerAnswer,
    PeerQuestion,
    Request,
    StartCommand,
    WarmCommand,
)
from unbroken.wire.observation import CollectCommand, Evidence

from .cluster import Local
from .imports import Imports
from .links import Link, Quality
from .snapshots import Snapshots
from .training import KILLED, Training, Worker
from .watches import Watches

CHECK_SECONDS, DOUBT_SECONDS = 2.0, 1.0
"""Seconds between two checks; the second value after a failed one."""


class PeerCheck:
    """The checks of one agent in one attempt."""

    def __init__(self, schedule: Schedule, agent: Agent, parent: str) -> None:
        self._schedule = schedule
        self._agent = agent
        self._parent = parent
        self._failed = 0
        self._schedule.probes["peers_checked"] += 1
        self.unreached = ""
        """The parent's address, after two connections to it in a row have failed."""

    def run(self) -> None:
        """Check now, and again for as long as the attempt lasts."""
        agent = self._agent
        if agent.check is not self or not agent.is_alive:
            return
        if not agent.is_frozen:
            self._failed = 0 if agent.reaches(self._parent) else self._failed + 1
            away = self._parent if self._failed > 1 else ""
            if away != self.unreached:
                self.unreached = away
                agent.publish()
        self._schedule.after(DOUBT_SECONDS if self._failed else CHECK_SECONDS, self.run)


SIGTERM = 15
BEAT_SECONDS = 1.0
"""Seconds between two beats of an agent to the operator, if it holds leases."""
ALONE_SECONDS = 1.5
"""Seconds without an answer after which it asks its peers."""
ASK_SECONDS = 0.5
"""Seconds between two questions to its parent."""
KEEPER_SECONDS = 0.5
"""Seconds after the end of a lease: the agent's keeper ends what the agent has not killed."""
AWAKE_SECONDS = 0.25
"""Seconds between two looks whether a paused machine is awake."""


@dataclass(frozen=True, slots=True)
class Leasing:
    """Leases of a world."""

    drift: float
    """Fraction by which clocks run fast or slow at most."""
    kill_seconds: float
    """Seconds for a keeper to kill late workers, at most."""
    peer: Callable[[str], Agent | None]
    """The agent at `host:port`; None: none lives there."""
    ran_out: Callable[[Agent], None]
    """Called with each agent whose lease has run out."""
    has_checks: bool = False
    """Agents check whether their parent can be connected to."""


class Machine(Protocol):
    """`core.agent.machine.Workers`, or a simulation of a stock agent."""

    def step(self, event: events.AgentEvent, now: float) -> list[events.AgentEffect]:
        """Take one event; return what must be done."""

    def deadline(self) -> float | None:
        """Return when `Tick` is due."""

    def report(self) -> AgentReport:
        """Return the machine's state."""


@dataclass(slots=True)
class AgentResources:
    """Resources that all agents of a world share."""

    schedule: Schedule
    training: Training
    quality: Quality
    nproc: int
    make: Callable[[str], Machine]
    exited: Callable[[Local, bool], None]
    noted: Callable[[str, Local], None]
    """Reports a fault to the checkers."""
    ports: int = 20000
    agents: int = 0
    kill_seconds: float = 0.02
    stubborn: float = 0.0
    """Share of signals that request an end and that a worker ignores."""
    skew_seconds: float = 0.0
    """Seconds by which the clocks of agents may be wrong."""
    watches: Watches | None = None
    """Watchdogs; None: the agents have none."""
    ill: float = 0.0
    """Share of programs that cannot be started."""
    members: Restartable | None = None
    """Restartable workers; None: no worker can leave its training."""
    snapshots: Snapshots | None = None
    """Snapshots; None: no worker saves any."""
    imports: Imports | None = None
    """None: workers always start cold."""
    leasing: Leasing | None = None
    """None: workers need no lease."""


class Agent:
    """One agent process."""

    check: PeerCheck | None = None
    """Its checks of whether the parent in its newest attempt can be connected to."""

    def __init__(self, world: AgentResources, local: Local) -> None:
        self._world = world
        self._schedule = world.schedule
        world.agents += 1
        self.id = f"agent-{world.agents}"
        self.local = local
        self.quality = world.quality
        self.is_alive = True
        self.links: list[Link] = []
        self.order = LinkOrder()
        self.workers: dict[int, Worker] = {}
        """Workers by local rank; those of the newest stage."""
        self.crash_in: int | None = None
        """Orders after which the process dies."""
        self._machine = world.make(self.id)
        self._alarm = Alarm(world.schedule, lambda: self.give(Tick()))
        self._todo: deque[events.AgentEffect] = deque()
        self._is_busy = False
        self._inbox: list[events.AgentEvent] | None = None
        """Events that wait while the process is frozen."""
        self._skew = world.skew_seconds * world.schedule.between(-1.0, 1.0)
        self._rate = 1.0
        """Rate of its clock."""
        self.beats_at = 0.0
        """Time of its next beat to the operator."""
        self._renewed_at = 0.0
        """Time of the operator's last answer."""
        self._expiry: float | None = None
        """The end of its lease, as its keeper knows it."""
        self._is_kept = False
        """The keeper waits for the end of a lease."""
        self.is_blind = False
        """True if it cannot look at its workers."""
        self.told: StartCommand | None = None
        """The newest start that its workers have followed."""
        self._peers: Vouching | None = None
        """Its knowledge of the other agents of that attempt."""
        self._asks = False
        """True if it asks its parent every moment."""
        self.slow: dict[type[events.AgentEffect], float] = {}
        """Seconds that an order of the kind takes; the usual time where there is none."""

    def boot(self) -> None:
        """It listens."""
        leasing, schedule = self._world.leasing, self._schedule
        if leasing is not None:
            self._rate += leasing.drift * schedule.random.choice([-1.0, 0.0, 1.0])
            self._beat()
        self.give(events.Prepared())

    def _clock(self) -> float:
        """The time on its own clock."""
        return EPOCH + (self._schedule.now - EPOCH) * self._rate + self._skew

    def _true(self, at: float) -> float:
        """The time at which its own clock shows this."""
        return EPOCH + (at - self._skew - EPOCH) / self._rate

    # Leases.

    def _beat(self) -> None:
        if not self.is_alive:
            return
        leasing, schedule = self._world.leasing, self._schedule
        if leasing is not None and not self.is_frozen:
            for link in self.links[-1:]:
                link.beat(self._clock())
            if self._is_alone and not self._asks:
                self._asks = True
                self._ask_parent()
        self.beats_at = schedule.now + BEAT_SECONDS
        schedule.after(BEAT_SECONDS, self._beat)

    def renew(self, asked_at: float) -> None:
        """Take the operator's answer to a beat."""
        self._renewed_at = self._schedule.now
        self.give(events.Renewed(asked_at))

    @property
    def _is_alone(self) -> bool:
        return self._schedule.now > self._renewed_at + ALONE_SECONDS

    def _ask_parent(self) -> None:
        """Ask how long ago all others ran the attempt; the first agent knows it by itself."""
        if not self.is_alive or not self._is_alone:
            self._asks = False
            return
        peers, told, leasing, at = self._peers, self.told, self._world.leasing, self._clock()
        if peers is not None and told is not None and leasing is not None and not self.is_frozen:
            machine, vouches = self._machine, self._vouch(peers)
            is_urgent = isinstance(machine, Workers) and machine.lease.is_urgent(at)
            question = peers.question(vouches=vouches, is_urgent=is_urgent, now=at)
            parent = leasing.peer(told.parent)
            if parent is not None:
                self._post(parent, parent.asked, self, question, at)
            elif not told.parent:
                self._vouched(peers)
        self._schedule.after(ASK_SECONDS, self._ask_parent)

    def _post(self, to: Agent, arrive: Callable[..., None], *message: object) -> None:
        """Send another agent a message; it arrives even at a node that is cut off meanwhile."""
        if to.local.node.receives(self.local.node):
            self._schedule.after(self.quality.usual_seconds, arrive, *message)

    def reaches(self, address: str) -> bool:
        """Return whether the agent at `host:port` can be connected to."""
        leasing, here = self._world.leasing, self.local.node
        peer = None if leasing is None else leasing.peer(address)
        there = None if peer is None else peer.local.node
        return there is not None and there.receives(here) and here.receives(there)

    def asked(self, child: Agent, question: PeerQuestion, asked_at: float) -> None:
        """Answer a child, if it can be reached and this agent is not frozen."""
        peers, now = self._peers, self._clock()
        if peers is None or not self.is_alive or self.is_frozen or not peers.asked(question, now):
            return
        answer = peers.answer_child(question, vouches=self._vouch(peers), now=now)
        self._post(child, child.answered, peers.attempt, answer, asked_at)

    def answered(self, attempt: int, answer: PeerAnswer, asked_at: float) -> None:
        """Take the parent's answer."""
        peers = self._peers
        if peers is not None and peers.attempt == attempt and not self.is_frozen:
            peers.answered(answer, asked_at)
            self._vouched(peers)

    def _vouched(self, peers: Vouching) -> None:
        at = peers.all_at(vouches=self._vouch(peers), now=self._clock())
        if at > -math.inf:
            self._schedule.probes["vouched"] += 1
            self.give(events.Vouched(peers.attempt, at))

    def _vouch(self, peers: Vouching) -> bool:
        is_needed = peers.is_needed(is_alone=self._is_alone, now=self._clock())
        return is_needed and self.vouches(peers.attempt)

    def vouches(self, attempt: int) -> bool:
        """Return whether the agent vouches that peers in this attempt may continue."""
        if not isinstance(self._machine, Workers) or self.is_frozen:
            return False
        return self.is_alive and self._machine.vouch(attempt)

    def _hold(self, until: float | None) -> None:
        """Report to the keeper."""
        is_new = self._expiry is None
        self._expiry = until
        if until is not None and is_new and not self._is_kept:
            self._is_kept = True
            self._keep_watch(until)

    def _keep_watch(self, until: float) -> None:
        due = self._true(until) + KEEPER_SECONDS - self._schedule.now
        self._schedule.after(max(0.0, due), self._keeper)

    def _keeper(self) -> None:
        """End what outlives its lease."""
        leasing, schedule = self._world.leasing, self._schedule
        if self.local.node.is_paused:
            schedule.after(AWAKE_SECONDS, self._keeper)
        elif not self.is_alive or self._expiry is None or leasing is None:
            self._is_kept = False
        elif self._true(self._expiry) + KEEPER_SECONDS > schedule.now + 1e-6:
            self._keep_watch(self._expiry)
        else:
            schedule.probes["keeper_ends_it"] += 1
            leasing.ran_out(self)
            schedule.after(schedule.between(0.0, leasing.kill_seconds), self.kill)

    def _has_run_out(self) -> bool:
        return self._expiry is not None and self._true(self._expiry) <= self._schedule.now

    def _mark_killed(self) -> None:
        """All workers were sent SIGKILL, because of the lease."""
        for worker in self._living():
            worker.is_lease_over = True

    @property
    def is_frozen(self) -> bool:
        """True if it does nothing at all, while its workers continue."""
        return self._inbox is not None

    def freeze(self) -> None:
        """SIGSTOP."""
        self._inbox = self._inbox or []

    def wake(self, seconds: float, *, counts: bool) -> None:
        """Resume after a pause of its machine. `counts`: its clock counted the pause."""
        if not counts:
            self._skew -= seconds * self._rate
        self.thaw()

    def thaw(self) -> None:
        """SIGCONT: all that came meanwhile is dealt with at once."""
        waiting, self._inbox = self._inbox or [], None
        for event in waiting:
            self.give(event)

    def report(self) -> AgentReport:
        """Return its present state."""
        report, world = self._machine.report(), self._world
        report = world.imports.report(self.id, report) if world.imports else report
        if self.check is not None and self.told is not None and report.attempt == self.told.attempt:
            report = replace(report, unreached=self.check.unreached)
        return world.snapshots.report(self.id, report) if world.snapshots else report

    def publish(self) -> None:
        """Send the report over all links."""
        for link in self.links:
            link.up()

    def command(self, command: Command) -> None:
        """Take a command of an operator that is linked to it."""
        self.give(events.Commanded(command))

    def ask(self, request: Request, answer: Callable[[Evidence], None]) -> None:
        """Follow a request; one for evidence is answered."""
        match request:
            case CollectCommand():
                self._collect(request, answer)
            case WarmCommand():
                self._warm(request)
            case HistoryCommand():
                raise AssertionError("no worker of the simulation asks for it")

    def _warm(self, command: WarmCommand) -> None:
        """Ask others what workers import."""
        if not self.is_frozen:
            assert self._world.imports is not None, "told that starts no workers warm"
            self._world.imports.tell(self, command)

    def watch(self, attempt: int) -> None:
        """Report news of its watchdog."""
        watches = self._world.watches
        if watches is not None:
            views = tuple(watches.view(w) for w in self._living() if w.attempt == attempt)
            self._schedule.after(0.01, self.give, events.WatchRead(attempt, views))

    def _collect(self, command: CollectCommand, answer: Callable[[Evidence], None]) -> None:
        """Look at the workers, which takes a while."""
        if self._world.watches is not None and not self.is_frozen and not self.is_blind:
            seconds = self._schedule.between(0.2, command.seconds)
            self._schedule.after(seconds, self._look, command, answer)

    def _look(self, command: CollectCommand, answer: Callable[[Evidence], None]) -> None:
        watches, now = self._world.watches, self._schedule.now
        if watches is not None and self.is_alive and not self.is_frozen:
            seen = [watches.look(w) for w in self._living() if w.attempt == command.attempt]
            answer(Evidence(command.request, command.attempt, self.id, now, tuple(seen)))

    def terminate(self) -> None:
        """SIGTERM."""
        self.give(events.Terminated(SIGTERM))

    def kill(self) -> None:
        """It and its workers die at once: they ask the kernel for it."""
        self._die(is_success=False)

    def give(self, event: events.AgentEvent) -> None:
        """One event, and what the machine orders for it."""
        if not self.is_alive:
            return
        if self._inbox is not None:
            self._inbox.append(event)
            return
        effects = self._machine.step(event, self._clock())
        if self._schedule.is_traced:
            self._schedule.trace(f"{self.id}/{self.local.name}", f"{event} -> {effects}")
        due = self._machine.deadline()
        self._alarm.set(due if due is None else max(self._true(due), self._schedule.now) + 1e-6)
        is_kill = isinstance(event, Tick) and events.KillAll() in effects
        if self._world.leasing is not None and is_kill and self._has_run_out():
            self._world.leasing.ran_out(self)
        for effect in effects:
            if isinstance(effect, events.Publish):
                if effect.report.is_unstarted:
                    self._world.noted("ends_waiting", self.local)
                self.publish()
            elif isinstance(effect, events.HoldLease):
                self._hold(effect.until)
            else:
                self._todo.append(effect)
        self._next()

    def _next(self) -> None:
        """Carry out orders until one takes time."""
        while self._todo and not self._is_busy and self.is_alive:
            if self.crash_in is not None:
                self.crash_in -= 1
                if self.crash_in < 0:
                    self._world.noted("agent_crash", self.local)
                    self._die(is_success=False)
                    return
            self._carry_out(self._todo.popleft())

    def _carry_out(self, effect: events.AgentEffect) -> None:
        schedule = self._schedule
        match effect:
            case events.Spawn():
                self._is_busy = True
                seconds = self.slow.pop(events.Spawn, schedule.between(0.01, 0.3))
                schedule.after(seconds, self._spawn, effect)
            case events.KillAll(kept):
                self._kill_but(kept)
            case events.SignalWorkers() | events.Recall() | events.ReleaseWorkers():
                self._tell(effect)
            case events.OfferPort(used):
                self._world.ports += 1 + (used == self._world.ports + 1)
                schedule.after(0.001, self.give, events.PortFound(self._world.ports))
            case events.Exit(code):
                self._die(is_success=code == 0)
            case events.Publish() | events.HoldLease():
                pass  # done already

    def _tell(self, effect: events.SignalWorkers | events.Recall | events.ReleaseWorkers) -> None:
        schedule = self._schedule
        match effect:
            case events.SignalWorkers(signal):
                for worker in self._living():
                    if not schedule.chance(self._world.stubborn):
                        end = WorkerEnd(None, signal)
                        schedule.after(0.05, self._world.training.end, worker, end)
            case events.Recall(local_ranks):
                for local_rank in local_ranks:
                    self._recall(local_rank)
            case events.ReleaseWorkers(local_ranks, command):
                for local_rank in local_ranks:
                    seconds = schedule.between(0.002, 0.1)
                    worker = self.workers[local_rank]
                    schedule.after(seconds, self._go_on, local_rank, worker, command)

    def _spawn(self, effect: events.Spawn) -> None:
        if not self.is_alive:
            return
        if self.local.node.is_paused:
            self._schedule.after(AWAKE_SECONDS, self._spawn, effect)
            return
        command, stage = effect.command, effect.stage
        if self._world.ill and self._schedule.chance(self._world.ill):
            self._world.noted("not_started", self.local)
            text = "no such file"
            answer: events.AgentEvent = events.SpawnFailed(command.attempt, stage, 0, text)
        else:
            ranks = tuple(i for i in range(self._world.nproc) if i not in effect.kept)
            pids = tuple(self._fork(command, stage, i) for i in ranks)
            answer = events.StageStarted(command.attempt, stage, pids, ranks)
        self._is_busy = False
        self.give(answer)

    def _fork(self, command: StartCommand, stage: ProgramStage, local_rank: int) -> int:
        training, members = self._world.training, self._world.members
        worker = self._worker(command, stage, local_rank, training.new_pid())
        self.workers[local_rank] = worker
        training.start(worker)
        self._schedule.after(1.0, self._wrote, worker, local_rank)
        if members is not None and self._schedule.chance(members.share):
            seconds = self._schedule.between(0.02, 0.5)
            self._schedule.after(seconds, self._register, local_rank, worker)
        return worker.pid

    def _worker(
        self, command: StartCommand, stage: ProgramStage, local_rank: int, pid: int
    ) -> Worker:
        world = self._world
        if self.told is not command:
            self.told = command
            self._peers = Vouching(self.id, command.attempt, command.rank, command.nnodes)
            if command.parent and world.leasing is not None and world.leasing.has_checks:
                self.check = PeerCheck(self._schedule, self, command.parent)
                self.check.run()
            else:
                self.check = None
        return Worker(
            pid=pid,
            pod=self.local.uid,
            agent=self.id,
            attempt=command.attempt,
            rank=command.rank * world.nproc + local_rank,
            node_rank=command.rank,
            world_size=command.nnodes * world.nproc,
            master=(command.master_addr, command.master_port),
            started_at=world.schedule.now,
            on_exit=lambda worker, how: self._ended(local_rank, stage, worker, how),
        )

    # Workers that leave their training, and live on.

    def _register(self, local_rank: int, worker: Worker) -> None:
        if worker.exit is None:
            worker.is_member = True
            self.give(events.Registered(local_rank, worker.pid))

    def _recall(self, local_rank: int) -> None:
        worker, members = self.workers[local_rank], self._world.members
        assert members is not None
        is_stuck = worker.is_stalled or worker.is_stopped
        if is_stuck or self._schedule.chance(members.absent):
            self._schedule.probes["never_arrives"] += 1
        else:
            seconds = self._schedule.between(0.002, members.arrive_seconds)
            self._schedule.after(seconds, self._arrive, local_rank, worker)

    def _arrive(self, local_rank: int, worker: Worker) -> None:
        members = self._world.members
        if worker.exit is not None or worker.is_at_barrier or members is None:
            return
        self._world.training.arrive(worker)
        self.give(events.Arrived(local_rank, worker.pid))
        if self._schedule.chance(members.mortal):
            self._schedule.after(self._schedule.between(0.0, 1.0), self._die_waiting, worker)

    def _die_waiting(self, worker: Worker) -> None:
        if worker.exit is None:
            self._world.noted("dies_at_the_barrier", self.local)
            self._world.training.end(worker, KILLED)

    def _go_on(self, local_rank: int, worker: Worker, command: StartCommand) -> None:
        if worker.exit is not None or not self.is_alive:
            return
        later = self._worker(command, ProgramStage.TRAIN, local_rank, worker.pid)
        later.is_member = True
        self.workers[local_rank] = later
        self._world.training.restart_in_place(worker, later)
        self._schedule.probes["goes_on"] += 1
        # If the process wrote long ago, this is its first sign of life.
        self._world.training.wrote(later)
        self.give(events.Passed(local_rank, worker.pid))

    def _wrote(self, worker: Worker, local_rank: int) -> None:
        if worker.exit is None and not worker.is_at_barrier:
            self._world.training.wrote(worker)
            self.give(events.FirstOutput(worker.attempt, local_rank))
            # Lines of half of the workers recur; what the others write shows no training.
            if worker.pid % 2:
                self.give(events.RecurringLine(worker.attempt, local_rank, self._clock()))

    def _ended(self, local_rank: int, stage: ProgramStage, worker: Worker, how: WorkerEnd) -> None:
        event = events.WorkerEnded(worker.attempt, stage, local_rank, how, pid=worker.pid)
        self._schedule.after(0.001, self.give, event)

    def _kill_but(self, kept: tuple[int, ...]) -> None:
        schedule = self._schedule
        if not self._living(kept):
            schedule.after(0.0, self.give, events.NothingLives(kept))
            return
        self._is_busy = True
        if self._has_run_out():
            self._mark_killed()
        seconds = self.slow.pop(events.KillAll, self._world.kill_seconds)
        schedule.after(seconds, self._kill_all, kept)

    def _kill_all(self, kept: tuple[int, ...]) -> None:
        if not self.is_alive:
            return
        for worker in self._living(kept):
            self._world.training.end(worker, KILLED)
        self._schedule.after(0.002, self._nothing_lives, kept)

    def _nothing_lives(self, kept: tuple[int, ...]) -> None:
        self._is_busy = False
        self.give(events.NothingLives(kept))

    def _living(self, but: tuple[int, ...] = ()) -> list[Worker]:
        dict_items = self.workers.items()
        return [worker for rank, worker in dict_items if worker.exit is None and rank not in but]

    def _die(self, *, is_success: bool) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._schedule.trace(f"{self.id}/{self.local.name}", "dies")
        for worker in self._living():
            self._world.training.end(worker, KILLED)
        self._world.exited(self.local, is_success)
