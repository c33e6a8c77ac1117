"""Reaction to a fault: stop the attempt, name the culprit, choose the rung, replace pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypedDict

from unbroken.core.job.events import NodeName, PodName, PodPhase, PodUid
from unbroken.core.job.gang import GangStage
from unbroken.core.job.life import JobEnd, Life
from unbroken.core.job.roster import UNHEARD, Member
from unbroken.core.job.state import JobState
from unbroken.core.job.transitions import Phase
from unbroken.core.job.watch.progress import Before, before, made
from unbroken.spec.job.incident import PLANNED_MOVE, Incident, Remedy, Signal, StackGroup
from unbroken.spec.job.types import FaultyPods, RestartStatus, SameError
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import PROCESS_RESTART, AgentReport, AgentState, FaultKind

from . import budgets, ladder, repeats, signals
from .incidents import OPERATOR_RESTARTED, RESTART_REQUESTED, UNCHARGED, culprit
from .repeats import RepeatedError

FAULTY_MAX = 32
"""Pods, nodes and ranks named in the status."""
PEER_LOST = FaultKind.PEER_LOST.value
_OF_NODES = (signals.NODE_LOST, signals.NODE_FAULT)
CRASHES = 3
"""Container ends before its agent was heard after which a pod is replaced, at the cost of a
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


Interrupted = Callable[[Sequence[Signal], float], tuple[list[Signal], Details]]


