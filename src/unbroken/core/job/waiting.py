"""Pods of a job that is to start and has not: what they wait for, and which are replaced.

`Waits` gives the reasons. The cause is in the message of the job's newest condition, and in one
event for each cause.

`Unanswered` replaces pods whose agent never answers, of a job that has trained before. Its image
and its template work, so the node is to blame: it does not load the image, does not start the
container, or does not connect it. A first start waits instead, because any image may be slow.

`Unstarted` replaces pods with workers that do not wait for their rank: they have ended, or take too
long. With `--inprocess-restart` workers start before their rank is known, and wait for it at a
barrier. An agent of this project reports a worker that ends before that. HyperPod's agent reports
one only if all workers were at the barrier before; else it stays in INIT, as for workers that take
long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from unbroken.core.job.record.redaction import clean
from unbroken.core.job.recovery.symptoms import as_reason
from unbroken.spec.job.detectors import Detector, Mode
from unbroken.spec.job.types import Condition
from unbroken.wire.agent import AgentReport, AgentState

from .deadlines import Timers, earliest
from .events import PodName, PodPhase, PodUid, PodView
from .obstacles import (
    AGENT_SHARED,
    MARK,
    NO_AGENT,
    NOT_PROVEN,
    NOT_READY,
    REFUSED,
    Obstacle,
    printable,
    summary,
    with_wait,
)
from .recovery import symptoms
from .recovery.recovery import Recovery
from .roster import Member
from .state import JobState
from .transitions import Phase

EVENTS_MAX = 20
"""Events about causes, between two starts of the job."""
CHANGE_SECONDS = 2.0
"""Seconds between changes of the text: a thousand pods that recover one by one must not cause a
thousand writes."""
AGENT_SECONDS = 15.0
"""Seconds after which a running container whose agent never reported is shown."""


@dataclass(slots=True)
class Waits:
    """The obstacles of one job's pods."""

    state: JobState
    _recorded: set[str] = field(default_factory=set)
    """Causes with an event recorded since the last start."""
    _changed_at: float | None = None
    _due: float | None = None
    _up: Timers[PodUid] = field(default_factory=Timers)
    """Time since when each pod runs whose agent never reported."""
    _without_wait: tuple[Condition, ...] | None = None
    """Conditions that are known to mention no wait."""

    def deadline(self) -> float | None:
        """Return when the text is to change, or a missing agent is to be reported."""
        if self.state.phase is not Phase.PREPARING:
            return None
        return earliest(self._due, self._up.deadline(AGENT_SECONDS))

    def see(self, view: PodView, now: float) -> None:
        """Take the view of a pod whose agent never reported."""
        trouble = self.state.trouble
        if view.reason:
            self._up.pop(view.uid, None)
            self.note(Obstacle(view.name, view.reason, view.message, view.last_lines))
            return
        known = trouble.get(view.name)
        if known is not None and known.reason == NOT_PROVEN:
            return
        if known is not None and known.reason != NO_AGENT:
            del trouble[view.name]
        if view.phase is PodPhase.RUNNING and not view.is_deleting:
            self._up.setdefault(view.uid, now)

    def held(self, member: Member | None, reason: str, message: str) -> None:
        """Take what a node or a link says of a pod, unless more is known by now."""
        if member is None or member.report is not None:
            return
        view = member.view
        if reason == NOT_PROVEN and view.phase is PodPhase.RUNNING and not view.is_deleting:
            self._up.pop(view.uid, None)
            # The operator's link has recorded the event.
            self.state.trouble[view.name] = Obstacle(view.name, reason, printable(message))
        if reason == AGENT_SHARED:
            self._up.pop(view.uid, None)
            self.note(Obstacle(view.name, reason, printable(message)))
        if view.phase is PodPhase.PENDING and not view.reason and not view.is_deleting:
            self.note(Obstacle(view.name, as_reason(reason), printable(message)))

    def shared(self, view: PodView, other: PodView) -> None:
        """Note that the agent of another pod answers at the address of this one."""
        self._up.pop(view.uid, None)
        text = f"one agent answers at its port {view.agent_port} and at that of pod {other.name}"
        self.note(Obstacle(view.name, AGENT_SHARED, text))

    def refused(self, name: PodName, reason: str) -> None:
        """Note that a pod could not be created."""
        self.note(Obstacle(name, REFUSED, printable(f"it cannot be created: {reason}")))

    def forget(self, view: PodView) -> None:
        """Forget the pod: its agent has reported, or it is gone."""
        self._up.pop(view.uid, None)
        self.state.trouble.pop(view.name, None)

    def advance(self, now: float) -> None:
        """Write the reason of the wait into the condition."""
        state = self.state
        if state.phase is Phase.TRAINING:
            self._recorded.clear()
        is_waiting = state.phase is Phase.PREPARING
        if is_waiting:
            self._miss_agents(now)
        if not state.trouble and state.status.conditions is self._without_wait:
            return  # Nothing to report, the usual case: this runs after each report.
        text = summary(state.trouble.values()) if is_waiting else ""
        reason = next(iter(state.trouble.values())).cause if text else ""
        wanted = with_wait(state.status.conditions, clean(text), as_reason(reason))
        self._due = None
        if wanted == state.status.conditions:
            self._without_wait = None if text else state.status.conditions
            return
        is_change = text and any(MARK in one.message for one in state.status.conditions)
        due = (self._changed_at or 0.0) + CHANGE_SECONDS
        if is_change and now < due:
            self._due = due
            return
        self._changed_at = now
        state.set_status(conditions=wanted)

    def note(self, obstacle: Obstacle) -> None:
        """Keep the obstacle, and record an event if its cause is new."""
        state = self.state
        state.trouble[obstacle.pod] = obstacle
        if obstacle.cause not in self._recorded and len(self._recorded) < EVENTS_MAX:
            self._recorded.add(obstacle.cause)
            state.record_event(as_reason(obstacle.cause), obstacle.full_text(), is_warning=True)

    def _miss_agents(self, now: float) -> None:
        for uid in self._up.expire(now, AGENT_SECONDS):
            member = self.state.roster.members.get(uid)
            if member is not None and member.report is None:
                port = member.view.agent_port
                text = f"its container runs, and no agent has answered at its port {port} yet"
                self.note(Obstacle(member.view.name, NO_AGENT, text))


