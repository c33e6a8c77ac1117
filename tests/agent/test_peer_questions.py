"""When an agent takes the operator for absent, and asks its peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.agent.running import start
from unbroken.agent.peers import PeerQuestions


class Clock:
    """A clock that the test sets."""

    now = 0.0


@pytest.mark.parametrize(("each", "lease", "alone_after"), [
    (0.5, 8.0, 2.0),  # the usual heartbeat
    (2.5, 8.0, 3.75),  # 10,000 agents
    (2.5, 4.0, 2.0),  # half of a short lease
    (30.0, 8.0, 4.0),  # an operator that was away counts from then on
])  # fmt: skip
def test_peers_are_asked_when_an_operator_is_later_than_usual(
    each: float, lease: float, alone_after: float
) -> None:
    clock = Clock()
    peers = PeerQuestions(
        "a", None, lambda attempt: True, lambda: clock.now, lambda attempt, at: None,
        lambda work: work.close(), lambda: None,  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    peers.begin(replace(start(0), rank=0, nnodes=2, lease_seconds=lease))
    for clock.now in (0.0, each):
        peers.renewed(clock.now)
    clock.now = each + alone_after - 0.1
    assert not peers._is_alone()
    clock.now = each + alone_after + 0.1
    assert peers._is_alone()
