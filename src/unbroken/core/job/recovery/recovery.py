"""Reaction to a fault: read its signs, stop the attempt, name the culprit, choose the rung,
replace pods.

`machine` receives a report or a loss; the first functions read the signs of a fault in it, and
change nothing. `Recovery` joins the signs to an incident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from unbroken.core.job.events import NodeName, PodName, PodPhase, PodUid
from unbroken.core.job.gang import GangStage
from unbroken.core.job.life import JobEnd, Life
from unbroken.core.job.roster import UNHEARD, Member, is_stock
from unbroken.core.job.state import JobState
from unbroken.core.job.transitions import Phase
from unbroken.core.job.watch.progress import before, own_end
from unbroken.spec.job.incident import PLANNED_MOVE, Incident, Remedy, StackGroup, Symptom
from unbroken.spec.job.types import FaultyPods, SameError
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    LEASE_OVER,
    PROCESS_RESTART,
    AgentReport,
    AgentState,
    FaultKind,
    Violation,
)

from . import decision, ladder, symptoms
from .decision import decide, repeated_error
from .incidents import OPERATOR_RESTARTED, RESTART_REQUESTED, culprit

RESTARTED = "the agent was restarted in its pod"
RESTARTED_ALL = "the agent was restarted in its pod, or has restarted its processes by itself"
"""A stock in-process agent looks the same after both (its INIT is a new one)."""
LEASE_RAN_OUT = "the lease on its workers ran out: it heard neither the operator nor all peers"
_PEER_LOST = FaultKind.PEER_LOST.value


@dataclass(frozen=True, slots=True)
class Received:
    """A report that the operator has accepted, with what is needed to read it."""

    member: Member
    report: AgentReport
    attempt: int | None
    """The attempt whose workers it describes."""
    is_same_agent: bool
    """False if another agent process was ordered to start the workers."""
    at: float
    """Time of the operator at which it came."""


def in_report(state: JobState, received: Received) -> list[Symptom]:
    """Return the signs of a fault in a report of a pod whose workers run or are being stopped."""
    if state.gang.is_training(received.member.uid):
        return _while_training(state, received)
    incident = state.incidents.open
    if state.gang.stage is GangStage.HALTED and incident is not None:
        return _while_stopping(state, incident, received)
    return []


def in_loss(state: JobState, member: Member, fault: str, text: str, at: float) -> list[Symptom]:
    """Return the sign of a fault that the loss of a pod or of its agent is; empty: it is none."""
    was_training = state.gang.stage is GangStage.HALTED and (
        member.uid in state.gang.ranks or _is_missed(state, member, fault)
    )
    # The operator's own deletions are no signs. The loss of a node is a sign even for a pod that is
    # condemned.
    is_news = not member.condemned or fault in symptoms.NODE_LOSSES
    is_part = was_training and state.incidents.open is not None and is_news
    if is_part or state.gang.is_training(member.uid):
        return [symptoms.of_pod(fault, text, member, at)]
    return []


def in_early_ends(state: JobState, found: Sequence[Symptom], now: float) -> list[Symptom]:
    """Return signs of the ranks that ended well, if a peer of theirs reports a missing rank."""
    if all(symptom.fault != _PEER_LOST for symptom in found):
        return []
    left: list[Symptom] = []
    for member in state.roster.members.values():
        if member.report is not None and member.attempt_of(member.report) == state.attempt:
            left += symptoms.of_leavers(member, member.report, now)
    return left


def is_hang(report: AgentReport) -> bool:
    """True if all that an agent complains of are log rules that hang or are slow."""
    return bool(report.faults) and all(
        fault.violation in (Violation.HANG, Violation.SLOW) for fault in report.faults
    )


def _while_training(state: JobState, received: Received) -> list[Symptom]:
    """Return the signs that the workers do not do what they were ordered to do."""
    report, member, attempt = received.report, received.member, state.attempt
    newest = report.newest_attempt
    fault, text = "", ""
    if not received.is_same_agent:
        is_kept = report.restart_mode == IN_PROCESS_RESTART
        fault, text = symptoms.AGENT_LOST, RESTARTED_ALL if is_kept else RESTARTED
    elif max(received.attempt or 0, newest or 0) > attempt:
        fault, text = OPERATOR_RESTARTED, "another operator has started a newer attempt"
    elif report.state is AgentState.FAULTED:
        is_ours = received.attempt == attempt
        return symptoms.of_workers(member, report, received.at) if is_ours else []
    elif report.state is AgentState.SHUTDOWN:
        fault, text = symptoms.AGENT_LOST, "the agent was shut down"
    elif report.state in (AgentState.READY, AgentState.STOPPING):
        is_over = is_stock(report) and member.uid not in state.gang.awaited
        if is_over or (newest is not None and newest >= attempt):
            fault, text = symptoms.STOPPED, "another program stopped the workers"
            if report.reason == LEASE_OVER:
                fault, text = symptoms.AGENT_LOST, LEASE_RAN_OUT
    elif received.attempt == attempt and not _follows_order(state, report):
        fault, text = OPERATOR_RESTARTED, "the agent follows another operator's start"
    return [symptoms.of_pod(fault, text, member, received.at)] if fault else []


def _while_stopping(state: JobState, incident: Incident, received: Received) -> list[Symptom]:
    """Return the signs that belong to the open incident, whose attempt is being stopped."""
    report, member = received.report, received.member
    if not received.is_same_agent:
        return in_loss(state, member, symptoms.AGENT_LOST, RESTARTED, received.at)
    if received.attempt != incident.attempt:
        return []
    if incident.culprit.fault == PLANNED_MOVE:
        return []  # Workers that are stopped one after another report each other as missing.
    is_missing = incident.culprit.fault == _PEER_LOST
    found = symptoms.of_leavers(member, report, received.at) if is_missing else []
    if is_missing and report.reason == LEASE_OVER:
        # Its peers noticed the end of its workers before its own report came.
        found.append(symptoms.of_pod(symptoms.AGENT_LOST, LEASE_RAN_OUT, member, received.at))
    if report.faults or report.state is AgentState.FAULTED:
        found += symptoms.of_workers(member, report, received.at)
    return found


def _is_missed(state: JobState, member: Member, fault: str) -> bool:
    """True if the loss of this node explains why a new operator did not find every rank.

    The earlier operator may have died with the node, and nobody can report which ranks trained
    there.
    """
    incident = state.incidents.open
    is_adopted = incident is not None and incident.culprit.fault == OPERATOR_RESTARTED
    return is_adopted and fault in symptoms.NODE_LOSSES and member.report is None


def _follows_order(state: JobState, report: AgentReport) -> bool:
    """True if the agent's workers meet at the address that this operator has ordered."""
    order = state.gang.order
    if order is None or report.master_addr is None:
        return True
    return (report.master_addr, report.master_port) == (order.master_addr, order.master_port)


