"""Questions to agents of a job: what do your ranks do, and which agents do you reach?"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from unbroken.core.job.events import AskAgent, PodUid
from unbroken.core.job.roster import is_stock
from unbroken.core.job.state import JobState
from unbroken.wire.observation import PEERS_MAX, CollectCommand, Evidence, RankEvidence

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
