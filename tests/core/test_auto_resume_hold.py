"""Restarts of a job by suspension: when it is suspended, and when it runs again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.auto_resume import (
    INVALID,
    LIFTED,
    RESTARTING,
    STALLED,
    STUCK_SECONDS,
    TOO_LATE,
    WINDOW_SECONDS,
    AskForFence,
    AutoResume,
    DeleteResumedPod,
    Picture,
    PodNode,
    PodState,
    Readiness,
    Record,
    ResumeEffect,
    Say,
    WriteResumeRecord,
)
from unbroken.spec.auto_resume import Resume

PODS = (PodState("lm-0", "u0", "n0", "Running"), PodState("lm-1", "u1", "n1", "Running"))
NODES = {"n0": PodNode("n0"), "n1": PodNode("n1")}
WELL = Picture(
    *("TrainJob", "lm", "7", Resume(True, 2)), pods=PODS, nodes=NODES, by_suspension=True
)
SILENT = replace(NODES["n1"], readiness=Readiness.SILENT)
ILL = {**NODES, "n1": replace(NODES["n1"], trouble="Xid79")}
HELD = replace(
    WELL,
    record=Record(1, "a fault", 100.0, frozenset({"u0", "u1"}), is_suspended=True),
    is_suspended=True,
    is_over=True,
)
LEAVING = tuple(replace(pod, ends_by=130.0) for pod in PODS)


def only(effects: list[ResumeEffect], type: type[ResumeEffect]) -> ResumeEffect:
    """Return the only effect of a type."""
    (found,) = (effect for effect in effects if isinstance(effect, type))
    return found


def written(effects: list[ResumeEffect]) -> WriteResumeRecord:
    """Return the only write."""
    found = only(effects, WriteResumeRecord)
    assert isinstance(found, WriteResumeRecord)
    return found


def said(effects: list[ResumeEffect]) -> Say:
    """Return the only event."""
    found = only(effects, Say)
    assert isinstance(found, Say)
    return found


def test_the_decision_suspends_the_job_and_deletes_nothing() -> None:
    machine = AutoResume()
    seen = replace(WELL, nodes=ILL)
    assert machine.step(seen, 100.0) == []
    effects = machine.step(seen, 100.0 + WINDOW_SECONDS)
    write = written(effects)
    assert write.suspends is True
    assert write.record.is_suspended
    assert (write.record.count, write.record.pods) == (1, {"u0", "u1"})
    assert said(effects).reason == "TrainJob" + RESTARTING
    assert "suspends it until its pods (2) are gone" in said(effects).message
    assert not any(isinstance(effect, DeleteResumedPod) for effect in effects)


@pytest.mark.parametrize(
    "pods",
    [PODS, LEAVING, LEAVING[:1], (replace(PODS[0], uid="new"),)],
    ids=["all run", "all leave", "one leaves", "one that was made since"],
)
def test_a_job_stays_suspended_while_a_pod_of_it_is_left(pods: tuple[PodState, ...]) -> None:
    for machine in (AutoResume(), AutoResume()):
        assert machine.step(replace(HELD, pods=pods), 110.0) == []
        assert machine.deadline() is not None


def test_a_job_runs_again_when_none_of_its_pods_is_left() -> None:
    ended = (PodState("lm-x", "u9", "n1", "Failed", "Evicted"),)
    for pods in ((), ended):
        write = written(AutoResume().step(replace(HELD, pods=pods), 110.0))
        assert write.suspends is False
        assert not write.record.is_suspended
        assert write.record.count == 1
        after = replace(WELL, pods=(*pods, *PODS), record=write.record)
        machine = AutoResume()
        for now in (111.0, 111.0 + WINDOW_SECONDS):
            assert machine.step(after, now) == [], "what has ended counts no more"


def test_a_pod_is_forced_out_only_while_it_leaves_a_node_that_is_dead() -> None:
    machine = AutoResume()
    nodes = {**NODES, "n1": SILENT}
    assert machine.step(replace(HELD, nodes=nodes), 101.0) == [], "its Job has not deleted it yet"
    leaving = replace(HELD, pods=LEAVING, nodes=nodes)
    assert machine.step(leaving, 102.0) == [AskForFence("n1", "u1", "pod lm-1 of TrainJob lm")]
    for dead in ({**NODES, "n1": replace(SILENT, is_fenced=True)}, {"n0": NODES["n0"]}):
        assert machine.step(replace(HELD, pods=PODS, nodes=dead), 103.0) == []
        forced = machine.step(replace(leaving, nodes=dead), 104.0)
        assert forced == [DeleteResumedPod("lm-1", "u1", "n1", force=True)]


def test_pods_that_nobody_deletes_are_told_of_once() -> None:
    machine = AutoResume()
    assert machine.step(HELD, 100.0 + STUCK_SECONDS - 1) == []
    event = said(machine.step(HELD, 100.0 + STUCK_SECONDS))
    assert event.reason == STALLED
    assert "lm-0, lm-1" in event.message
    assert machine.step(HELD, 200.0 + STUCK_SECONDS) == []


def test_a_restart_that_has_begun_ends_also_without_the_annotations() -> None:
    seen = replace(HELD, pods=(), resume=Resume(), problems=("annotation x needs y",))
    effects = AutoResume().step(seen, 110.0)
    assert written(effects).suspends is False
    assert said(effects).reason == INVALID


def test_a_suspension_that_somebody_else_ends_is_not_fought_over() -> None:
    effects = AutoResume().step(replace(HELD, is_suspended=False, is_over=False), 110.0)
    write = written(effects)
    assert write.suspends is None
    assert (write.record.is_suspended, write.record.pods) == (False, frozenset())
    assert said(effects).reason == LIFTED


@pytest.mark.parametrize(("ended_as", "reasons"), [("Failed", [TOO_LATE]), ("Complete", [])])
def test_a_job_that_ends_while_it_is_suspended_is_left_alone(
    ended_as: str, reasons: list[str]
) -> None:
    effects = AutoResume().step(replace(HELD, ended_as=ended_as), 110.0)
    assert written(effects).suspends is None
    assert not written(effects).record.is_suspended
    assert [one.reason for one in effects if isinstance(one, Say)] == reasons


def test_a_deleted_job_is_left_alone() -> None:
    assert AutoResume().step(replace(HELD, pods=(), is_leaving=True), 110.0) == []


def test_a_suspension_by_a_user_is_not_ended() -> None:
    seen = replace(WELL, pods=(), is_suspended=True, is_over=True)
    assert AutoResume().step(seen, 110.0) == []


EVICTED = (PODS[0], replace(PODS[1], phase="Failed", reason="Evicted"))
FAILED = replace(WELL, pods=EVICTED, is_over=True, ended_as="Failed")


def test_a_job_that_failed_by_a_lost_pod_is_told_of_once() -> None:
    effects = AutoResume().step(FAILED, 100.0)
    assert said(effects).reason == TOO_LATE
    assert "pod lm-1 failed (Evicted)" in said(effects).message
    after = replace(FAILED, record=written(effects).record)
    assert AutoResume().step(after, 101.0) == []


@pytest.mark.parametrize(
    "seen",
    [
        replace(FAILED, ended_as="Complete"),
        replace(FAILED, resume=Resume()),
        replace(FAILED, by_suspension=False),
        replace(FAILED, is_leaving=True),
        replace(FAILED, pods=(PODS[0], replace(PODS[1], phase="Failed"))),
        replace(FAILED, record=Record(2, exhausted="a fault")),
    ],
    ids=["success", "not wanted", "by deletion", "deleted", "its program failed", "told"],
)
def test_other_ends_are_not_told_of(seen: Picture) -> None:
    assert AutoResume().step(seen, 100.0) == []


# --- late news, crashes, and controllers in any order

GRACE = 5.0


@dataclass
class World:
    """Real state of a job, and the picture that the program has of it."""

    random: Random
    now: float = 100.0
    version: int = 1
    record: Record = field(default_factory=Record)
    is_suspended: bool = False
    jobs_hold: bool = False
    """True once the Jobs have received the suspension."""
    nodes: dict[str, PodNode] = field(default_factory=dict)
    pods: dict[str, PodState] = field(default_factory=dict)
    """Pods by uid."""
    cut: set[str] = field(default_factory=set)
    """Nodes that run their pods and cannot be reached."""
    asked: set[str] = field(default_factory=set)
    """Nodes whose fence was asked for."""
    made: int = 0
    told: Picture = WELL
    machine: AutoResume = field(default_factory=AutoResume)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.nodes = {f"n{index}": PodNode(f"n{index}") for index in range(6)}
        self.run_job()
        self.tell(lost=0.0)

    def run_job(self) -> None:
        """Let the controllers act, sometimes when they could."""
        if self.random.random() < 0.5:
            self.jobs_hold = self.is_suspended
        if self.random.random() < 0.5:
            return
        active = {name: pod for name, pod in self.pods.items() if pod.ends_by is None}
        if self.jobs_hold:
            for uid, pod in active.items():
                self.pods[uid] = replace(pod, ends_by=self.now + GRACE)
            return
        here = {pod.name for pod in active.values()}
        for name in {"lm-0", "lm-1", "lm-2"} - here:
            free = [n for n, node in self.nodes.items() if node == PodNode(n)]
            if free:
                self.made += 1
                uid = f"u{self.made}"
                self.pods[uid] = PodState(name, uid, self.random.choice(free), "Running")

    def pass_time(self, seconds: float) -> None:
        """Let time pass: kubelets end deleted pods, providers fence as requested."""
        self.now += seconds
        for uid, pod in list(self.pods.items()):
            if pod.ends_by is not None and pod.node not in self.cut and pod.node in self.nodes:
                del self.pods[uid]
        for name, node in list(self.nodes.items()):
            if name in self.asked and self.random.random() < 0.5:
                self.nodes[name] = replace(node, is_fenced=True)
        self.run_job()

    def tell(self, lost: float) -> None:
        """Give the program the whole picture, or nothing."""
        if self.random.random() >= lost:
            self.told = Picture(
                *("JobSet", "lm", str(self.version), Resume(True, 3), self.record),
                is_over=self.is_suspended,
                is_suspended=self.is_suspended,
                by_suspension=True,
                pods=tuple(self.pods.values()),
                nodes=dict(self.nodes),
            )

    def step(self, crash: float = 0.0) -> None:
        """Let the program look and act; it may die between any two acts."""
        for effect in self.machine.step(self.told, self.now):
            if self.random.random() < crash:
                self.machine = AutoResume()
                return
            if not self.carry_out(effect):
                return

    def carry_out(self, effect: ResumeEffect) -> bool:
        """Carry out one effect as the API does. False: the effects after it are lost."""
        match effect:
            case WriteResumeRecord(record, version, suspends):
                if version != str(self.version):
                    return False
                self.restarts += record.count > self.record.count
                self.record, self.version = record, self.version + 1
                if suspends is False:
                    assert not self.pods, "it runs again while pods are left"
                self.is_suspended = self.is_suspended if suspends is None else suspends
            case DeleteResumedPod(_, uid, node, force):
                assert force, "a pod was deleted, which its Job counts"
                here = self.nodes.get(node or "")
                if (here is None or here.is_fenced) and uid in self.pods:
                    assert self.pods[uid].ends_by is not None, (
                        "a pod was deleted before its Job did"
                    )
                    del self.pods[uid]
            case AskForFence(node):
                if node in self.nodes:
                    self.asked.add(node)
        return True


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_comes_late_one_fault_is_one_restart_and_no_pod_outlives_it(seed: int) -> None:
    world = World(Random(seed))
    while len(world.pods) < 3:
        world.pass_time(1.0)
    world.tell(lost=0.0)
    before = set(world.pods)
    node = world.random.choice([pod.node or "" for pod in world.pods.values()])
    match world.random.randrange(3):
        case 0:
            del world.nodes[node]
        case 1:
            world.nodes[node] = replace(world.nodes[node], readiness=Readiness.SILENT)
            world.cut.add(node)
        case _:
            world.nodes[node] = replace(world.nodes[node], trouble="Xid79")
    for _ in range(120):
        world.pass_time(1.0)
        world.tell(lost=0.4)
        world.step(crash=0.05)
    assert world.restarts == 1
    assert not world.is_suspended
    assert not world.record.is_suspended
    assert not before & set(world.pods), "all were made anew"
    assert len(world.pods) == 3
