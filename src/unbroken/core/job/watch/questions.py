"""Questions to all agents of a job: what do your ranks do?"""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.core.job.events import AskAgent, PodUid
from unbroken.core.job.roster import is_stock
from unbroken.core.job.state import JobState
from unbroken.wire.observation import CollectCommand, Evidence, RankEvidence

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
    # An earlier operator may have asked too; its questions have lower numbers.
    state.questions = max(state.questions + 1, int(now * 1000))
    asked = [uid for uid in state.gang.ranks if _can_answer(state, uid)]
    command = CollectCommand(state.questions, state.attempt, seconds, samples_per_second)
    state.commands += [AskAgent(uid, command) for uid in sorted(asked)]
    by = now + seconds + GRACE_SECONDS
    return Question(state.questions, state.attempt, by, set(asked))


def _can_answer(state: JobState, uid: PodUid) -> bool:
    member = state.roster.members.get(uid)
    if member is None or member.report is None or member.lost_why:
        return False
    return uid not in state.gang.completed and not is_stock(member.report)
