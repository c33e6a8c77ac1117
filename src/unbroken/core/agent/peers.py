"""Mutual vouching of an attempt's agents while no operator answers (`lease`).

The agents form a tree by their node ranks. Each agent asks its parent at short intervals, and
reports how long ago all agents below it were running the attempt. The root knows this of all
agents, and its answers go down the tree. A group that is cut off together receives nothing from the
other agents, so none of it is vouched for.

An agent that an operator answers vouches only for a child whose lease ends soon. If the operator
does not hear the child, it stops the other ranks before that, and no lease was renewed meanwhile.
If the operator has only just begun, it may yet have to hear the child.

Ages are only ever too large. A parent counts from the answer that the child repeats to it, which
the child had before it asked. A child counts from its own question.
"""

from __future__ import annotations

import math
from dataclasses import replace

from unbroken.wire.agent import PeerAnswer, PeerQuestion, children_of

AGE_SECONDS_MAX = 3600.0
URGENT_SECONDS = 2.0
"""Seconds for which the urgent question of a child counts; several questions may be lost."""


class Vouching:
    """One agent's knowledge of the other agents of its attempt. Times are on its own clock."""

    def __init__(self, agent_id: str, attempt: int, rank: int, nnodes: int) -> None:
        self.attempt, self.rank = attempt, rank
        self._agent_id = agent_id
        self._below = dict.fromkeys(children_of(rank, nnodes), -math.inf)
        """Times at which each child and all agents below it were certainly running."""
        self._all_at = self._urgent_at = -math.inf
        """Times at which all agents were running, and at which a child asked urgently."""
        self._answer: PeerAnswer | None = None

    def asked(self, question: PeerQuestion, now: float) -> bool:
        """Note a question; return False if it is of another attempt, or not of a child."""
        is_child = question.attempt == self.attempt and question.rank in self._below
        if is_child and question.is_urgent:
            self._urgent_at = now
        return is_child

    def is_needed(self, *, is_alone: bool, now: float) -> bool:
        """Return whether this agent is to vouch, if it runs the attempt. `is_alone`: no operator
        answers it."""
        return is_alone or self._is_urgent(now)

    def answer_child(self, question: PeerQuestion, *, vouches: bool, now: float) -> PeerAnswer:
        """Return the answer to a child that `asked`. `vouches`: whether this agent itself runs the
        attempt, and vouches for it."""
        if question.agent_id == self._agent_id and question.age is not None:
            at = min(question.token, now) - question.age
            self._below[question.rank] = max(at, self._below[question.rank])
        return PeerAnswer(self._agent_id, now, _age(self.all_at(vouches=vouches, now=now), now))

    def question(self, *, vouches: bool, is_urgent: bool, now: float) -> PeerQuestion:
        """Return the question to the parent. `is_urgent`: the lease of this agent ends soon."""
        age, answer = _age(self._below_at(vouches=vouches, now=now), now), self._answer
        is_urgent = is_urgent or self._is_urgent(now)
        question = PeerQuestion(self.attempt, self.rank, age=age, is_urgent=is_urgent)
        if answer is None:
            return question
        return replace(question, agent_id=answer.agent_id, token=answer.token)

    def answered(self, answer: PeerAnswer, asked_at: float) -> None:
        """Take the parent's answer to a question of this time."""
        self._answer = answer
        if answer.age is not None:
            self._all_at = max(self._all_at, asked_at - answer.age)

    def all_at(self, *, vouches: bool, now: float) -> float:
        """Return when all agents were certainly running the attempt; -inf: never."""
        return self._below_at(vouches=vouches, now=now) if self.rank == 0 else self._all_at

    def _is_urgent(self, now: float) -> bool:
        """Return whether the lease of an agent below this one ends soon."""
        return now < self._urgent_at + URGENT_SECONDS

    def _below_at(self, *, vouches: bool, now: float) -> float:
        return min([now, *self._below.values()]) if vouches else -math.inf


def _age(at: float, now: float) -> float | None:
    """Return the seconds since then, rounded up; None: longer ago than matters."""
    age = now - at
    return age if age <= AGE_SECONDS_MAX else None