class Stage(Enum):
    """Stage of a pod's start."""

    STARTS = "starts"
    """The pod has a node, which reports nothing: it may still load a large image."""
    IS_HELD = "is held"
    """The node or the container reports why it does not start."""
    RUNS = "runs"
    """Its container runs, and its agent does not answer."""


SECONDS = {Stage.STARTS: 3600.0, Stage.IS_HELD: 600.0, Stage.RUNS: 600.0}
"""Seconds that a pod may stay in a stage."""


class Unanswered:
    """The pods of one job that have a node and no agent yet."""

    def __init__(self, state: JobState, recovery: Recovery) -> None:
        self._state = state
        self._recovery = recovery
        self._since: dict[Stage, Timers[PodUid]] = {stage: Timers() for stage in Stage}
        """Time since when each is in its stage."""

    def deadline(self) -> float | None:
        """Return when the next pod is to be replaced."""
        if not self._is_on():
            return None
        return earliest(*(since.deadline(SECONDS[stage]) for stage, since in self._since.items()))

    def see(self, member: Member, now: float) -> None:
        """Take a pod as it is now."""
        view, uid = member.view, member.uid
        if member.report is not None or view.node is None or member.condemned:
            return
        stage = Stage.STARTS
        if view.phase is PodPhase.RUNNING:
            stage = Stage.RUNS
        elif view.name in self._state.trouble or uid in self._since[Stage.IS_HELD]:
            stage = Stage.IS_HELD  # The reason comes and goes with each try.
        if uid not in self._since[stage]:
            self.forget(uid)
            self._since[stage][uid] = now

    def forget(self, uid: PodUid) -> None:
        """Forget a pod that is gone, or whose agent has answered."""
        for since in self._since.values():
            since.pop(uid, None)

    def advance(self, now: float) -> None:
        """Replace the pods that have taken too long, elsewhere."""
        for stage, since in self._since.items() if self._is_on() else ():
            for uid in since.expire(now, SECONDS[stage]):
                member = self._state.roster.members.get(uid)
                if member is None or member.condemned or member.view.node is None:
                    continue
                if self._has_peer(member):
                    self._replace(member, stage, now)
                else:
                    since[uid] = now  # The spec may have changed: its image may never have worked.

    def _replace(self, member: Member, stage: Stage, now: float) -> None:
        assert member.view.node is not None
        self._state.plan.avoid |= {member.view.node}
        text = f"its agent has not answered within {SECONDS[stage] // 60:g} minutes"
        self._recovery.lose_all([member], symptoms.NOT_READY, text, now)

    def _is_on(self) -> bool:
        state = self._state
        return state.has_run and state.phase in (Phase.PREPARING, Phase.TRAINING)

    def _has_peer(self, member: Member) -> bool:
        """True if an agent of another pod of the same replica spec has answered."""
        kind = member.view.replica_spec
        members = self._state.roster.members.values()
        return any(one.report is not None and one.view.replica_spec == kind for one in members)