class Recovery:
    """Faults of one job."""

    def __init__(self, state: JobState, life: Life) -> None:
        self._state = state
        self._life = life
        self.interrupted: Interrupted = lambda found, now: ([], {})
        """Returns the signs that were suspected when another fault came, and the details known of
        them."""
        self._replaced: set[PodUid] = set()
        """Healthy pods that are deleted because the remedy of the open incident replaces them."""
        self._gathered: list[Signal] | None = None
        """Signs in reports that came together; None: signs are not being gathered."""

    def gather(self) -> None:
        """Defer decisions while reports that came together are read: a later report may name the
        cause."""
        self._gathered = []

    def decide(self, now: float) -> None:
        """Open an incident for all signs since `gather`, if there are any."""
        found, self._gathered = self._gathered, None
        self.fault(found or (), now)

    def fault(self, found: Sequence[Signal], now: float, details: Details | None = None) -> None:
        """Take signs of one fault: the first opens an incident, the others join it."""
        state = self._state
        if not found or state.phase not in (Phase.PREPARING, Phase.TRAINING, Phase.ENDING):
            return
        incident = state.incidents.open
        if state.gang.stage is GangStage.HALTED and incident is not None:
            if state.incidents.join(found):
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
        state.commands += state.gang.halt(attempt, now)
        self._write_culprit(now)
        return True

    def parts(self, member: Member, report: AgentReport, now: float) -> list[Signal]:
        """Return the signs that an agent reports about the broken attempt while it is being
        stopped."""
        incident = self._state.incidents.open
        if incident is None or member.attempt_of(report) != incident.attempt:
            return []
        if incident.culprit.fault == PLANNED_MOVE:
            return []  # Workers that are stopped one after another report each other as missing.
        is_missing = incident.culprit.fault == PEER_LOST
        found = signals.of_leavers(member, report, now) if is_missing else []
        if report.faults or report.state is AgentState.FAULTED:
            found += signals.of_workers(member, report, now)
        return found

    def _leavers(self, found: Sequence[Signal], attempt: int, now: float) -> list[Signal]:
        """Return signs of ranks that ended well, if a peer reports a missing rank."""
        if all(signal.fault != PEER_LOST for signal in found):
            return []
        left: list[Signal] = []
        for member in self._state.roster.members.values():
            if member.report is not None and member.attempt_of(member.report) == attempt:
                left += signals.of_leavers(member, member.report, now)
        return left

    def open(self, found: Sequence[Signal], now: float, details: Details | None = None) -> None:
        """Open an incident for the running or starting attempt, and stop that attempt."""
        state = self._state
        state.close_incident("failed again", now)
        self._replaced.clear()
        broken = state.attempt
        suspected, known = self.interrupted(found, now)
        found = [*found, *suspected, *self._leavers(found, broken, now)]
        state.broken = (broken, culprit(found).fault)
        was = before(state.watched, now)
        charged = self._weigh(self._charge(found, was, now), found, was["step"], now)
        condemned = [m for m in state.plan.condemned.values() if m.uid in state.gang.ranks]
        lost = dict.fromkeys(m.view.name for m in condemned)
        lost.update(dict.fromkeys(PodName(s.pod) for s in found if s.fault in signals.POD_LOSSES))
        is_planned = all(signal.fault == PLANNED_MOVE for signal in found)
        remedy, reason = ladder.choose(charged.remedy, charged.reason, list(lost))
        if is_planned:
            remedy, reason = Remedy.POD, f"planned move; {charged.reason}"
        state.incidents.begin(broken, found, remedy, reason, now)
        state.incidents.change(**was, **(details or known))
        state.watched.clear()
        state.retire_incidents()
        rung = ladder.rung_of(remedy)
        if rung.starts_again:
            state.attempt += 1
        is_halted = state.phase is Phase.PREPARING
        # Workers that had to end before this fault still have to end.
        is_hard = is_halted and state.gang.mode == PROCESS_RESTART
        mode = PROCESS_RESTART if is_hard else state.restart_mode()
        state.enter(Phase.PREPARING)
        through = state.attempt - 1 if rung.starts_again else broken
        state.commands += state.gang.halt(through, now, mode=mode, is_graceful=is_planned)
        faulty = _faulty(remedy, culprit(found), found)
        state.set_budget(charged.status, faulty)
        self._life.mark_preparing(now)
        self._write_culprit(now)
        if rung.replaces is ladder.Pods.ALL:
            self._replace_all(now)
        signal = culprit(found)
        word = signals.NODE_FAULT if signal.fault in _OF_NODES else "Faulted"
        text = f"attempt {broken}: {signals.describe(signal)}; {remedy.value}: {reason}"
        state.record_event(PLANNED_MOVE if is_planned else word, text, is_warning=not is_planned)

    def signs(self, member: Member, fault: str, text: str, now: float) -> list[Signal]:
        """Return the sign of a fault that the loss of a pod or of its agent is; empty: it is
        none."""
        state = self._state
        was_training = state.gang.stage is GangStage.HALTED and (
            member.uid in state.gang.ranks or self._is_missed(member, fault)
        )
        # The operator's own deletions are no signs. The loss of a node is a sign even for a pod
        # that is condemned.
        is_news = not member.condemned or fault in _OF_NODES
        is_part = was_training and state.incidents.open is not None and is_news
        if is_part or state.gang.is_training(member.uid):
            return [signals.of_pod(fault, text, member, now)]
        return []

    def _is_missed(self, member: Member, fault: str) -> bool:
        """True if the loss of this node explains why a new operator did not find every rank.

        The earlier operator may have died with the node, and nobody can report which ranks trained
        there.
        """
        incident = self._state.incidents.open
        is_adopted = incident is not None and incident.culprit.fault == OPERATOR_RESTARTED
        return is_adopted and fault in _OF_NODES and member.report is None

    def lose(self, member: Member, fault: str, text: str, now: float) -> list[Signal]:
        """Release a pod; its loss is the sign of a fault if its workers should run."""
        state, uid = self._state, member.uid
        found = self.signs(member, fault, text, now)
        if member.condemned:
            return found if fault in _OF_NODES else []
        state.objects += state.plan.condemn(member, text, now)
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
        found: list[Signal] = []
        for member in members:
            found += self.lose(member, fault, text, now)
        self.fault(found, now)

    def judge(self, members: Sequence[Member], now: float) -> None:
        """Release the pods that have ended, are being deleted, or whose node is lost."""
        state, roster = self._state, self._state.roster
        if state.phase not in (Phase.PREPARING, Phase.TRAINING, Phase.ENDING):
            return
        state.objects += state.plan.prove(members, now)
        for member in members:
            self._judge_pod(member, now)
        left = [m for m in members if roster.must_be_left(m)]
        text = "its health label or a condition says that the node must be left"
        self.lose_all(left, signals.NODE_FAULT, text, now)
        cut = [m for m in members if self._is_cut_off(m)]
        self.lose_all(cut, signals.NODE_LOST, "the node is not ready", now)

    def _judge_pod(self, member: Member, now: float) -> None:
        state, view = self._state, member.view
        if view.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
            self._pod_ended(member, now)
        elif view.is_deleting:
            self.lose_all([member], signals.POD_DELETED, "the pod is being deleted", now)
        elif view.ends >= CRASHES and member.report is None and state.phase is Phase.PREPARING:
            self._pod_ended(member, now)
        elif view.name not in state.plan.slots and view.uid not in state.ranks.rank_of:
            self.lose_all([member], signals.POD_DELETED, "the job wants no pod of this name", now)

    def _pod_ended(self, member: Member, now: float) -> None:
        """Handle a pod whose containers end before they trained. It is a fault too: the pod would
        end again."""
        state, view = self._state, member.view
        text = f"{view.reason}: {view.message}" if view.reason else "its containers have ended"
        sign = signals.of_pod(signals.POD_FAILED, text, member, now)
        if member.condemned or member.uid in state.gang.completed:
            return
        is_waiting, is_repeated = state.phase is Phase.PREPARING, state.incidents.knows(sign)
        self.lose_all([member], signals.POD_FAILED, text, now)
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
        sign = signals.of_pod(signals.NOT_READY, text, member, now)
        if state.incidents.knows(sign):
            self.open([sign], now)
        else:
            self.fault([sign], now)
        if state.phase is Phase.PREPARING:
            self.lose_all([member], signals.NOT_READY, text, now)

    def _is_settled(self, member: Member) -> bool:
        """True if this end is already handled.

        Either somebody deletes the pod already, or an earlier operator has charged the fault and
        could not write its incident.
        """
        state = self._state
        is_older = member.clear_through == UNHEARD and member.report is None
        is_unwritten = state.condition is ConditionType.FAULTED and state.incidents.open is None
        return member.view.is_deleting or (is_older and is_unwritten)

    def _is_cut_off(self, member: Member) -> bool:
        """True if the pod is out of reach together with its node.

        An agent that answers from a node that is not ready is not lost: only the node's own daemon
        is.
        """
        is_silent = bool(member.lost_why) or member.report is None
        roster = self._state.roster
        return member.is_fenced or (is_silent and roster.is_cut_off(member))

    def _charge(self, found: Sequence[Signal], was: Before, now: float) -> budgets.Charge:
        state = self._state
        assert state.spec is not None
        limits = budgets.limits(state.spec.run_policy)
        budget = state.status.restart_status or RestartStatus()
        progress = self._progress(found, was, now)
        if all(signal.fault in UNCHARGED for signal in found):
            is_asked = any(signal.fault == RESTART_REQUESTED for signal in found)
            left = budgets.waive(limits, budget, progress, is_asked=is_asked)
            return budgets.Charge(left, Remedy.PROCESS, "not charged to the budget")
        start = now if state.status.start_time is None else state.status.start_time
        charged = state.attempt - state.incidents.uncharged
        return budgets.charge(limits, budget, charged, now - start, progress)

    def _progress(self, found: Sequence[Signal], was: Before, now: float) -> str:
        """Return a description of the broken attempt's progress; empty: none.

        Steps from before a requested restart do not count: the script may be a different one.
        """
        state, earlier = self._state, self._state.closed_incidents()
        asked = [n for n, one in enumerate(earlier) if one.culprit.fault == RESTART_REQUESTED]
        running = (c for c in state.status.conditions if c.type == ConditionType.RUNNING.value)
        since = next((c.last_transition_time for c in running if c.status == "True"), now)
        # A hang shows no sign of life, and is no progress however long it takes.
        ran = (was["progress_before"] or now) - since
        return made(was["step"], found, earlier[asked[-1] + 1 if asked else 0 :], ran)

    def _repeat(
        self, found: Sequence[Signal], step: int | None, now: float
    ) -> RepeatedError | None:
        """Return the repetition of the error in this life of the job; None: it has not come
        before."""
        state = self._state
        plan = state.plan
        unusable = {*state.roster.unusable_nodes(), *plan.avoid, *plan.given_up}
        usable = state.roster.nodes.keys() - unusable
        return repeats.find_repeat(found, step, state.closed_incidents(), now, usable)

    def _weigh(
        self, charged: budgets.Charge, found: Sequence[Signal], step: int | None, now: float
    ) -> budgets.Charge:
        """Return the charge, adjusted for an error that has come before: fail the job, or leave a
        suspected node."""
        state = self._state
        repeat = self._repeat(found, step, now)
        if repeat is None or charged.remedy is Remedy.FAIL:
            return charged
        if repeat.is_users and state.options.same_error is SameError.STOP:
            budget = state.status.restart_status or RestartStatus()
            return budgets.Charge(budget, Remedy.FAIL, repeat.text)
        if repeat.suspect and charged.remedy is Remedy.PROCESS:
            self._leave(NodeName(repeat.suspect), repeat.text, now)
        return replace(charged, reason=f"{repeat.text}; {charged.reason}")

    def _leave(self, node: NodeName, why: str, now: float) -> None:
        """Release the job's pods on a suspected node."""
        state = self._state
        state.plan.avoid |= {node}
        for member in state.roster.on_node(node):
            if not member.condemned and member.uid in state.gang.ranks:
                self._replaced.add(member.uid)
                state.objects += state.plan.condemn(member, why, now)
                state.ranks.release(member.uid)
                state.gang.forget(member.uid)

    def _reconsider(self, now: float) -> None:
        """Choose the remedy again: another first cause may be known by now, and may have come
        before."""
        state, incident = self._state, self._state.incidents.open
        assert incident is not None
        if incident.remedy is Remedy.FAIL or state.options.same_error is not SameError.STOP:
            return
        repeat = self._repeat(incident.signals, incident.step, now)
        if repeat is not None and repeat.is_users:
            state.incidents.change(remedy=Remedy.FAIL, reason=repeat.text)
            # The pods of a job that ends are left to its clean-up policy.
            state.plan.pardon(self._replaced, state.objects)
            # Nothing of the next attempt has been started, and nothing will be.
            state.attempt = min(state.attempt, incident.attempt)
            state.set_status(restart_count=state.attempt)

    def _harden(self, now: float) -> None:
        """Stop kept processes if the restart mode no longer allows them."""
        state = self._state
        if state.gang.mode != state.restart_mode() == PROCESS_RESTART:
            state.commands += state.gang.halt(state.gang.fence, now)

    def _write_culprit(self, now: float) -> None:
        """Write the culprit, as it is known now, into the condition."""
        state, incident = self._state, self._state.incidents.open
        assert incident is not None
        reason, text = signals.reason_of(incident.culprit), story(incident)
        state.set_condition(ConditionType.FAULTED, reason, text, now)
        state.set_status(latest_faulty=_faulty(incident.remedy, incident.culprit, incident.signals))
        if incident.remedy is Remedy.FAIL:
            failure = "RetriesExhausted"
            if repeats.is_users(incident.reason):
                failure = repeats.SAME_ERROR
            if repeats.is_users(incident.reason) or incident.culprit.rank is None:
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
            state.objects += state.plan.condemn(member, "full job restart", now)
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
    first = f"{signals.describe(incident.culprit)}; {incident.remedy.value}: {incident.reason}"
    told = incident.culprit.evidence
    if incident.examined_at is not None:
        # Most of the evidence is a stack, whose last line explains nothing.
        mark = f"{signals.LAST_OUTPUT}: "
        told = tuple(line.removeprefix(mark) for line in told if line.startswith(mark))
    said = next((line.strip() for line in reversed(told) if line.strip()), "")[:LAST_CHARACTERS]
    return first if not said or said in first else f"{first}; it said: {said}"


def _faulty(remedy: Remedy, first: Signal, found: Iterable[Signal]) -> FaultyPods:
    is_planned = first.fault == PLANNED_MOVE
    causes = [s for s in found if s.fault == first.fault and not is_planned]
    nodes = dict.fromkeys(signal.node for signal in causes if signal.node)
    pods = dict.fromkeys(signal.pod for signal in causes if signal.pod)
    ranks = dict.fromkeys(str(signal.rank) for signal in causes if signal.rank is not None)
    return FaultyPods(
        ladder.rung_of(remedy).code,
        tuple(nodes)[:FAULTY_MAX],
        tuple(pods)[:FAULTY_MAX],
        tuple(ranks)[:FAULTY_MAX],
    )