WANTED = frozenset((PLANNED_MOVE, RESTART_REQUESTED))
"""Reasons to stop that somebody chose, while all ranks work: they may save their state first."""
FAULTY_MAX = 32
"""Pods, nodes and ranks named in the status."""
CRASHES = 3
"""Ends of a container before its agent reports, after which the pod is replaced at the cost of a
restart.

Without this limit the kubelet would start the container for ever.
"""
REPEATED = 2
"""Culprits that make a node a repeat offender."""

TRACEBACK_LINES = 12
"""Lines of the error that ended a job, in its condition."""
LAST_CHARACTERS = 200
"""Characters of a culprit's last line, in a condition."""


class Details(TypedDict, total=False):
    """The part of an incident that an examination of the ranks has found."""

    detected_at: float
    examined_at: float
    confidence: str
    blame: str
    groups: tuple[StackGroup, ...]


Suspected = Callable[[Sequence[Symptom], float], tuple[list[Symptom], Details]]
"""Returns what is suspected as another fault comes, and the details known of it."""


class Recovery:
    """Faults of one job."""

    def __init__(self, state: JobState, life: Life, suspected: Suspected) -> None:
        self._state = state
        self._life = life
        self._suspected = suspected
        self._replaced: set[PodUid] = set()
        """Healthy pods that are deleted because the remedy of the open incident replaces them."""
        self._gathered: list[Symptom] | None = None
        """Signs in reports that came together; None: signs are not being gathered."""

    def gather(self) -> None:
        """Defer decisions while reports that came together are read: a later report may name the
        cause."""
        self._gathered = []

    def decide(self, now: float) -> None:
        """Open an incident for all signs since `gather`, if there are any."""
        found, self._gathered = self._gathered, None
        self.fault(found or (), now)

    def fault(self, found: Sequence[Symptom], now: float, details: Details | None = None) -> None:
        """Take signs of one fault: the first opens an incident, the others join it."""
        state = self._state
        if not found or state.phase not in (Phase.PREPARING, Phase.TRAINING, Phase.ENDING):
            return
        incident = state.incidents.open
        if state.gang.stage is GangStage.HALTED and incident is not None:
            if state.incidents.add_signs(found):
                self._reconsider(now)
                self._harden(now)
                self._write_culprit(now)
        elif state.phase is not Phase.ENDING:
            if self._gathered is None:
                self.open(found, now, details)
            else:
                self._gathered += found

    def carry_on(self, attempt: int, now: float) -> bool:
        """End a job whose end an earlier operator has decided, including everything up to the
        attempt.

        Return False if there is no such decision.
        """
        state, incident = self._state, self._state.incidents.open
        if incident is None or ladder.rung_of(incident.remedy).starts_again:
            return False
        state.gang.halt(attempt, now, is_graceful=True)
        self._write_culprit(now)
        return True

    def open(self, found: Sequence[Symptom], now: float, details: Details | None = None) -> None:
        """Open an incident for the running or starting attempt, and stop that attempt."""
        state = self._state
        state.close_incident("failed again", now)
        self._replaced.clear()
        broken = state.attempt
        suspected, known = self._suspected(found, now)
        found = [*found, *suspected]
        found += in_early_ends(state, found, now)
        first = culprit(found)
        state.broken = (broken, first.fault)
        was = before(state.watched, now, own_end(first))
        decision = decide(state, found, was, now)
        charge = decision.charge
        if decision.suspect:
            self._leave(NodeName(decision.suspect), decision.suspicion, now)
        is_planned = all(symptom.fault == PLANNED_MOVE for symptom in found)
        if is_planned:
            remedy, reason = Remedy.POD, f"planned move; {charge.reason}"
        else:
            remedy, reason = ladder.choose(charge.remedy, charge.reason, self._lost_pods(found))
        state.incidents.open_incident(broken, found, remedy, reason, now)
        state.incidents.change(**was, **(details or known))
        state.watched.clear()
        state.retire_incidents()
        rung = ladder.rung_of(remedy)
        is_wanted = all(symptom.fault in WANTED for symptom in found)
        self._stop(rung, now, is_graceful=is_wanted or not rung.starts_again)
        state.set_budget(charge.status, _faulty(remedy, first, found))
        self._life.mark_preparing(now)
        self._write_culprit(now)
        if rung.replaces is ladder.Pods.ALL:
            self._replace_all(now)
        word = symptoms.NODE_FAULT if first.fault in symptoms.NODE_LOSSES else "Faulted"
        text = f"attempt {broken}: {symptoms.describe(first)}; {remedy.value}: {reason}"
        state.record_event(PLANNED_MOVE if is_planned else word, text, is_warning=not is_planned)

    def _stop(self, rung: ladder.Rung, now: float, *, is_graceful: bool) -> None:
        """Stop the attempt; the next one gets its number, if there will be one."""
        state, broken = self._state, self._state.attempt
        state.attempt += rung.starts_again
        is_halted = state.phase is Phase.PREPARING
        # Workers that had to end before this fault still have to end.
        is_hard = is_halted and state.gang.mode == PROCESS_RESTART
        mode = PROCESS_RESTART if is_hard else state.restart_mode()
        state.enter(Phase.PREPARING)
        state.gang.halt(broken, now, mode=mode, is_graceful=is_graceful)

    def _lost_pods(self, found: Sequence[Symptom]) -> list[PodName]:
        """Return the pods of the attempt that the fault has cost."""
        state = self._state
        condemned = [m for m in state.plan.condemned.values() if m.uid in state.gang.ranks]
        lost = dict.fromkeys(m.view.name for m in condemned)
        lost.update(dict.fromkeys(PodName(s.pod) for s in found if s.fault in symptoms.POD_LOSSES))
        return list(lost)

    def lose(self, member: Member, fault: str, text: str, now: float) -> list[Symptom]:
        """Release a pod; its loss is the sign of a fault if its workers should run."""
        state, uid = self._state, member.uid
        found = in_loss(state, member, fault, text, now)
        if member.condemned:
            return found if fault in symptoms.NODE_LOSSES else []
        state.plan.condemn(member, text, now)
        state.ranks.release(uid)
        state.gang.forget(uid)
        self.escalate(member)
        return found

    def escalate(self, member: Member) -> None:
        """Note that a pod is lost whose processes were to be restarted."""
        state, incident = self._state, self._state.incidents.open
        is_part = state.gang.stage is GangStage.HALTED and member.uid in state.gang.ranks
        higher = ladder.rung_of(incident.remedy).when_pod_lost if incident is not None else None
        if is_part and incident is not None and higher is not None:
            reason = ladder.escalated(incident.reason, [member.view.name])
            state.incidents.change(remedy=higher, reason=reason)

    def lose_all(self, members: Iterable[Member], fault: str, text: str, now: float) -> None:
        """Release pods for one reason."""
        found: list[Symptom] = []
        for member in members:
            found += self.lose(member, fault, text, now)
        self.fault(found, now)

    def judge(self, members: Sequence[Member], now: float) -> None:
        """Release the pods that have ended, are being deleted, or whose node is lost."""
        state, roster = self._state, self._state.roster
        if state.phase not in (Phase.PREPARING, Phase.TRAINING, Phase.ENDING):
            return
        state.plan.prove(members, now)
        for member in members:
            self._judge_pod(member, now)
        left = [m for m in members if roster.must_be_left(m)]
        text = "its health label or a condition says that the node must be left"
        self.lose_all(left, symptoms.NODE_FAULT, text, now)
        cut = [m for m in members if roster.is_out_of_reach(m)]
        self.lose_all(cut, symptoms.NODE_LOST, "the node is not ready", now)

    def _judge_pod(self, member: Member, now: float) -> None:
        state, view = self._state, member.view
        if view.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
            self._pod_ended(member, now)
        elif view.is_deleting:
            self.lose_all([member], symptoms.POD_DELETED, "the pod is being deleted", now)
        elif view.ends >= CRASHES and member.report is None and state.phase is Phase.PREPARING:
            self._pod_ended(member, now)
        elif view.name not in state.plan.slots and view.uid not in state.ranks.rank_of:
            self.lose_all([member], symptoms.POD_DELETED, "the job wants no pod of this name", now)

    def _pod_ended(self, member: Member, now: float) -> None:
        """Handle a pod whose containers end before they trained. It is a fault too: the pod would
        end again."""
        state, view = self._state, member.view
        text = f"{view.reason}: {view.message}" if view.reason else "its containers have ended"
        sign = symptoms.of_pod(symptoms.POD_FAILED, text, member, now)
        if member.condemned or member.uid in state.gang.completed:
            return
        is_waiting, is_repeated = state.phase is Phase.PREPARING, state.incidents.knows(sign)
        self.lose_all([member], symptoms.POD_FAILED, text, now)
        if is_waiting and self._is_settled(member):
            return
        if is_waiting and is_repeated:
            self.open([sign], now)
        elif is_waiting:
            self.fault([sign], now)

    def never_ready(self, member: Member, text: str, now: float) -> None:
        """Replace a pod whose workers do not come to their barrier, which its agent may not obey.

        The pod of a job that ends for this reason stays, with its output.
        """
        state = self._state
        sign = symptoms.of_pod(symptoms.NOT_READY, text, member, now)
        if state.incidents.knows(sign):
            self.open([sign], now)
        else:
            self.fault([sign], now)
        if state.phase is Phase.PREPARING:
            self.lose_all([member], symptoms.NOT_READY, text, now)

    def _is_settled(self, member: Member) -> bool:
        """True if this end is already handled.

        Either somebody deletes the pod already, or an earlier operator has charged the fault and
        could not write its incident.
        """
        state = self._state
        is_older = member.clear_through == UNHEARD and member.report is None
        return member.view.is_deleting or (is_older and state.is_incident_unwritten)

    def _leave(self, node: NodeName, why: str, now: float) -> None:
        """Release the job's pods on a suspected node."""
        state = self._state
        state.plan.avoid |= {node}
        for member in state.roster.on_node(node):
            if not member.condemned and member.uid in state.gang.ranks:
                self._replaced.add(member.uid)
                state.plan.condemn(member, why, now)
                state.ranks.release(member.uid)
                state.gang.forget(member.uid)

    def _reconsider(self, now: float) -> None:
        """Choose the remedy again: another first cause may be known by now, and may have come
        before."""
        state, incident = self._state, self._state.incidents.open
        assert incident is not None
        if incident.remedy is Remedy.FAIL or state.options.same_error is not SameError.STOP:
            return
        repeat = repeated_error(state, incident.signals, incident.step, now)
        if repeat is not None and repeat.is_users:
            state.incidents.change(remedy=Remedy.FAIL, reason=repeat.text)
            # The pods of a job that ends are left to its clean-up policy.
            state.plan.pardon(self._replaced)
            # Nothing of the next attempt has been started, and nothing will be.
            state.attempt = min(state.attempt, incident.attempt)
            state.set_status(restart_count=state.attempt)

    def _harden(self, now: float) -> None:
        """Stop kept processes if the restart mode no longer allows them."""
        state = self._state
        if state.gang.mode != state.restart_mode() == PROCESS_RESTART:
            state.gang.halt(state.gang.fence, now)

    def _write_culprit(self, now: float) -> None:
        """Write the culprit, as it is known now, into the condition."""
        state, incident = self._state, self._state.incidents.open
        assert incident is not None
        reason, text = symptoms.reason_of(incident.culprit), story(incident)
        state.set_condition(ConditionType.FAULTED, reason, text, now)
        state.set_status(latest_faulty=_faulty(incident.remedy, incident.culprit, incident.signals))
        if incident.remedy is Remedy.FAIL:
            failure = "RetriesExhausted"
            if decision.is_users(incident.reason):
                failure = decision.SAME_ERROR
            if decision.is_users(incident.reason) or incident.culprit.rank is None:
                text = "\n".join([text, *incident.culprit.evidence[-TRACEBACK_LINES:]])
            self._life.end(JobEnd(ConditionType.FAILED, failure, text), now)

    def _replace_all(self, now: float) -> None:
        state = self._state
        assert state.spec is not None
        policy = state.spec.run_policy.restart_policy
        most = (policy.max_num_repeat_offenders_to_avoid if policy else None) or 0
        state.plan.avoid = frozenset(self._offenders()[:most])
        for member in list(state.roster.members.values()):
            if not member.condemned:
                self._replaced.add(member.uid)
            state.plan.condemn(member, "full job restart", now)
            state.gang.forget(member.uid)
        self._life.reshape(now)

    def _offenders(self) -> list[NodeName]:
        """Return repeat offenders, the worst first; the open incident counts too."""
        state = self._state
        counts = state.incidents.offences.copy()
        incident = state.incidents.open
        if incident is not None and incident.culprit.node:
            counts[NodeName(incident.culprit.node)] += 1
        worst = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return [node for node, count in worst if count >= REPEATED]


