"""When an agent takes the operator for absent, and asks its peers or vouches for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.agent.running import start
from unbroken.agent.peers import PeerQuestions
from unbroken.core.agent.events import (
    Commanded,
    Prepared,
    ProgramStage,
    Renewed,
    Settings,
    StageStarted,
)
from unbroken.core.agent.machine import Workers
from unbroken.wire.agent import PeerQuestion


class Asked:
    """The questions of the first of two agents, which runs an attempt; the test sets its clock."""

    def __init__(self, lease: float = 8.0) -> None:
        self.now = 0.0
        command = replace(start(0), rank=0, nnodes=2, lease_seconds=lease)
        self.machine = Workers(Settings("a", nproc=1))
        for event in (
            Prepared(),
            Renewed(0.0),
            Commanded(command),
            StageStarted(0, ProgramStage.TRAIN, (100,)),
        ):
            self.machine.step(event, 0.0)
        self.peers = PeerQuestions(
            self.machine, None, lambda: self.now, lambda attempt, at: None,
            lambda work: work.close(), lambda: None,  # type: ignore[arg-type,return-value]
        )  # fmt: skip
        self.peers.begin(command)

    def age(self, *, is_urgent: bool) -> float | None:
        """Ask as the other agent; return how long ago both ran the attempt."""
        question = PeerQuestion(0, 1, "a", self.now - 0.5, 0.25, is_urgent)
        answer = self.peers.answer_child(question)
        assert answer is not None
        return answer.age


@pytest.mark.parametrize(("each", "lease", "alone_after"), [
    (0.5, 8.0, 2.0),  # the usual heartbeat
    (2.5, 8.0, 3.75),  # 10,000 agents
    (2.5, 4.0, 2.0),  # half of a short lease
    (30.0, 8.0, 4.0),  # an operator that was away counts from then on
])  # fmt: skip
def test_peers_are_asked_when_an_operator_is_later_than_usual(
    each: float, lease: float, alone_after: float
) -> None:
    asked = Asked(lease=lease)
    for asked.now in (0.0, each):
        asked.peers.renewed(asked.now)
    asked.now = each + alone_after - 0.1
    assert not asked.peers._asks()
    asked.now = each + alone_after + 0.1
    assert asked.peers._asks()


def test_an_agent_that_hears_the_operator_vouches_only_when_it_is_urgent() -> None:
    """So that a node that only the operator does not reach is known to end one lease after its
    last report: `unvouched`."""
    asked = Asked()
    asked.peers.renewed(10.0)
    asked.now = 11.0
    assert asked.age(is_urgent=False) is None
    assert asked.machine.lease.unvouched == 0
    assert asked.age(is_urgent=True) == 0.75
    assert asked.machine.lease.unvouched is None


def test_an_agent_that_no_operator_answers_vouches_at_once() -> None:
    asked = Asked()
    asked.peers.renewed(10.0)
    asked.now = 12.5
    assert asked.age(is_urgent=False) == 0.75
