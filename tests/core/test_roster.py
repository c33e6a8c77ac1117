"""What of an agent's reports is news."""

from __future__ import annotations

from unbroken.core.events import PodName, PodPhase, PodUid, PodView
from unbroken.core.roster import UNHEARD, Member
from unbroken.wire.agent import AgentReport, AgentState


def test_a_late_report_does_not_take_back_the_port_that_is_offered() -> None:
    member = Member(PodView(PodName("p"), PodUid("u"), "w", 0, PodPhase.RUNNING), UNHEARD)
    early = AgentReport("a", AgentState.READY, newest_attempt=0, nproc=1)
    late = AgentReport("a", AgentState.READY, newest_attempt=0, nproc=1, offered_port=2000)
    assert member.take(early)
    assert member.take(late)
    assert not member.take(early)
    assert member.report == late
    withdrawn = AgentReport("a", AgentState.READY, newest_attempt=1, nproc=1)
    assert member.take(withdrawn)
