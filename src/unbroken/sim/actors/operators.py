"""The operator program: informers, links and writes around the job's machine, as the real one.

It may crash between any two orders. Pending writes are then lost; commands already sent are on
their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from unbroken.core.job import events as core
from unbroken.core.job.events import PodUid, PodView
from unbroken.core.job.transitions import Phase
from unbroken.core.tick import Tick
from unbroken.sim.schedule import Alarm, Schedule
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import JobStatus
from unbroken.wire.agent import AgentReport, AgentState, Command
from unbroken.wire.observation import Evidence

from .agents import Agent
from .api import Lag, Table, Watch
from .cluster import Cluster
from .links import Link, Way

RETRY_SECONDS = 1.0
BACK_AT_ONCE_SECONDS = 0.5
"""A link that closes is given so long to come back before the agent counts as lost."""
SILENCE_SECONDS = 3.0
"""Seconds without a heartbeat after which an agent counts as lost."""


class Judge(Protocol):
    """Checks the operator's orders."""

    def ordered(self, effect: core.JobEffect) -> None:
        """Before it is carried out."""

    def written(self, effect: core.JobEffect) -> None:
        """The API has it now."""

    def heard(self, events: Sequence[core.JobEvent]) -> None:
        """The operator takes these in one step."""

    def shown(self, evidence: Evidence) -> None:
        """The operator is given evidence."""

    def crashed(self, report: AgentReport, effects: Sequence[core.JobEffect]) -> None:
        """Note that the operator, in the middle of training, has received a report of failed
        workers."""


@dataclass(slots=True)
class Control:
    """Resources that all operators of a world share."""

    schedule: Schedule
    cluster: Cluster
    judge: Judge
    make: Callable[[JobStatus], core.JobMachine]
    agent: Callable[[PodUid], Agent | None]
    """Returns the agent of a pod, if messages pass both ways."""
    way: Callable[[PodUid], Way]
    """Returns the direction in which messages pass between an operator and the agent of a pod."""
    is_running: Callable[[], bool]
    """Returns whether any worker is alive."""
    lag: Lag
    jobs: Table[core.JobSeen] = field(default_factory=Table)
    statuses: Table[JobStatus] = field(default_factory=Table)
    incidents: Table[Incident] = field(default_factory=Table)
    ledger: Ledger = field(default_factory=Ledger)
    ambiguous: float = 0.0
    """Share of writes that are done, but whose answer is lost."""
    busy_seconds: float = 0.0
    """Seconds, at most, that reports wait for the operator, which then takes them together."""
    refuses: Callable[[], core.PodRefused | None] = lambda: None
    """Returns the API's refusal of a pod; None: it accepts pods."""


@dataclass(eq=False, slots=True)
class Peer:
    """A pod's agent as this operator knows it."""

    link: Link | None = None
    pending: Command | None = None
    """Newest command that could not yet be sent."""
    is_up: bool = False
    """True if it has reported, and was not lost since."""
    away_since: float | None = None
    is_connecting: bool = False


