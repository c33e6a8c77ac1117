"""Pods of the attempt whose agents cannot connect to another pod's agent, while the operator
reaches both: the network between them is broken, or closed.

Its questions to agents serve all looks: what do your ranks do, and which agents do you reach?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from unbroken.core.job.events import AskAgent, PodUid
from unbroken.core.job.gang import GangStage, StartOrder
from unbroken.core.job.pods import Probe
from unbroken.core.job.roster import Member, address_of, is_stock
from unbroken.core.job.state import JobState
from unbroken.wire.agent import AgentReport, parent_of
from unbroken.wire.observation import PEERS_MAX, CollectCommand, Evidence, RankEvidence

from .progress import first_step

GRACE_SECONDS = 0.5
"""Seconds for the answers to arrive, in addition to the agents' time."""
SPARES_MAX = 8
"""Spares that are asked."""


@dataclass(slots=True)
class Question:
    """A question that was sent, and the answers so far."""

    request: int
    attempt: int
    by: float
    """Time after which missing answers are not awaited any more."""
    awaited: set[PodUid]
    answers: dict[PodUid, Evidence] = field(default_factory=dict)

    def take(self, uid: PodUid, evidence: Evidence) -> None:
        """Take an agent's answer, unless it is one to another question."""
        if (evidence.request, evidence.attempt) == (self.request, self.attempt):
            self.answers.setdefault(uid, evidence)
            self.awaited.discard(uid)

    def is_over(self, state: JobState, now: float) -> bool:
        """True if all have answered that still can, or the time is up."""
        members = state.roster.members
        gone = [uid for uid in self.awaited if uid not in members or members[uid].lost_why]
        self.awaited.difference_update(gone)
        return not self.awaited or now >= self.by

    def ranks(self) -> dict[int, RankEvidence]:
        """Return the observations by rank."""
        return {one.rank: one for told in self.answers.values() for one in told.ranks}


def ask(state: JobState, seconds: float, now: float, samples_per_second: int = 0) -> Question:
    """Ask all agents that can answer; they have `seconds` for it."""
    asked = [uid for uid in state.gang.ranks if _can_answer(state, uid)]
    command = CollectCommand(_number(state, now), state.attempt, seconds, samples_per_second)
    return _send(state, command, asked, now)


def spares_to_ask(state: JobState) -> list[PodUid]:
    """Return the pods without a rank that can be asked which agents they reach."""
    members, ranks = state.roster.members.items(), state.gang.ranks
    spares = (uid for uid, member in members if uid not in ranks and not member.condemned)
    return sorted(uid for uid in spares if _can_answer(state, uid))[:SPARES_MAX]


def ask_spares(state: JobState, peers: Iterable[str], seconds: float, now: float) -> Question:
    """Ask the agents of spare pods which of these agents they reach."""
    asked = spares_to_ask(state)
    peers = tuple(peers)[:PEERS_MAX]
    command = CollectCommand(_number(state, now), state.attempt, seconds, peers=peers)
    return _send(state, command, asked, now)


def _number(state: JobState, now: float) -> int:
    """Return the number of the next question. An earlier operator may have asked too; its questions
    have lower numbers."""
    state.questions = max(state.questions + 1, int(now * 1000))
    return state.questions


def _send(state: JobState, command: CollectCommand, to: Collection[PodUid], now: float) -> Question:
    state.commands += [AskAgent(uid, command) for uid in sorted(to)]
    by = now + command.seconds + GRACE_SECONDS
    return Question(command.request, command.attempt, by, set(to))


def _can_answer(state: JobState, uid: PodUid) -> bool:
    member = state.roster.members.get(uid)
    if member is None or member.report is None or member.lost_why:
        return False
    return uid not in state.gang.completed and not is_stock(member.report)


NOT_REACHABLE = "PeersNotReachable"
"""Agents of two pods cannot connect to each other, while the operator reaches both."""
ANSWER_SECONDS = 3.0
"""Seconds for the spares to answer; a connection is given 2 s."""
PROBE_SECONDS = 8.0
"""Seconds for a probe to start and to answer. On a node that has its image it takes 4 s
(`benchmarks/node_loss.py`)."""
PROBE_KEPT_SECONDS = 30.0
"""Seconds for which it is kept after that: a pod may still have to be replaced."""
EVENTS_MAX = 3
"""Events of one attempt: a closed port is closed for all pods."""


