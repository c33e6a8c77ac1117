"""Pods that do not reach each other, while the operator reaches both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.watch.drive_watch import IN_DATA, WatchedJob, looked, shown, well
from unbroken.core.job.events import AgentReported, AskAgent, EvidenceReceived
from unbroken.core.job.watch.unreached import EVENTS_MAX, NOT_REACHABLE
from unbroken.wire.agent import AgentReport
from unbroken.wire.observation import CollectCommand, Evidence

PARENT = "10.0.0.0:8080"


def cut(job: WatchedJob, pod: str, at: float, parent: str = PARENT) -> str:
    """The agent does not reach its parent, or does again; what is ordered."""
    report: AgentReport = replace(job.agents[pod], unreached=parent)
    job.agents[pod] = report
    return shown(job.give(AgentReported(job._uid(pod), report), at))


def working(nodes: int = 2) -> WatchedJob:
    """A job of one rank a pod, which makes steps at 10."""
    job = WatchedJob(nodes)
    for rank in range(nodes):
        job.tell(f"w-{rank}", 10, well(rank, 10))
    return job


def look(job: WatchedJob, at: float, *frames: tuple[str, ...]) -> str:
    """Answer the newest question to each agent; return the effects of the last answer."""
    found = ""
    for rank in range(len(job.agents)):
        found = job.answer(f"w-{rank}", at, looked(rank, *frames[rank : rank + 1]))
    return found


def test_a_pod_that_no_longer_reaches_another_is_replaced_once_all_ranks_wait() -> None:
    """Have no rhythm of steps: the packets between two nodes may be lost from the start on."""
    job = working()
    assert cut(job, "w-1", 12) == "look w-0, look w-1"
    assert look(job, 12.5) == ""
    due = job.job.deadline()
    assert due is not None
    assert job.tick(due) == "look w-0, look w-1"
    ordered = look(job, 18)
    assert "incident 1 open" in ordered
    found = job.incidents[1]
    assert (found.culprit.fault, found.culprit.pod) == (NOT_REACHABLE, "j-w-1")
    assert "pod j-w-1 cannot connect to pod j-w-0" in found.culprit.text
    assert found.remedy.value == "pod"
    assert job.job.state.plan.avoid == {"n1"}
    assert job.told(NOT_REACHABLE)[0].startswith("pod j-w-1 cannot connect to pod j-w-0 at ")


def test_a_closed_port_under_a_job_that_trains_is_an_event_and_looked_at_ever_less() -> None:
    job = working()
    cut(job, "w-1", 12)
    dues = []
    now = 12.0
    for _ in range(6):
        look(job, now + 0.5, (), IN_DATA)
        assert 1 not in job.incidents
        due = job.job.deadline()
        assert due is not None
        dues.append(due - now)
        now = due
        job.tick(now)
    assert dues == sorted(dues)
    assert dues[-1] > 30
    assert len(job.told(NOT_REACHABLE)) == 1


def test_a_pod_that_is_reached_again_is_no_reason_to_look() -> None:
    job = working()
    cut(job, "w-1", 12)
    look(job, 12.5)
    cut(job, "w-1", 13, "")
    job.tick(60)
    assert 1 not in job.incidents


def test_the_pod_that_most_others_do_not_reach_is_the_culprit() -> None:
    job = working(4)
    for rank in (1, 2, 3):
        cut(job, f"w-{rank}", 12)
    look(job, 12.5)
    due = job.job.deadline()
    assert due is not None
    job.tick(due)
    look(job, 18)
    assert job.incidents[1].culprit.pod == "j-w-0"
    assert len(job.told(NOT_REACHABLE)) == EVENTS_MAX


INIT = ("init_process_group (torch/distributed/distributed_c10d.py:1892)", "<module> (train.py:9)")
SERVES = (
    "poll (libc.so.6)",
    "c10d::TCPStore::wait (libtorch_cpu.so)",
    "gloo::rendezvous::Context::connectFullMesh (libtorch_cpu.so)",
    *INIT,
)
STORE = (
    "await_listening (unbroken/worker/boot/rendezvous.py:115)",
    "_create_c10d_store (torch/distributed/rendezvous.py:199)",
    *INIT,
)
CONNECTS = ("poll (libc.so.6)", "create_connection (socket.py:836)", *STORE)
PAUSES = ("clock_nanosleep (libc.so.6)", *STORE)
"""Stacks of real processes: rank 0, whose packets are lost, and rank 1, which asks it again and
again."""


def replaced() -> WatchedJob:
    """Return a job whose w-1 was let go, and whose w-0 trains with the spare w-2."""
    job = WatchedJob(2, spares=1)
    for rank in range(2):
        job.tell(f"w-{rank}", 10, well(rank, 10))
    cut(job, "w-1", 12)
    for rank in range(2):
        job.answer(f"w-{rank}", 12.5, looked(rank))
    due = job.job.deadline()
    assert due is not None
    job.tick(due)
    for rank in range(2):
        job.answer(f"w-{rank}", 18, looked(rank))
    assert job.incidents[1].culprit.pod == "j-w-1"
    job.run("""
        18.1 ready w-0 0
        18.1 gone w-1
        18.3 runs w-0 1
        18.3 runs w-2 1
    """)
    return job


def test_a_pod_that_was_let_go_rightly_leaves_no_doubt_about_the_other_end() -> None:
    job = replaced()
    for pod, rank in (("w-0", 0), ("w-2", 1)):
        job.tell(pod, 30, well(rank, 30), attempt=1)
    cut(job, "w-2", 32)
    for at in (32.5, 38.0, 44.0):
        job.answer("w-0", at, looked(0))
        job.answer("w-2", at, looked(1))
        due = job.job.deadline()
        if 2 in job.incidents or due is None:
            break
        job.tick(due)
    assert job.incidents[2].culprit.pod == "j-w-2"


@pytest.mark.parametrize("writes", [False, True])
def test_if_the_next_pod_does_not_reach_it_either_the_other_end_is_to_blame(
    *, writes: bool
) -> None:
    """Have the packets of w-0 lost, and its next peer wait for it in the store."""
    job = replaced()
    if writes:  # for example that it tries to connect again
        job.run("19 runs w-0 1 rank=0 output=18\n19 runs w-2 1 rank=1 output=18")
    asked, now, looks = cut(job, "w-2", 20), 20.0, 0
    while 2 not in job.incidents:
        if asked == "look w-0, look w-2":
            job.answer("w-0", now + 0.5, looked(0, SERVES))
            job.answer("w-2", now + 0.5, looked(1, PAUSES if looks % 2 else CONNECTS))
            looks += 1
        due = job.job.deadline()
        assert due is not None
        now, asked = due, job.tick(due)
        assert looks < 3
    assert job.incidents[2].culprit.pod == "j-w-0"
    assert now <= 25


def missed(job: WatchedJob, spare: str, at: float, *pods: str) -> None:
    """Have a spare answer which of the pods it does not reach."""
    uid = job._uid(spare)
    asked = [e.request for e in job.effects if isinstance(e, AskAgent) and e.pod == uid][-1]
    assert isinstance(asked, CollectCommand)
    by_pod = dict(zip(("w-1", "w-0"), asked.peers, strict=True))
    away = tuple(by_pod[pod] for pod in pods)
    answer = Evidence(asked.request, asked.attempt, f"{spare}.a", at, unreached=away)
    job.give(EvidenceReceived(uid, answer), at)


def decided(*pods: str) -> WatchedJob:
    """Return a job whose w-1 and w-0 miss each other, and whose spare misses these."""
    job = WatchedJob(2, spares=1)
    for rank in range(2):
        job.tell(f"w-{rank}", 10, well(rank, 10))
    assert cut(job, "w-1", 12) == "look w-2, look w-0, look w-1"
    missed(job, "w-2", 12.2, *pods)
    for at in (12.5, 16.5):
        for rank in range(2):
            job.answer(f"w-{rank}", at, looked(rank))
        due = job.job.deadline()
        assert due is not None
        if 1 not in job.incidents:
            job.tick(due)
    return job


@pytest.mark.parametrize(("missed_by_spare", "culprit"), [
    (("w-0",), "j-w-0"),
    (("w-1",), "j-w-1"),
    (("w-0", "w-1"), "j-w-1"),  # its own network is broken
    ((), "j-w-1"),
])  # fmt: skip
def test_a_spare_tells_which_of_two_pods_that_miss_each_other_is_cut_off(
    missed_by_spare: tuple[str, ...], culprit: str
) -> None:
    found = decided(*missed_by_spare).incidents[1].culprit
    assert found.pod == culprit
    is_told = len(missed_by_spare) == 1
    assert (f"spare pods do not reach {culprit} either" in found.text) == is_told
