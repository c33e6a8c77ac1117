"""The machine of one job, from the first JobSeen to its end.

Feed `step`, carry out the effects it returns in order, and step `Tick` at `deadline()`. No order is
given before `JobSeen` and `Synced`.

This module turns events into facts and signs; `life`, `recovery` and `adoption` decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.core.job.record.conditions import ENDS
from unbroken.core.job.record.history import HistorySender
from unbroken.core.job.record.receipts import Receipts
from unbroken.core.job.recovery.incidents import RESTART_REQUESTED
from unbroken.core.job.recovery.recovery import Recovery
from unbroken.core.job.watch.examination import Examination, Stragglers
from unbroken.core.job.watch.hangs import Hangs
from unbroken.core.job.watch.stalls import Stalls
from unbroken.core.tick import Tick
from unbroken.spec.job.incident import Symptom
from unbroken.spec.job.types import JobSpec, JobStatus, Switch
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import AgentReport, AgentState, FaultKind

from .adoption import Adoption
from .clocks import translated
from .deadlines import earliest
from .events import (
    AgentLost,
    AgentReported,
    AgentsTooLarge,
    EvidenceReceived,
    FenceProven,
    IncidentSeen,
    JobEffect,
    JobEvent,
    JobSeen,
    LedgerWritten,
    NodeGone,
    NodeSeen,
    PodGone,
    PodHeld,
    PodName,
    PodPhase,
    PodRefused,
    PodSeen,
    PodUid,
    PodView,
    Synced,
)
from .gang import GangStage
from .kueue import Gate, Hold, moved
from .leases import Leases
from .life import START_SECONDS, STOP_SECONDS, JobEnd, Life
from .moves import Moves, Spares
from .recovery import recovery, symptoms
from .recovery.recovery import Details, Received
from .roster import of_ranks
from .state import JobState
from .transitions import Phase
from .waiting import Unanswered, Unstarted, Waits

AGENT_BACK_SECONDS = 20.0
"""Seconds that an agent may be away, with pod and node healthy, before its pod is replaced."""

AGENTS_TOO_LARGE = "AgentReportsTooLarge"
"""Reason of a job that failed because its agents' reports need too much memory."""

_LIVE = (Phase.PREPARING, Phase.TRAINING)
_WELL = (AgentState.RUNNING, AgentState.COMPLETED)


