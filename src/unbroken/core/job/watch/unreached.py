"""Pods of the attempt whose agents cannot connect to another pod's agent, while the operator
reaches both: the network between them is broken, or closed.

Its questions to agents serve all looks: what do your ranks do?
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from unbroken.core.job.events import AskAgent, PodUid
from unbroken.core.job.gang import GangStage, StartOrder
from unbroken.core.job.roster import Member, is_stock
from unbroken.core.job.state import JobState
from unbroken.wire.agent import AgentReport, parent_of
from unbroken.wire.observation import CollectCommand, Evidence, RankEvidence

from .progress import first_step

GRACE_SECONDS = 0.5
"""Seconds for the answers to arrive, in addition to the agents' time."""


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
    asked = sorted(uid for uid in state.gang.ranks if _can_answer(state, uid))
    # An earlier operator may have asked too; its questions have lower numbers.
    state.questions = max(state.questions + 1, int(now * 1000))
    command = CollectCommand(state.questions, state.attempt, seconds, samples_per_second)
    state.commands += [AskAgent(uid, command) for uid in asked]
    by = now + command.seconds + GRACE_SECONDS
    return Question(command.request, command.attempt, by, set(asked))


def _can_answer(state: JobState, uid: PodUid) -> bool:
    member = state.roster.members.get(uid)
    if member is None or member.report is None or member.lost_why:
        return False
    return uid not in state.gang.completed and not is_stock(member.report)


NOT_REACHABLE = "PeersNotReachable"
"""Agents of two pods cannot connect to each other, while the operator reaches both."""
EVENTS_MAX = 3
"""Events of one attempt: a closed port is closed for all pods."""


class Unreached:
    """Reports of the agents of one job about it, in the attempt that runs."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._order: StartOrder | None = None
        """The start of the attempt that is watched. A resumed job may use a number again."""
        self._events = 0
        self._since: dict[PodUid, float] = {}
        """Time since which each pod says that it cannot connect to its parent, the longest
        first."""

    @property
    def since(self) -> float | None:
        """Since when a pod does not reach another one; None: all do, or no attempt runs."""
        order = None if self._state.gang.stage is GangStage.HALTED else self._order
        if order is None or order.attempt != self._state.attempt:
            return None
        return next(iter(self._since.values()), None)

    def take(self, member: Member, report: AgentReport, now: float) -> None:
        """Take what an agent of the attempt that runs says."""
        if not report.unreached and not self._since:
            return
        self.begin(now)
        if not report.unreached:
            self._since.pop(member.uid, None)
        elif member.uid not in self._since and self._parent(member.uid) is not None:
            self._since[member.uid] = now
            self._events += 1
            if self._events <= EVENTS_MAX:
                self._state.record_event(NOT_REACHABLE, self._text(member), is_warning=True)

    def begin(self, now: float) -> None:
        """Collect the agents' reports again if another attempt runs: a new operator gets them
        before it knows the attempt."""
        order = self._state.gang.order
        if order is None or order is self._order:
            return
        self._order, self._events = order, 0
        self._since.clear()
        for member, report in self._state.gang.reports():
            self.take(member, report, now)

    def worst(self) -> tuple[Member, str] | None:
        """Return the pod that most pods do not reach, or that reaches none, and the text about it.

        If two pods only miss each other, it is the one that was not just replaced, or else the one
        with the higher rank.
        """
        members, counts = self._state.roster.members, Counter[PodUid]()
        for uid in self._since:
            parent = self._parent(uid)
            counts.update([uid] if parent is None else [uid, parent.uid])
        ranks = self._state.gang.ranks
        known = [uid for uid in counts if uid in members and uid in ranks]
        if not known:
            return None
        worst = max(known, key=lambda uid: (counts[uid], self._is_kept(members[uid]), ranks[uid]))
        # The pod whose agent says so: this one, or one that connects to it.
        below = (
            uid for uid in self._since if uid in members and self._parent(uid) is members[worst]
        )
        named = worst if worst in self._since else next(below, worst)
        return members[worst], self._text(members[named])

    def _is_kept(self, member: Member) -> bool:
        """True if the pod's peer was just replaced for this, and no step was made since.

        Steps need all ranks. Output proves nothing: a rank that waits for the others may write. An
        operator that has taken over since the replacement does not know of it."""
        state = self._state
        if state.broken != (state.attempt - 1, NOT_REACHABLE):
            return False
        is_making_steps = any(map(first_step, state.watched.values()))
        return member.uid in state.gang.kept and not is_making_steps

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