TELL_SECONDS = 30.0
"""Seconds in INIT after which the wait for the workers of a pod is reported."""
READY_SECONDS = 600.0
"""Seconds in INIT after which the pod is replaced, at the cost of a restart.

A watched worker without any sign of life gets as long. Rules of the job about its start may give
the workers more time.
"""
WAITS = "not all of its workers wait for their rank; one has ended before, or they take long"


class Unstarted:
    """The workers of one job that have no rank yet."""

    def __init__(self, state: JobState, recovery: Recovery, waits: Waits) -> None:
        self._state = state
        self._recovery = recovery
        self._waits = waits
        self._agents: dict[PodUid, str] = {}
        """Ids of the agent processes that report INIT."""
        self._since: Timers[PodUid] = Timers()
        """Time since when each of them does."""
        self._untold: Timers[PodUid] = Timers()
        """Agents among them whose wait is not reported yet."""
        self._is_preparing = False

    def deadline(self) -> float | None:
        """Return when a wait is to be reported, or a pod to be replaced."""
        if self._state.phase is not Phase.PREPARING or not self._since:
            return None
        by = self._seconds()
        replaced_at = None if by is None else self._since.deadline(by)
        return earliest(self._untold.deadline(TELL_SECONDS), replaced_at)

    def heard(self, member: Member, now: float) -> None:
        """Take an agent's report."""
        report, uid = member.report, member.uid
        waits = report.agent_id if report and report.state is AgentState.INIT else None
        if waits is not None and waits == self._agents.get(uid):
            return
        self._forget(uid)
        self._waits.forget(member.view)
        if waits is not None:
            self._agents[uid], self._since[uid], self._untold[uid] = waits, now, now

    def broke(self, member: Member, report: AgentReport, now: float) -> None:
        """Charge the fault of workers that ended before they had a rank.

        It joins the open incident, unless the agent has started other workers since.
        """
        state, incident = self._state, self._state.incidents.open
        if state.phase is not Phase.PREPARING or member.condemned:
            return
        if state.is_incident_unwritten and member.early_attempt < state.attempt:
            return  # An earlier operator has charged it, and this one has told the agent to stop.
        found = symptoms.of_unstarted(member, report, now)
        if incident is not None and member.early_attempt <= incident.attempt:
            self._recovery.fault(found, now)
        else:
            self._recovery.open(found, now)

    def advance(self, now: float) -> None:
        """Report the waits, and replace the pods whose workers took too long."""
        members, was_preparing = self._state.roster.members, self._is_preparing
        self._is_preparing = self._state.phase is Phase.PREPARING
        if not self._is_preparing:
            for started in (self._agents, self._since, self._untold):
                started.clear()
            return
        if not was_preparing:
            # An agent may have reported its state before a new operator prepares, and only once.
            for member in list(members.values()):
                if member.state is AgentState.INIT:
                    self.heard(member, now)
                elif member.broke_early and member.report is not None:
                    self.broke(member, member.report, now)
        for uid in self._untold.expire(now, TELL_SECONDS):
            if uid in members:
                self._waits.note(Obstacle(members[uid].view.name, NOT_READY, WAITS))
        self._replace(now)

    def _replace(self, now: float) -> None:
        by = self._seconds()
        for uid in () if by is None else self._since.expire(now, by):
            self._forget(uid)
            member = self._state.roster.members.get(uid)
            if member is not None and not member.condemned:
                self._recovery.never_ready(member, f"{WAITS} ({by:g} s)", now)

    def _forget(self, uid: PodUid) -> None:
        for started in (self._agents, self._since, self._untold):
            started.pop(uid, None)

    def _seconds(self) -> float | None:
        """Return the time that workers have; None: no limit."""
        state = self._state
        if state.spec is None or state.options.detectors[Detector.SILENT] is not Mode.ACT:
            return None
        policy = state.spec.run_policy
        starts = [
            rule.expected_start_cut_off_in_seconds for rule in policy.log_monitoring_configuration
        ]
        given = [policy.startup_deadline_seconds, *starts]
        return max([READY_SECONDS, *(one for one in given if one is not None)])