class Operator:
    """One operator process."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._schedule = control.schedule
        self.is_alive = True
        self.crash_in: int | None = None
        """Orders after which the process dies."""
        self.ready_at: float | None = None
        """Time since which it knows all there is."""
        self.on_crash: Callable[[], None] = lambda: None
        self._alarm = Alarm(control.schedule, lambda: self.give(Tick()))
        self._peers: dict[PodUid, Peer] = {}
        self._writes: deque[core.JobEffect] = deque()
        self._is_writing = False
        self._machine: core.JobMachine | None = None
        self._job: core.JobSeen | None = None
        self._waiting: list[core.AgentReported] = []
        self._watches: list[Watch[PodView] | Watch[core.NodeView] | Watch[core.JobSeen]] = []

    @property
    def is_idle(self) -> bool:
        """Nothing that it wants to write is unwritten."""
        return not self._writes

    def start(self) -> None:
        """Read the existing objects, pass them to the machine, and watch."""
        if not self.is_alive:
            return
        control = self._control
        if control.cluster.is_away:
            self._schedule.after(RETRY_SECONDS, self.start)
            return
        job = control.jobs.objects.get("job")
        if job is None:
            return
        if control.is_running():
            self._schedule.probes["adoption"] += 1
        self._machine = control.make(control.statuses.objects.get("job", JobStatus()))
        self._job = job
        self.give(replace(job, ledger=control.ledger))
        schedule, lag, cluster = self._schedule, control.lag, control.cluster
        self._watches = [
            Watch(schedule, cluster.nodes, lag, self._node_changed),
            Watch(schedule, cluster.pods, lag, self._pod_changed),
            Watch(schedule, control.jobs, Lag(), self._job_changed),
        ]
        self._list(0)

    def _list(self, index: int) -> None:
        """List one kind after the other, then the incidents."""
        if not self.is_alive:
            return
        if self._control.cluster.is_away:
            self._schedule.after(RETRY_SECONDS, self._list, index)
        elif index < len(self._watches):
            self._watches[index].list()
            self._schedule.after(self._schedule.between(0.0, 0.1), self._list, index + 1)
        else:
            for incident in self._control.incidents.objects.values():
                self.give(core.IncidentSeen(incident))
            self.ready_at = self._schedule.now
            self.give(core.Synced())

    def crash(self) -> None:
        """The process dies."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._schedule.trace("operator", "dies")
        for watch in self._watches:
            watch.stop()
        for peer in self._peers.values():
            self._close(peer)
        self.on_crash()

    def cut_watches(self, seconds: float) -> None:
        """Its streams break; it lists again after so long."""
        for watch in self._watches:
            watch.cut(seconds * self._schedule.between(0.5, 1.5))

    def heal_watches(self) -> None:
        """Streams that are broken come back."""
        for watch in self._watches:
            watch.heal()

    def give(self, event: core.JobEvent) -> None:
        """One event, and what the machine orders for it."""
        if not self.is_alive or self._machine is None:
            return
        events, self._waiting = [*self._waiting, event], []
        effects = self._take(self._machine, events)
        if self._schedule.is_traced:
            for one in events:
                self._schedule.trace("operator", f"{one}")
            for effect in effects:
                self._schedule.trace("", f"   {effect}")
        for effect in effects:
            if self.crash_in is not None:
                self.crash_in -= 1
                if self.crash_in < 0:
                    self.crash()
                    return
            self._carry_out(effect)
        self._alarm.set(self._machine.deadline())

    def _take(
        self, machine: core.JobMachine, events: Sequence[core.JobEvent]
    ) -> list[core.JobEffect]:
        is_training = getattr(machine, "phase", None) is Phase.TRAINING
        self._control.judge.heard(events)
        effects = machine.steps(events, self._schedule.now)
        reports = [event.report for event in events if isinstance(event, core.AgentReported)]
        if len(reports) > 1:
            self._schedule.probes["taken_together"] += 1
        for report in reports if is_training else ():
            if report.state is AgentState.FAULTED:
                self._control.judge.crashed(report, effects)
        return effects

    def _carry_out(self, effect: core.JobEffect) -> None:
        self._control.judge.ordered(effect)
        if isinstance(effect, core.StartWorkers | core.StopWorkers):
            self._command(effect.pod, effect.command)
            return
        if isinstance(effect, core.AskAgent):
            peer = self._peers.get(effect.pod)
            if peer is not None and peer.link is not None and peer.link.way is not Way.NONE:
                peer.link.ask(effect.request)
            return
        if isinstance(effect, core.WriteStatus):
            self._writes = deque(w for w in self._writes if not isinstance(w, core.WriteStatus))
        self._writes.append(effect)
        self._write_next()

    def _command(self, pod: PodUid, command: Command) -> None:
        peer = self._peers.get(pod)
        if peer is not None and peer.link is not None and peer.link.way is not Way.NONE:
            peer.pending = None  # only the newest is sent
            peer.link.down(command)
        elif peer is not None:
            peer.pending = command

    # Writes, one after another.

    def _write_next(self) -> None:
        if self._writes and not self._is_writing:
            self._is_writing = True
            self._schedule.after(0.01, self._write)

    def _write(self) -> None:
        self._is_writing = False
        if not self.is_alive or not self._writes:
            return
        control = self._control
        if control.cluster.is_away:
            self._is_writing = True
            self._schedule.after(RETRY_SECONDS, self._write)
            return
        effect = self._writes[0]
        is_lost = bool(control.ambiguous) and self._schedule.chance(control.ambiguous)
        if not is_lost:
            self._writes.popleft()
        self._call(effect, is_lost)
        self._write_next()

    def _call(self, effect: core.JobEffect, is_lost: bool) -> None:
        """One request to the API."""
        control = self._control
        control.judge.written(effect)
        match effect:
            case core.CreatePod():
                answer = control.refuses()
                if answer is None:
                    error = control.cluster.create_pod(effect)
                    answer = core.PodRefused(effect.name, error, False) if error else None
                if answer is not None and not is_lost:
                    answer = core.PodRefused(effect.name, answer.reason, answer.is_final)
                    self._schedule.after(0.005, self.give, answer)
            case core.DeletePod(name, uid, _, force):
                control.cluster.delete_pod(name, uid, force=force)
            case core.FenceNode(node):
                view = control.cluster.nodes.objects.get(node)
                if view is None or not view.is_ready:
                    control.cluster.fence(node)
            case core.ProveFence(node, pod):
                view = control.cluster.nodes.objects.get(node)
                if (view is None or view.is_fenced) and not is_lost:
                    self._schedule.after(0.005, self.give, core.FenceProven(pod))
            case core.DeleteJob():
                control.jobs.remove("job")
            case _:
                self._note(effect, is_lost)

    def _note(self, effect: core.JobEffect, is_lost: bool) -> None:
        """Write what an order records about the job."""
        control = self._control
        match effect:
            case core.WriteStatus(status):
                control.statuses.put("job", status)
            case core.WriteIncident(incident):
                control.incidents.put(str(incident.number), incident)
            case core.WriteLedger(ledger, is_awaited):
                control.ledger = ledger
                if is_awaited and not is_lost:
                    self._schedule.after(0.005, self.give, core.LedgerWritten(ledger))
            case core.DeleteIncident(number):
                control.incidents.remove(str(number))
            case _:
                pass

    # Informers.

    def _node_changed(
        self, name: str, old: core.NodeView | None, new: core.NodeView | None
    ) -> None:
        self.give(core.NodeSeen(new) if new else core.NodeGone(core.NodeName(name)))

    def _job_changed(self, name: str, old: core.JobSeen | None, new: core.JobSeen | None) -> None:
        if new is not None and new != self._job:
            self._job = new
            self.give(new)

    def _pod_changed(self, name: str, old: PodView | None, new: PodView | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            peer = self._peers.pop(old.uid, None)
            if peer is not None:
                self._close(peer)
            self.give(core.PodGone(old.name, old.uid))
        if new is not None:
            self.give(core.PodSeen(new))
            if new.address is not None and new.uid not in self._peers:
                self._peers[new.uid] = Peer()
                self.look(new.uid)

    # Links.

    def look(self, pod: PodUid) -> None:
        """The agent, or the way to it, may have changed."""
        peer = self._peers.get(pod)
        if peer is None or not self.is_alive:
            return
        agent = self._control.agent(pod)
        if peer.link is not None and agent is peer.link.agent:
            peer.away_since = None
            peer.link.resume()
        elif agent is not None:
            self._connect(pod, peer)
        else:
            self._partly(pod, peer, self._control.way(pod))

    def _partly(self, pod: PodUid, peer: Peer, way: Way) -> None:
        """Handle a link that passes one direction only; an agent that reaches the operator is not
        lost while it lives."""
        if peer.link is not None:
            peer.link.way = way
        if way is Way.UP and (peer.link is None or peer.link.agent.is_alive):
            peer.away_since = None
        elif peer.away_since is None:
            self._miss(pod, peer)

    def _connect(self, pod: PodUid, peer: Peer) -> None:
        if not peer.is_connecting:
            peer.is_connecting = True
            self._schedule.after(self._schedule.between(0.01, 0.4), self._connected, pod, peer)

    def _connected(self, pod: PodUid, peer: Peer) -> None:
        peer.is_connecting = False
        agent = self._control.agent(pod)
        if agent is None or not self.is_alive or self._peers.get(pod) is not peer:
            return self.look(pod)
        self._close(peer)
        peer.link = Link(self._schedule, pod, agent, self._heard, self._shown)
        peer.away_since = None
        agent.links.append(peer.link)
        if peer.pending is not None:
            peer.link.down(peer.pending)
            peer.pending = None
        return peer.link.up()

    def _heard(self, pod: PodUid, report: AgentReport) -> None:
        self._peers[pod].is_up = True
        event, busy = core.AgentReported(pod, report), self._control.busy_seconds
        if not busy:
            self.give(event)
            return
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self._schedule.after(self._schedule.between(0.0, busy), self._catch_up)

    def _catch_up(self) -> None:
        if self._waiting:
            self.give(self._waiting.pop())

    def _shown(self, pod: PodUid, evidence: Evidence) -> None:
        self._control.judge.shown(evidence)
        self.give(core.EvidenceReceived(pod, evidence))

    def _miss(self, pod: PodUid, peer: Peer) -> None:
        """Handle an agent that does not answer; whether the job learns of it depends on the
        duration."""
        peer.away_since = self._schedule.now
        if peer.link is None:
            return
        is_closed = not peer.link.agent.is_alive and not self._is_unreachable(pod)
        patience = BACK_AT_ONCE_SECONDS if is_closed else SILENCE_SECONDS
        self._schedule.after(patience, self._lost, pod, peer, peer.away_since)

    def _is_unreachable(self, pod: PodUid) -> bool:
        local = self._control.cluster.local(pod)
        return local is None or not local.node.is_up

    def _lost(self, pod: PodUid, peer: Peer, since: float) -> None:
        if self._peers.get(pod) is not peer or peer.away_since != since or not self.is_alive:
            return
        if self._control.agent(pod) is not None:
            peer.away_since = None  # it is being connected, and is missed anew if that fails
            return
        heard_at = peer.link.received_at if peer.link is not None else self._schedule.now
        self._close(peer)
        if peer.is_up:
            peer.is_up = False
            silent_seconds = self._schedule.now - heard_at
            self.give(core.AgentLost(pod, "it does not answer", silent_seconds))

    def _close(self, peer: Peer) -> None:
        if peer.link is not None:
            peer.link.is_open = False
            if peer.link in peer.link.agent.links:
                peer.link.agent.links.remove(peer.link)
            peer.link = None