class Unreached:
    """Reports of the agents of one job about it, in the attempt that runs.

    If two pods only miss each other, either may be the cause. So the spares are asked which of the
    two they reach. A job of two pods without spares gets one more pod for it, the probe, which
    replaces the one that is cut off.
    """

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._order: StartOrder | None = None
        """The start of the attempt that is watched. A resumed job may use a number again."""
        self._events = 0
        self._since: dict[PodUid, float] = {}
        """Since when pods say that they cannot connect to their parent, the longest first."""
        self._others: dict[PodUid, int] = {}
        """Pods at the other end when one was let go, and the attempt: it may have been they."""
        self._question: Question | None = None
        """The question to the spares, with their answers; None: they were not asked."""
        self._probe_by: float | None = None
        """Time until which a probe may answer; None: there is none."""

    @property
    def since(self) -> float | None:
        """Since when a pod does not reach another one; None: all do, or no attempt runs."""
        order = None if self._state.gang.stage is GangStage.HALTED else self._order
        if order is None or order.attempt != self._state.attempt:
            return None
        return next(iter(self._since.values()), None)

    def take(self, member: Member, report: AgentReport, now: float) -> None:
        """Take what an agent of the attempt that runs says."""
        is_next = self._others and self._state.attempt not in self._others.values()
        # Steps need all ranks. Output proves nothing: a rank that waits for the others may write.
        if is_next and first_step(report.watch) is not None:
            self._others.clear()  # Who was let go was the one.
        if not report.unreached and not self._since:
            return
        self._begin(now)
        if not report.unreached:
            self._since.pop(member.uid, None)
        elif member.uid not in self._since and self._parent(member.uid) is not None:
            self._since[member.uid] = now
            self._events += 1
            if self._events <= EVENTS_MAX:
                self._state.record_event(NOT_REACHABLE, self._text(member), is_warning=True)
                self._question = ask_spares(self._state, self._ends(), ANSWER_SECONDS, now)

    def _begin(self, now: float) -> None:
        """Collect the agents' reports again when another attempt runs: a new operator gets them
        before it knows the attempt."""
        order = self._state.gang.order
        if order is None or order is self._order:
            return
        self._order, self._events = order, 0
        self._since.clear()
        self._question = self._probe_by = None
        for member, report in self._state.gang.reports():
            self.take(member, report, now)

    def answered(self, uid: PodUid, evidence: Evidence) -> None:
        """Take which of the pods a spare does not reach."""
        if self._question is not None:
            self._question.take(uid, evidence)

    def advance(self, now: float) -> None:
        """Ask spares, and the probe, as soon as they can answer; give a probe up that is of no
        use."""
        self._begin(now)
        plan, by = self._state.plan, self._probe_by
        if by is None or self.since is None:
            plan.probe = self._probe_by = None
        elif now >= by + PROBE_KEPT_SECONDS:
            plan.probe = None
        is_untold = self.since is not None and self._is_answered(now) is False
        if is_untold and spares_to_ask(self._state):
            self._question = ask_spares(self._state, self._ends(), ANSWER_SECONDS, now)

    def want_probe(self, now: float) -> None:
        """Want a probe if nobody else can tell which of two pods is cut off."""
        if self._probe_by is not None or self._is_answered(now) is not False:
            return
        state, found = self._state, self.worst()
        if found is None:
            return
        kind = found[0].view.replica_spec
        has_spares = any(spec.spares for spec in state.shape if spec.name == kind)
        # In a larger job, others reach the pod at the other end, unless it is the one cut off.
        if state.nnodes > 2 or has_spares or not state.may_add_pods:
            return
        members = state.roster.members
        nodes = (members[uid].view.node for uid in state.gang.ranks if uid in members)
        state.plan.probe = Probe(kind, frozenset(node for node in nodes if node is not None))
        self._probe_by = now + PROBE_SECONDS
        text = "one more pod is started, which will see which of the two it reaches"
        state.record_event(NOT_REACHABLE, f"{found[1]}; {text}")

    def is_probing(self, now: float) -> bool:
        """Return whether a probe may still answer."""
        is_open = self._probe_by is not None and now < self._probe_by
        return is_open and not self._is_answered(now)

    def _is_answered(self, now: float) -> bool | None:
        """Return whether spares have told what they reach: False if none was there or in time;
        None while an answer may still come."""
        question = self._question
        if question is None or not question.is_over(self._state, now):
            return None
        return bool(question.answers)

    def worst(self) -> tuple[Member, str] | None:
        """Return the pod that most pods do not reach, or that reaches none, and the text about it.

        If two pods only miss each other, and spares do not tell, it is the one that was at the
        other end in the attempt before, or else the pod with the higher rank.
        """
        members, counts = self._state.roster.members, Counter[PodUid]()
        for uid in self._since:
            parent = self._parent(uid)
            counts.update([uid] if parent is None else [uid, parent.uid])
        ranks = self._state.gang.ranks
        known = [uid for uid in counts if uid in members and uid in ranks]
        if not known:
            return None
        by_spares = self._missed_by_spares()
        counts.update(by_spares)
        before = self._state.attempt - 1
        others = {uid for uid in known if self._others.get(uid) == before}
        worst = max(known, key=lambda uid: (counts[uid], uid in others, ranks[uid]))
        # The pod whose agent says so: this one, or one that connects to it.
        below = (
            uid for uid in self._since if uid in members and self._parent(uid) is members[worst]
        )
        named = worst if worst in self._since else next(below, worst)
        text = self._text(members[named])
        if by_spares[worst] > min(by_spares[uid] for uid in known):
            text += f"; a third pod does not reach {members[worst].view.name} either"
        return members[worst], text

    def let_go(self, member: Member) -> None:
        """Note the other ends of a pod that is let go because of this. A probe that has a place
        replaces it."""
        ends = {uid: self._parent(uid) for uid in self._since}
        pairs = [{uid, parent.uid} for uid, parent in ends.items() if parent is not None]
        others = set[PodUid]().union(*(pair for pair in pairs if member.uid in pair))
        self._others = dict.fromkeys(others - {member.uid}, self._state.attempt)
        plan, ranks = self._state.plan, self._state.gang.ranks
        beside = (one for uid, one in self._state.roster.members.items() if uid not in ranks)
        if plan.probe is not None and any(_could_replace(one, member) for one in beside):
            plan.unwant(member)
        plan.probe = self._probe_by = None

    def _ends(self) -> dict[str, PodUid]:
        """Return the pods at both ends, by the addresses of their agents."""
        members = self._state.roster.members
        pods = [member for uid in self._since if (member := members.get(uid)) is not None]
        pods += [parent for uid in self._since if (parent := self._parent(uid)) is not None]
        return {address: one.uid for one in pods if (address := address_of(one))}

    def _missed_by_spares(self) -> Counter[PodUid]:
        answers = () if self._question is None else self._question.answers.values()
        ends = self._ends()
        return Counter(ends[one] for told in answers for one in told.unreached if one in ends)

    def _parent(self, uid: PodUid) -> Member | None:
        state = self._state
        rank = state.gang.ranks.get(uid)
        above = None if rank is None else parent_of(rank)
        pod = None if above is None else state.ranks.pod_of.get(above)
        return None if pod is None else state.roster.members.get(pod)

    def _text(self, member: Member) -> str:
        parent = self._parent(member.uid)
        view = None if parent is None else parent.view
        to = "another pod" if view is None else f"pod {view.name} at {view.address}"
        port = "" if view is None else f", port {view.agent_port}"
        return (
            f"pod {member.view.name} cannot connect to {to}{port}, and the operator reaches both: "
            "the network between them is broken, or a network policy closes the port"
        )


def _could_replace(one: Member, other: Member) -> bool:
    is_there = one.view.node is not None and not (one.condemned or one.lost_why)
    return is_there and one.view.replica_spec == other.view.replica_spec
