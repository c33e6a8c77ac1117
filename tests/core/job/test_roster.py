"""Order of an agent's reports: a late one must not undo a newer one."""

from __future__ import annotations

from unbroken.core.job.events import PodName, PodPhase, PodUid, PodView
from unbroken.core.job.roster import UNHEARD, Member
from unbroken.wire.agent import AgentReport, AgentState


def member() -> Member:
    """Return a pod that runs."""
    return Member(PodView(PodName("p"), PodUid("u"), "w", 0, PodPhase.RUNNING), UNHEARD)


def test_a_late_report_does_not_bring_back_workers_that_have_ended_at_the_barrier() -> None:
    pod = member()
    early = AgentReport("a", AgentState.READY, newest_attempt=0, nproc=1, kept=(0,))
    late = AgentReport("a", AgentState.READY, newest_attempt=0, nproc=1)
    assert pod.accept(early)
    assert pod.accept(late)
    assert not pod.accept(early)


def test_a_late_report_does_not_take_back_the_port_that_is_offered() -> None:
    pod = member()
    early = AgentReport("a", AgentState.READY, newest_attempt=0, nproc=1)
    late = AgentReport("a", AgentState.READY, newest_attempt=0, nproc=1, offered_port=2000)
    assert pod.accept(early)
    assert pod.accept(late)
    assert not pod.accept(early)
    assert pod.report == late
    withdrawn = AgentReport("a", AgentState.READY, newest_attempt=1, nproc=1)
    assert pod.accept(withdrawn)
