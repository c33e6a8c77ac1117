"""Pods that do not reach each other, while the operator reaches both."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.job.drive_job import Script
from tests.core.job.watch.drive_watch import IN_DATA, WatchedJob, looked, shown, well
from unbroken.core.job.events import (
    AgentReported,
    AskAgent,
    CreatePod,
    DeletePod,
    EvidenceReceived,
    PodUid,
    RecordEvent,
    StartWorkers,
    StopWorkers,
)
from unbroken.core.job.gang import GangStage
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


def look_until_lost(job: WatchedJob) -> float:
    """Answer all questions until the first incident; return its time."""
    now = 0.0
    while 1 not in job.incidents:
        due = job.job.deadline()
        assert due is not None
        now = due
        if "look" in job.tick(now):
            look(job, now + 0.5)
    return now


def test_a_pod_that_no_longer_reaches_another_is_replaced_once_all_ranks_wait() -> None:
    """Have no rhythm of steps: the packets between two nodes may be lost from the start on."""
    job = working()
    assert cut(job, "w-1", 12) == "look w-0, look w-1"
    assert look(job, 12.5) == ""
    now = look_until_lost(job)
    assert now <= 17
    found = job.incidents[1]
    assert (found.culprit.fault, found.culprit.pod) == (NOT_REACHABLE, "j-w-1")
    assert "pod j-w-1 cannot connect to pod j-w-0" in found.culprit.text
    assert found.remedy.value == "pod"
    assert job.job.state.plan.given_up.keys() == {"n1"}
    assert job.told(NOT_REACHABLE)[0].startswith("pod j-w-1 cannot connect to pod j-w-0 at ")
    job.run(f"""
        {now + 1} gone w-1 -> create w-1 avoid=n1
        {now + 2} pod w-1 uid=w-1.1 node=n3
        {now + 3} ready w-0 0
        {now + 3} ready w-1 -> start w-0=0 w-1.1=1 in 1, status Faulted 1, incident 1 open
        {now + 4} runs w-0 1
        {now + 4} runs w-1 1
    """)
    job.tell("w-0", now + 5, well(0, 40), attempt=1)
    job.tell("w-1", now + 5, well(1, 40), attempt=1)
    assert job.incidents[1].outcome == "recovered"


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


@pytest.mark.parametrize("writes", ["", "output=18", "trains=18"])
def test_if_the_next_pod_does_not_reach_it_either_the_other_end_is_to_blame(writes: str) -> None:
    """Have the packets of w-0 lost, and its next peer wait for it in the store."""
    job = replaced()
    if writes:  # for example that it tries to connect again
        job.run(f"19 runs w-0 1 rank=0 {writes}\n19 runs w-2 1 rank=1 {writes}")
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
    job.run("""
        25.1 ready w-2 1
        25.1 gone w-0
        25.2 pod w-0 uid=w-0.1 node=n3
        25.3 ready w-0
        25.4 runs w-0 2
        25.4 runs w-2 2
    """)
    cut(job, "w-2", 27)
    while 3 not in job.incidents:
        job.answer("w-0", now + 4, looked(0))
        job.answer("w-2", now + 4, looked(1))
        due = job.job.deadline()
        assert due is not None
        job.tick(due)
        now = due
    assert job.incidents[3].culprit.pod == "j-w-2", "w-0 was just replaced"


def test_a_node_that_was_not_reached_is_avoided_for_five_minutes() -> None:
    job = working()
    cut(job, "w-1", 12)
    look(job, 12.5)
    look_until_lost(job)
    job.run("17 node n1 ready\n18 gone w-1\n19 pod w-1 uid=w-1.1 node=n3")
    for at, avoided in ((310, ("n1",)), (320, ())):
        job.run(f"{at} gone w-1\n{at + 1} pod w-1 uid=w-1.{at} node=n3")
        made = [e for e in job.effects if isinstance(e, CreatePod)][-1]
        assert (made.name, made.avoid) == ("j-w-1", avoided)


def test_a_resumed_job_begins_anew_though_it_uses_the_number_of_its_attempt_again() -> None:
    job = working()
    cut(job, "w-1", 12)
    job.run("""
        13 job suspend=yes
        13.5 ready w-0 0
        13.5 ready w-1 0
        14 gone w-0
        14 gone w-1
        20 job suspend=no -> create w-0 w-1, status Created 0, event Resumed
        21 pod w-0 uid=w-0.1 node=n0
        21 pod w-1 uid=w-1.1 node=n1
        22 ready w-0 agent=c
        22 ready w-1 agent=d
        25 tick
        26 runs w-0 0 agent=c rank=0
        26 runs w-1 0 agent=d rank=1
    """)
    assert job.job.state.gang.ranks.keys() == {"w-0.1", "w-1.1"}
    assert cut(job, "w-1", 30) == "look w-0.1, look w-1.1"
    assert len(job.told(NOT_REACHABLE)) == 2
    look_until_lost(job)
    assert job.incidents[1].culprit.pod == "j-w-1"
    assert "pod j-w-1 cannot connect to pod j-w-0" in job.incidents[1].culprit.text


def taken_over(job: WatchedJob) -> Script:
    """Return the next operator of a job, which has all reports and does not know the attempt."""
    new = job.successor(20)
    for rank, (pod, report) in enumerate(job.agents.items()):
        known = rank if report.attempt is not None else None
        report = replace(report, rank=known, master_addr="10.0.0.0", master_port=29000)
        new.give(AgentReported(job._uid(pod), report), 20)
    return new


def test_a_new_operator_hears_of_it_before_it_knows_the_attempt() -> None:
    job = working()
    cut(job, "w-1", 12)
    new = taken_over(job)
    new.run("20.5 synced -> look w-0 w-1, event PeersNotReachable")
    told = [one.message for one in new.effects if isinstance(one, RecordEvent)]
    assert told[-1].startswith("pod j-w-1 cannot connect to pod j-w-0")


class World(WatchedJob):
    """A job of two pods whose orders about pods and workers are carried out."""

    def __init__(self) -> None:
        super().__init__(2)
        self.now, self._done, self._numbers = 10.0, len(self.effects), count(1)
        for rank in range(2):
            self.tell(f"w-{rank}", 10, well(rank, 10))

    def carry_out(self, *, has_room: bool = True) -> None:
        """Carry out all orders since the last time; pods get a place if there is room."""
        while self._done < len(self.effects):
            effect = self.effects[self._done]
            self._done += 1
            match effect:
                case CreatePod(name) if name[2:] not in self.views:
                    self.run(f"{self.now} pod {name[2:]} uid={name[2:]}.{next(self._numbers)}")
                case DeletePod(_, uid):
                    for pod in [pod for pod, view in self.views.items() if view.uid == uid]:
                        self.run(f"{self.now} gone {pod}")
                case StopWorkers(uid, command):
                    for pod in self._named(uid):
                        self.run(f"{self.now} ready {pod} {command.attempt}")
                case StartWorkers(uid, command):
                    for pod in self._named(uid):
                        self.run(f"{self.now} runs {pod} {command.attempt}")
                        watch = well(command.rank, self.now)
                        self.tell(pod, self.now, watch, attempt=command.attempt)
                case _:
                    pass
        for pod in [pod for pod, view in self.views.items() if has_room and view.node is None]:
            self.run(f"{self.now} pod {pod} uid={self._uid(pod)} node=m{next(self._numbers)}")
            self.run(f"{self.now} ready {pod}")

    def _named(self, uid: PodUid) -> list[str]:
        return [pod for pod, view in self.views.items() if view.uid == uid and view.node]

    def look(self, frames: tuple[str, ...]) -> None:
        """Let each agent answer its newest question."""
        asked = {e.pod: e.request for e in self.effects if isinstance(e, AskAgent)}
        for uid, request in asked.items():
            rank = self.job.state.gang.ranks.get(uid)
            if isinstance(request, CollectCommand) and rank is not None:
                ranks = (looked(rank, frames),)
                answer = Evidence(request.request, request.attempt, "a", self.now, ranks)
                self.give(EvidenceReceived(uid, answer), self.now)

    def happens(self, what: str) -> None:
        """Let one thing happen, 1.5 s after the last."""
        self.now += 1.5
        match what.split():
            case ["cut" | "joined" as how, pod] if pod in self._trains():
                parent = "" if how == "joined" else PARENT
                self.agents[pod] = replace(self.agents[pod], unreached=parent)
                self.give(AgentReported(self._uid(pod), self.agents[pod]), self.now)
            case ["look", "still"]:
                self.look(IN_STEP)
            case ["look", "moving"]:
                self.look(IN_DATA)
            case ["orders"]:
                self.carry_out()
            case ["full"]:
                self.carry_out(has_room=False)
            case ["lost" | "gone" as how, pod] if pod in self.views:
                self.run(f"{self.now} {how} {pod}")
            case _:
                pass
        self.tick(self.now)

    def _trains(self) -> list[str]:
        ranks = self.job.state.gang.ranks
        return [pod for pod, view in self.views.items() if view.uid in ranks and pod in self.agents]


IN_STEP = looked(0).threads[0].frames
HAPPENS = [
    *(f"{how} w-{n}" for how in ("cut", "joined", "lost", "gone") for n in range(3)),
    *("look still", "look moving", "orders", "full", "wait"),
    *("cut w-1", "look still", "orders"),
]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(HAPPENS), max_size=25))
@example(["cut w-1", "look still", "look still", "orders", "cut w-1", "look still", "look still"])
@example(["cut w-1", "look still", "full", "look still", "wait", "look still", "wait"])
@example(["cut w-1", "look still", "orders", "lost w-0", "look still", "joined w-1"])
def test_in_the_end_a_job_has_only_its_own_pods(happened: list[str]) -> None:
    world = World()
    for what in happened:
        world.happens(what)
    for _ in range(60):
        for pod in world._trains():
            world.agents[pod] = replace(world.agents[pod], unreached="")
            world.give(AgentReported(world._uid(pod), world.agents[pod]), world.now)
        world.carry_out()
        due = world.job.deadline()
        world.now = max(world.now + 0.5, min(due or world.now, world.now + 20))
        world.tick(world.now)
        world.look(IN_DATA)
    state = world.job.state
    assert state.gang.stage is GangStage.RUNNING
    assert len(state.plan.slots) == 2
    assert len(world.views) == 2
    assert {view.uid for view in world.views.values()} == set(state.gang.ranks)