def story(incident: Incident) -> str:
    """Return an incident's summary for a condition: culprit, remedy, the culprit's last line.

    The Incident has all of the evidence.
    """
    first = f"{symptoms.describe(incident.culprit)}; {incident.remedy.value}: {incident.reason}"
    told = incident.culprit.evidence
    if incident.examined_at is not None:
        # Most of the evidence is a stack, whose last line explains nothing.
        mark = f"{symptoms.LAST_OUTPUT}: "
        told = tuple(line.removeprefix(mark) for line in told if line.startswith(mark))
    said = next((line.strip() for line in reversed(told) if line.strip()), "")[:LAST_CHARACTERS]
    return first if not said or said in first else f"{first}; last output: {said}"


def _faulty(remedy: Remedy, first: Symptom, found: Iterable[Symptom]) -> FaultyPods:
    is_planned = first.fault == PLANNED_MOVE
    causes = [s for s in found if s.fault == first.fault and not is_planned]
    nodes = dict.fromkeys(symptom.node for symptom in causes if symptom.node)
    pods = dict.fromkeys(symptom.pod for symptom in causes if symptom.pod)
    ranks = dict.fromkeys(str(symptom.rank) for symptom in causes if symptom.rank is not None)
    return FaultyPods(
        ladder.rung_of(remedy).code,
        tuple(nodes)[:FAULTY_MAX],
        tuple(pods)[:FAULTY_MAX],
        tuple(ranks)[:FAULTY_MAX],
    )