class Job:
    """One job.  `status` is what was found in the API at the start."""

    def __init__(self, name: str, status: JobStatus) -> None:
        self.state = JobState(name, status)
        self._life = Life(self.state)
        self._recovery = Recovery(self.state, self._life, self._suspected)
        self._adoption = Adoption(self.state, self._life, self._recovery)
        self._hangs = Hangs(self.state)
        self._stalls = Stalls(self.state)
        self._receipts = Receipts(self.state)
        self._history = HistorySender(self.state)
        self._spares = Spares(self.state)
        self._leases = Leases(self.state)
        self._waits = Waits(self.state)
        self._unstarted = Unstarted(self.state, self._recovery, self._waits)
        self._unanswered = Unanswered(self.state, self._recovery)
        self._examination = Examination(self.state, self._recovery, self._stalls)
        self._moves = Moves(self.state, self._recovery, self._spares)
        self._stragglers = Stragglers(self.state, self._stalls)
        self._is_synced = False
        self._last_asked: float | None = None
        self._is_asked = False
        self._too_large = ""
        """Message of the failure when agents' reports are too large; empty: they are not."""

    @property
    def status(self) -> JobStatus:
        """Status of the job, to be written."""
        return self.state.status

    @property
    def attempt(self) -> int:
        """The attempt that runs, or is to start next."""
        return self.state.attempt

    @property
    def phase(self) -> Phase:
        """Phase of the job."""
        return self.state.phase

    @property
    def is_idle(self) -> bool:
        """True if nothing of the job exists, and only a new event can change that."""
        return self.phase in (Phase.SUSPENDED, Phase.ENDED) and not self.state.roster.members

    def step(self, event: JobEvent, now: float) -> list[JobEffect]:
        """Take one event; return what must be done, in order."""
        return self.steps((event,), now)

    def steps(self, events: Sequence[JobEvent], now: float) -> list[JobEffect]:
        """Take events that came together; all but the last are AgentReported.

        Their consequences are evaluated once: half of the work with thousands of agents.
        """
        state = self.state
        if state.phase is Phase.DELETED:
            return []
        self._recovery.gather()
        for event in events:
            if not isinstance(event, AgentReported):
                self._recovery.decide(now)
            self._take(event, now)
        self._recovery.decide(now)
        if self._is_awake():
            self._find_attempt(now)
            self._find_faults(now)
            self._start_or_move(now)
            self._conclude(now)
        self.check()
        return state.flush()

    # These four need their order: a fault concerns the attempt that was found, a start or a move
    # follows what a fault has decided, and the last one tells the result. Within one of them the
    # order matters only where it says so.

    def _find_attempt(self, now: float) -> None:
        """Find out which attempt runs, and which workers have ended with their lease."""
        self._end_leases(now)
        if self._adoption.advance(now):
            self._receipts.adopt(now)
            self._end_leases(now)  # some of the attempt that was found may have run out

    def _find_faults(self, now: float) -> None:
        """Find the faults that no report names, and the end that they bring."""
        self._follow_request(now)
        self._recovery.fault(self._stalls.faults(now), now)
        # These two look at what the stalls have noted.
        self._recovery.fault(self._stragglers.advance(now), now)
        self._examination.advance(now)
        self._unstarted.advance(now)
        self._unanswered.advance(now)
        self._pass_time(now)
        if self._too_large and self.state.phase in _LIVE:
            verdict = JobEnd(ConditionType.FAILED, AGENTS_TOO_LARGE, self._too_large)
            self._life.end(verdict, now)

    def _start_or_move(self, now: float) -> None:
        """Start the attempt if all is ready for it, and leave nodes that will go."""
        self._moves.advance(now)
        self._life.advance(now)

    def _conclude(self, now: float) -> None:
        """Tell what this step has led to, and resume a job whose old pods are gone."""
        self._receipts.advance(now)
        self.state.commands += self._spares.advance(now)
        self.state.commands += self._history.advance(now)
        self._stalls.close()
        self._resume_if_clean(now)
        self._waits.advance(now)

    def _suspected(self, found: Sequence[Symptom], now: float) -> tuple[list[Symptom], Details]:
        """Return what an examination suspects, which these symptoms of another fault end."""
        return self._examination.interrupted(found, now)

    def _is_awake(self) -> bool:
        return self.state.phase not in (Phase.UNKNOWN, Phase.DELETED)

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None: time changes nothing."""
        state = self.state
        if state.phase in (Phase.UNKNOWN, Phase.DELETED):
            return None
        return earliest(
            state.gang.deadline(),
            state.plan.deadline(),
            self._adoption.deadline(),
            self._life.deadline(),
            self._examination.deadline(),
            self._stragglers.deadline(),
            self._stalls.deadline(),
            self._receipts.deadline(),
            self._spares.deadline(),
            self._waits.deadline(),
            self._unstarted.deadline(),
            self._unanswered.deadline(),
            self._leases.deadline(),
            self._moves.deadline(),
            state.lost.deadline(AGENT_BACK_SECONDS) if state.phase in _LIVE else None,
        )

    def check(self) -> None:
        """Invariants; cheap enough to stay on in production."""
        state = self.state
        state.gang.check()
        assert len(state.ranks.pod_of) == len(state.ranks.rank_of) <= state.nnodes
        if state.phase is Phase.TRAINING:
            assert state.gang.stage is not GangStage.HALTED
        if state.phase in (Phase.PREPARING, Phase.SUSPENDED, Phase.ENDING):
            assert state.gang.stage is GangStage.HALTED

    def _take(self, event: JobEvent, now: float) -> None:
        match event:
            case AgentReported(pod, report):
                self._agent_reported(pod, report, now)
            case AgentLost() | EvidenceReceived() | AgentsTooLarge():
                self._take_agent(event, now)
            case PodSeen() | PodGone() | PodRefused() | PodHeld():
                self._take_pod(event, now)
            case NodeSeen() | NodeGone():
                self._node_changed(event, now)
            case FenceProven(pod):
                self._fence_proven(pod, now)
            case JobSeen():
                self._job_seen(event, now)
            case IncidentSeen() | LedgerWritten():
                self._take_record(event)
            case Synced():
                self._is_synced = True
                self._leases.begin(now)
                self._begin(now)
            case Tick():
                pass

    def _take_record(self, event: IncidentSeen | LedgerWritten) -> None:
        match event:
            case IncidentSeen(incident):
                self.state.incidents.remember(incident)
            case LedgerWritten(ledger):
                self.state.ledger_written(ledger)

    def _take_agent(self, event: AgentLost | EvidenceReceived | AgentsTooLarge, now: float) -> None:
        match event:
            case AgentLost(pod, why, silent_seconds):
                self._leases.lost(pod, silent_seconds, now)
                self._agent_lost(pod, why, now)
            case EvidenceReceived(pod, evidence):
                self._examination.answered(pod, evidence)
                if self._stragglers.question is not None:
                    self._stragglers.question.take(pod, evidence)
            case AgentsTooLarge():
                largest = self.state.roster.members.get(event.largest or PodUid(""))
                self._too_large = event.text(largest.view.name if largest else None)

    def _take_pod(self, event: PodSeen | PodGone | PodRefused | PodHeld, now: float) -> None:
        match event:
            case PodSeen(view):
                self._pod_seen(view, now)
            case PodGone(_, uid):
                self._pod_gone(uid, now)
            case PodRefused():
                self._pod_refused(event, now)
            case PodHeld(uid, reason, message):
                member = self.state.roster.members.get(uid)
                self._waits.held(member, reason, message)
                if member is not None:
                    self._unanswered.see(member, now)

    def _job_seen(self, event: JobSeen, now: float) -> None:
        state, old = self.state, self.state.spec
        state.spec, state.options = event.spec, event.options
        state.buddies.is_on = event.options.buddy is Switch.ON
        gate, state.gate = state.gate, event.gate
        if old is None:
            state.find_ledger(event.ledger)
        if event.is_deleting:
            state.enter(Phase.DELETED)
            return
        self._note_request(event.options.restart)
        if state.phase is Phase.UNKNOWN:
            self._begin(now)
            return
        is_live = state.phase in (*_LIVE, Phase.ADOPTING)
        if is_live and old is not None and _shape(old) != _shape(event.spec):
            text = "replicaSpecs and nprocPerNode take effect at the next full start of the job"
            state.record_event("SpecChanged", text, is_warning=True)
        if state.hold is not None and is_live:
            self._suspend(state.hold, now)
        elif state.phase in _LIVE:
            self._move_waiting(gate, now)

    def _begin(self, now: float) -> None:
        state = self.state
        if not self._is_synced or state.spec is None or state.phase is not Phase.UNKNOWN:
            return
        self._is_asked = self._last_asked is not None and self._last_asked > self._followed_until()
        if state.condition in ENDS:
            state.enter(Phase.ENDED)
            self._life.clean(now)
        elif state.hold is not None:
            self._suspend(state.hold, now)
        elif state.condition in (None, ConditionType.SUSPENDED) and not state.roster.members:
            self._life.create(now)
        else:
            self._adoption.begin(now)

    def _suspend(self, hold: Hold, now: float) -> None:
        state = self.state
        heard = [m.report.newest_attempt or 0 for m in state.roster.members.values() if m.report]
        if state.phase in (Phase.UNKNOWN, Phase.ADOPTING):
            state.attempt = max([state.attempt, *heard])
            state.gang.halt(state.attempt, now, is_graceful=True)
        if state.condition is None:
            state.set_condition(ConditionType.CREATED, "Created", "job is created", now)
            if state.gate is not hold:
                hold = Hold("JobInitiallySuspended", "the job begins suspended")
        self._life.end(JobEnd(ConditionType.SUSPENDED, hold.reason, hold.message), now)

    def _resume_if_clean(self, now: float) -> None:
        """Resume once every old pod is gone: the attempt may then have the same number."""
        state = self.state
        if state.phase is not Phase.SUSPENDED:
            return
        if state.hold is not None:
            self._life.hold(state.hold, now)
        elif not state.roster.members:
            self._life.create(now)

    def _move_waiting(self, old: Gate, now: float) -> None:
        """Recreate the pods that wait for a node which Kueue no longer assigns to them."""
        state = self.state
        for member in list(state.roster.members.values()):
            view = member.view
            if view.node is None and moved(old, state.gate, view.replica_spec, view.index):
                text = "Kueue has given it another place"
                state.plan.condemn(member, text, now)

    def _note_request(self, asked: float | None) -> None:
        """Remember a request to restart until it can be followed, if it is a new one."""
        if asked is None or (self._last_asked is not None and asked <= self._last_asked):
            return
        self._last_asked, self._is_asked = asked, True

    def _followed_until(self) -> float:
        """Return the time up to which requests were followed, or failed, before this operator."""
        status = self.state.status
        # The status is written before the incident, which may have been lost.
        began = [
            c.last_transition_time
            for c in status.conditions
            if c.type == ConditionType.RUNNING.value or c.reason == RESTART_REQUESTED
        ]
        return max([status.start_time or 0.0, self.state.incidents.last_request, *began])

    def _follow_request(self, now: float) -> None:
        """Restart on request, unless an earlier operator has followed it."""
        state, asked = self.state, self._last_asked
        if not self._is_asked or asked is None or state.phase is Phase.ADOPTING:
            return
        self._is_asked = False
        is_recovering = state.phase is Phase.PREPARING and state.incidents.open is not None
        if state.phase is Phase.TRAINING or is_recovering:
            text = "a restart was asked for"
            self._recovery.fault([Symptom(asked, RESTART_REQUESTED, text)], now)
        else:
            text = f"nothing runs to be restarted: the job is {state.phase.value.lower()}"
            state.record_event("RestartIgnored", text)

    def _agent_reported(self, uid: PodUid, report: AgentReport, now: float) -> None:
        state = self.state
        member = state.roster.members.get(uid)
        if member is None:
            return
        if (other := state.roster.other_with(member, report)) is not None:
            self._waits.shared(member.view, other.view)
            return
        self._leases.answered(uid)
        self._unanswered.forget(uid)
        member.clock.hear(report, now)
        report = translated(report, member.clock.correction)
        if report.watch and report is not member.report:
            report = of_ranks(report, state.nnodes, state.spec.nnodes if state.spec else 0)
        before, was_ordered = member.report, member.ordered is not None
        was_stopped, was_away = member.was_stopped(report), bool(member.lost_why)
        state.has_changed |= was_away or (before is not report and before != report)
        if not member.accept(report):
            return
        self._spares.note_imports(before, report, was_away, now)
        self._history.note(member)
        state.lost.pop(uid, None)
        for attempt in (report.newest_attempt, report.attempt):
            if attempt is not None and attempt > state.newest_seen:
                state.newest_seen = attempt
        self._adoption.answered(uid)
        if state.phase in (Phase.UNKNOWN, Phase.ADOPTING):
            return
        self._life.clean_pod(member, now)
        self._life.unheard.pop(uid, None)
        if state.phase is Phase.PREPARING and report.rank is not None and not member.condemned:
            state.ranks.restore(member, report.rank)  # reported only after the adoption
        unclear = len(state.gang.unclear)
        state.gang.observe(member, now)
        # A stock agent's answer to a stop repeats its earlier state, and yet is a proof.
        state.has_changed |= unclear != len(state.gang.unclear)
        self._unstarted.heard(member, now)
        is_same = was_stopped or (before is not None and before.agent_id == report.agent_id)
        of, is_same = member.attempt_of(report), is_same or not was_ordered
        received = Received(member, report, of, is_same, now)
        self._note_progress(received)
        self._take_signs(received)

    def _note_progress(self, received: Received) -> None:
        """Note what the ranks of the running attempt report about themselves."""
        state, member, report = self.state, received.member, received.report
        is_part = state.gang.stage is not GangStage.HALTED and member.uid in state.gang.ranks
        if is_part and received.attempt == state.attempt:
            state.watched[member.uid] = report.watch or state.watched.get(member.uid, ())
            self._stalls.note_ranks(member.uid, report, received.at)
            self._receipts.note_steps(member.uid, report, received.at)
            self._examination.note_peers(member, report, received.at)

    def _take_signs(self, received: Received) -> None:
        """Join the signs of a fault in a report to an incident, or look at what they suspect."""
        state, member, report, now = self.state, received.member, received.report, received.at
        is_early = state.gang.stage is GangStage.HALTED and member.broke_early
        if is_early:
            self._unstarted.broke(member, report, now)
        found = [] if is_early else recovery.in_report(state, received)
        is_rule = all(one.fault == FaultKind.LOG_RULE.value for one in found)
        is_suspicion = state.gang.is_training(member.uid) and is_rule and recovery.is_hang(report)
        self._recovery.fault([] if is_suspicion else found, now)
        if state.gang.is_training(member.uid) and report.state in _WELL:
            self._life.progressed(report, now)
        suspected = self._hangs.signs(member, report, now)
        self._examination.suspect([*found, *suspected] if is_suspicion else suspected, now)

    def _agent_lost(self, uid: PodUid, why: str, now: float) -> None:
        state = self.state
        member = state.roster.members.get(uid)
        if member is None or member.report is None or member.lost_why:
            return  # an agent that was never reached is waited for: it may still be starting
        member.lose(why)
        state.lost[uid] = now
        self._adoption.answered(uid)
        if state.phase in (Phase.UNKNOWN, Phase.ADOPTING):
            return
        state.gang.observe(member, now)
        if state.roster.is_cut_off(member):
            self._recovery.lose_all([member], symptoms.NODE_LOST, why, now)
        else:
            why = member.lost_why
            found = recovery.in_loss(state, member, symptoms.AGENT_LOST, why, now)
            self._recovery.fault(found, now)

    def _pod_seen(self, view: PodView, now: float) -> None:
        state = self.state
        older = state.roster.named(view.name)
        member = state.roster.see_pod(view)
        if member is None:
            return
        if older is not None and older.uid != view.uid:
            self._pod_gone(older.uid, now)  # a name has one pod at a time
        state.plan.occupied(member)
        self._leases.seen(member)
        state.has_changed = True
        if state.phase in (Phase.UNKNOWN, Phase.ADOPTING):
            self._unanswered.see(member, now)
            return
        state.gang.observe(member, now)
        if view.phase is not PodPhase.SUCCEEDED and member.report is None:
            self._waits.see(view, now)
        self._unanswered.see(member, now)
        self._life.clean_pod(member, now)
        self._recovery.judge([member], now)
        state.plan.ended(member)

    def _pod_gone(self, uid: PodUid, now: float) -> None:
        state = self.state
        member = state.roster.members.get(uid)
        found = []
        if member is not None:
            text = "the pod is gone"
            found = recovery.in_loss(state, member, symptoms.POD_DELETED, text, now)
            self._recovery.escalate(member)
        state.roster.remove_pod(uid)
        self._adoption.answered(uid)
        self._leases.answered(uid)
        self._unanswered.forget(uid)
        state.lost.pop(uid, None)
        if member is None:
            return
        state.has_changed = True
        self._waits.forget(member.view)
        state.ranks.release(uid)
        state.gang.forget(uid)
        state.plan.vacated(member)
        self._recovery.fault(found, now)
        if state.phase in _LIVE:
            state.plan.create(now, [member.view.name])

    def _pod_refused(self, event: PodRefused, now: float) -> None:
        state = self.state
        if event.reason != "AlreadyExists":
            self._waits.refused(event.name, event.reason)
        text = f"pod {event.name} cannot be created: {event.reason}"
        if event.is_final and state.phase is Phase.PREPARING and self._is_needed(event.name):
            self._life.end(JobEnd(ConditionType.FAILED, "PodRefused", text), now)

    def _is_needed(self, name: PodName) -> bool:
        """True if the job cannot start without the pod: it is not one that would be spare."""
        state, slot = self.state, self.state.plan.slots.get(name)
        if slot is None:
            return False
        views = [m.view for m in state.roster.members.values() if not m.condemned]
        others = sum(view.replica_spec == slot.replica_spec for view in views)
        return any(others < one.replicas for one in state.shape if one.name == slot.replica_spec)

    def _node_changed(self, event: NodeSeen | NodeGone, now: float) -> None:
        state, roster = self.state, self.state.roster
        if isinstance(event, NodeGone):
            name = event.name
            roster.remove_node(name)
        else:
            name = event.node.name
            if roster.nodes.get(name) == event.node:
                return
            roster.see_node(event.node)
        members = roster.on_node(name)
        if state.phase is Phase.UNKNOWN:
            return
        state.plan.prove(members, now)
        if state.phase is Phase.ADOPTING:
            return
        state.has_changed = True
        for member in members:
            state.gang.observe(member, now)
        state.plan.retry_deletions(members, now)
        self._recovery.judge(members, now)

    def _fence_proven(self, uid: PodUid, now: float) -> None:
        state = self.state
        member = state.roster.members.get(uid)
        if member is None or member.is_fenced:
            return
        member.is_fenced = True
        if state.phase in (Phase.UNKNOWN, Phase.ADOPTING):
            return
        state.has_changed = True
        state.gang.observe(member, now)
        state.plan.retry_deletions([member], now)
        self._recovery.judge([member], now)

    def _end_leases(self, now: float) -> None:
        """Release the pods whose workers have ended as their leases ran out."""
        state = self.state
        for member in self._leases.over(now):
            state.has_changed = True
            state.gang.observe(member, now)
            if member.view.node is not None:
                state.plan.give_up(member.view.node, now)
            state.plan.retry_deletions([member], now)
            if state.phase in _LIVE:
                why = f"{member.lost_why or 'its agent was never heard'}, and its lease is over"
                self._recovery.lose_all([member], symptoms.AGENT_LOST, why, now)
        if state.phase is not Phase.ADOPTING:
            self._leases.free_names(now)

    def _pass_time(self, now: float) -> None:
        state = self.state
        state.gang.tick(now)
        state.plan.tick(now)
        state.plan.free(now)
        if state.phase in (*_LIVE, Phase.ENDED):
            self._life.overdue(now)
        if state.phase not in _LIVE:
            return
        for uid in state.lost.expire(now, AGENT_BACK_SECONDS):
            if uid not in state.gang.completed:
                member = state.roster.members[uid]
                why = f"{member.lost_why}, and is not back after {AGENT_BACK_SECONDS:g} s"
                self._recovery.lose_all([member], symptoms.AGENT_LOST, why, now)
        if state.phase is Phase.PREPARING:
            stuck = [state.roster.members[uid] for uid in state.gang.stuck(now, STOP_SECONDS)]
            text = f"the workers have not ended within {STOP_SECONDS:g} s"
            self._recovery.lose_all(stuck, symptoms.STOP_TIMEOUT, text, now)
        if self._life.is_start_overdue(now):
            waiting = [state.roster.members[uid] for uid in state.gang.awaited]
            text = f"the agent has not started its workers within {START_SECONDS:g} s"
            fault = symptoms.START_TIMEOUT
            self._recovery.fault([symptoms.of_pod(fault, text, m, now) for m in waiting], now)


def _shape(spec: JobSpec) -> tuple[object, ...]:
    return (spec.replica_specs, spec.nproc_per_node)
