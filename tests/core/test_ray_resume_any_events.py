"""Auto-resume of Ray against an API whose events come late, twice or never.

The API may fail at any point, and an operator like KubeRay deletes and creates the same pods at any
moment. The true state is kept here. The test fails at once if a job runs on two heads at a time, or
restarts too often. It also fails if a pod is deleted without a decision, or by force while its node
may still run it. After the faults end, the job must run on good nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.drive_resumed import ResumedWorld
from unbroken.core.auto_resume import AskForFence, DeleteResumedPod, Record, Say, WriteResumeRecord
from unbroken.core.ray_resume import (
    BeginAgain,
    DashboardAnswer,
    Head,
    RayPicture,
    RayResume,
    RayState,
    StopHung,
    Submission,
    SubmitAgain,
    SuspendRayCluster,
    WriteRayRecord,
    base_id,
)
from unbroken.spec.auto_resume import Resume

WORKERS = 2
JOB = Submission("raysubmit_1", "{}")
NAMES = ("head", *(f"w-{number}" for number in range(WORKERS)))


@dataclass
class Heard:
    """State of the job and its RayCluster that the machine knows."""

    version: int = 1
    record: Record = field(default_factory=Record)
    state: RayState = field(default_factory=RayState)
    deployment: str = "Running"
    cluster: tuple[str, str, bool] = ("", "", False)
    """Name, uid and `spec.suspend` of the RayCluster."""
    suspended: bool = False
    answer: DashboardAnswer | None = None
    hung: tuple[str, dict[str, str]] = ("", {})
    """A head, and how jobs there break their log rules."""


@dataclass
class World(ResumedWorld):
    """A RayJob or RayCluster, KubeRay's operator, and the machine that resumes the job."""

    is_rayjob: bool = False
    state: RayState = field(default_factory=RayState)
    deployment: str = "Running"
    clusters: int = 1
    is_suspended: bool = False
    jobs: dict[str, set[str]] = field(default_factory=dict)
    """Ids of the jobs that run on a head, by its uid."""
    ended: dict[str, set[str]] = field(default_factory=dict)
    """Ids of the jobs that were stopped on a head, by its uid."""
    hanging: set[tuple[str, str]] = field(default_factory=set)
    """Jobs that hang: the head's uid and the job's id."""
    homes: dict[str, str] = field(default_factory=dict)
    """Uid of the RayCluster of each pod, by the pod's."""
    heard: Heard = field(default_factory=Heard)
    machine: RayResume = field(default_factory=RayResume)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reconcile()
        self.start_job(self.heads()[0], JOB.id)
        self.hear(lost=0.0)

    @property
    def name(self) -> str:
        """Name of the present RayCluster."""
        return f"ray-{self.clusters}"

    def heads(self) -> list[str]:
        """Return the uids of the head pods."""
        return [uid for uid, pod in self.pods.items() if pod.name == "head"]

    # --- the cluster

    def manage_job(self) -> None:
        """Let KubeRay's operator act, which is slow at times."""
        if self.random.random() >= 0.3:
            self.reconcile()

    def reconcile(self) -> None:
        """Act as KubeRay's operator: a suspended cluster loses its pods; of other clusters, ended
        pods are deleted and missing pods made."""
        if self.is_rayjob and self.deployment == "Retrying":
            # The RayCluster is deleted; its pods follow when they can.
            self.delete_all()
            self.clusters, self.is_suspended = self.clusters + 1, False
            self.deployment, self.version = "Initializing", self.version + 1
        if self.is_suspended:
            self.delete_all()
            return
        for uid in [uid for uid, pod in self.pods.items() if pod.phase == "Failed"]:
            self.end_pod(uid)
        self.make_missing_pods()
        for uid in self.pods:
            self.homes.setdefault(uid, f"c{self.clusters}")
        self.submit_rayjob()

    def delete_all(self) -> None:
        """Delete all pods with grace."""
        for uid in list(self.pods):
            self.delete_with_grace(uid)

    def submit_rayjob(self) -> None:
        """Submit the job of a new attempt once, as KubeRay does."""
        ready = [uid for uid in self.heads() if self.is_reachable(uid)]
        if self.is_rayjob and self.deployment == "Initializing" and ready:
            self.start_job(ready[0], JOB.id)
            self.deployment, self.version = "Running", self.version + 1

    def start_job(self, head: str, id: str) -> None:
        """Give a head a job, which no other head that lives may have."""
        for uid in self.living.keys() & self.jobs.keys() - {head}:
            assert not self.jobs[uid], f"{id} runs on {uid} and would run on {head}"
        self.jobs.setdefault(head, set()).add(id)
        assert len(self.jobs[head]) == 1, f"{self.jobs[head]} run beside each other"

    def hang(self) -> None:
        """Let the job hang where it runs."""
        self.hanging = {(head, id) for head, ids in self.jobs.items() for id in ids}

    def break_something(self) -> None:
        """Break a pod or a node, or let the job hang."""
        if self.random.random() < 0.2:
            self.hang()
        else:
            super().break_something()

    def stop(self, head: str, id: str) -> None:
        """Stop a job, as a head does that answers and does not hang itself."""
        if self.is_reachable(head) and id in self.jobs.get(head, ()) and self.random.random() < 0.7:
            self.jobs[head].discard(id)
            self.ended.setdefault(head, set()).add(id)

    # --- the machine

    def hear(self, lost: float) -> None:
        """Pass on the news of each object, but for a share that is lost."""
        hears, heard = self.random.random, self.heard
        self.hear_of_pods_and_nodes(lost)
        if hears() >= lost:
            heard.version, heard.record, heard.state = self.version, self.record, self.state
            heard.deployment = self.deployment
            heard.cluster = (self.name, f"c{self.clusters}", self.is_suspended)
        if hears() >= lost:
            heard.suspended = self.is_suspended and not self.pods
        if hears() >= lost:
            head = next(iter(self.heads()), "")
            ids = self.jobs.get(head, set())
            found = tuple(Submission(id, "{}") for id in sorted(ids))
            known = frozenset(ids | self.ended.get(head, set()))
            if self.is_reachable(head) and not self.is_rayjob:
                heard.answer = DashboardAnswer(
                    Head("head", head), known, found, begun=frozenset(ids)
                )
        if hears() >= lost:
            head = next(iter(self.heads()), "")
            found_hung = {id: "is hung" for on, id in sorted(self.hanging) if on == head}
            heard.hung = (head, found_hung)

    def picture(self) -> RayPicture:
        """Return the picture that the machine sees."""
        heard = self.heard
        name, uid, suspended = heard.cluster
        pods = tuple(pod for pod in self.heard_pods.values() if self.homes[pod.uid] == uid)
        heads = {pod.uid: Head("head", pod.uid) for pod in pods if pod.name == "head"}
        ready = [pod.uid for pod in pods if pod.name == "head" and pod.phase == "Running"]
        active = ("Running", "Initializing")
        return RayPicture(
            *("RayJob" if self.is_rayjob else "RayCluster", "ray", str(heard.version)),
            *(Resume(True, self.most), heard.record),
            is_over=self.is_rayjob and heard.deployment not in active,
            pods=pods,
            nodes={**self.nodes, **self.heard_nodes},
            is_rayjob=self.is_rayjob,
            cluster=name,
            cluster_uid=uid,
            is_running=heard.deployment == "Running",
            is_suspension_asked=suspended,
            is_cluster_suspended=heard.suspended,
            state=heard.state,
            heads=heads,
            ready=frozenset(ready),
            answer=heard.answer,
            # The logs of another head are read anew.
            hung=heard.hung[1] if ready == [heard.hung[0]] else {},
        )

    def step(self, crash: float = 0.0) -> None:
        """Let the machine look and act; the program may crash between any two acts."""
        for effect in self.machine.step(self.picture(), self.now):
            if self.random.random() < crash:
                self.machine = RayResume()
                self.heard.answer = None
                return
            if not self.carry_out(effect):
                return

    def carry_out(self, effect: object) -> bool:
        """Carry out one effect; False if the effects after it must not be carried out."""
        match effect:
            case WriteResumeRecord(record, version):
                return self.write_record(record, version)
            case WriteRayRecord(record, state, version):
                return self.write_ray_record(record, state, version)
            case DeleteResumedPod(_, uid, node, force):
                self.delete(uid, node, force)
            case AskForFence(node):
                self.ask_for_fence(node)
            case SuspendRayCluster(_, uid):
                self.is_suspended |= uid == f"c{self.clusters}"
            case BeginAgain(_, version):
                return self.begin_again(version)
            case SubmitAgain() | StopHung():
                self.ask_head(effect)
            case Say():
                pass
            case _:
                raise AssertionError(effect)
        return True

    def ask_head(self, order: SubmitAgain | StopHung) -> None:
        """Have a head stop or start a job; the edge asks it first for the jobs that it has."""
        head = order.head.uid
        if isinstance(order, StopHung):
            self.stop(head, order.job.id)
            return
        known = {base_id(one) for one in self.jobs.get(head, ())}
        is_known = order.id in self.ended.get(head, ()) or base_id(order.id) in known
        if self.is_reachable(head) and not is_known:
            self.start_job(head, order.id)

    def write_ray_record(self, record: Record, state: RayState, version: str) -> bool:
        """Write the record of the job and the state of its cluster together."""
        is_written = self.write_record(record, version)
        if is_written:
            self.state = state
        return is_written

    def begin_again(self, version: str) -> bool:
        """Write the deployment status, if nobody wrote before and there is no pod."""
        if version != str(self.version) or self.pods:
            return False
        self.deployment, self.version = "Retrying", self.version + 1
        return True

    def may_delete(self, uid: str) -> bool:
        """Return whether a decision on record is about this pod, or about all pods."""
        return super().may_delete(uid) or (self.is_rayjob and self.state.is_lost)

    def is_at_rest(self) -> bool:
        """Return whether all pods run on good nodes, and the head has the job, which does not
        hang."""
        heads = self.heads()
        if not self.all_run() or len(heads) != 1:
            return False
        ids = self.jobs.get(heads[0], set())
        return len(ids) == 1 and not any((heads[0], id) in self.hanging for id in ids)


def make_world(seed: int, most: int, is_rayjob: bool) -> World:
    """Make a head and two workers on six nodes."""
    return World(Random(seed), most, WORKERS + 4, NAMES, blind=0.2, is_rayjob=is_rayjob)


both = pytest.mark.parametrize("is_rayjob", [False, True], ids=["raycluster", "rayjob"])


@both
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_never_two_heads_with_one_job_nor_more_restarts_than_allowed(
    is_rayjob: bool, seed: int, most: int
) -> None:
    world = make_world(seed, most, is_rayjob)
    for _ in range(80):
        if world.random.random() < 0.15:
            world.break_something()
        world.pass_time(world.random.choice((0.1, 1.0, 3.0)))
        world.hear(lost=0.5)
        world.step(crash=0.1)
        if world.random.random() < 0.3:
            world.step()  # the same picture again


@both
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_after_one_fault_the_job_runs_again_with_at_most_one_restart(
    is_rayjob: bool, seed: int
) -> None:
    world = make_world(seed, 3, is_rayjob)
    for _ in range(10):
        world.pass_time(1.0)
        world.hear(lost=0.0)
        world.step()
    assert world.state.head is not None
    victim = world.random.choice(sorted(world.pods))
    is_head = world.pods[victim].name == "head"
    node = world.pods[victim].node
    assert node is not None
    is_alone = sum(pod.node == node for pod in world.pods.values()) == 1
    before = set(world.pods)
    kind = world.random.randrange(4)
    if kind < 3:
        world.break_node(node, kind)
    else:
        world.delete_with_grace(victim)
    for _ in range(120):
        world.pass_time(1.0)
        world.hear(lost=0.4)
        world.step(crash=0.05)
    assert world.is_at_rest(), world
    assert world.restarts <= 1
    assert victim not in world.pods
    if is_head:
        assert not before & set(world.pods), "all were made anew"
    elif is_alone:
        assert before - {victim} <= set(world.pods), "only the lost one was"


@both
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
@example(32633452)  # the head before had hung
def test_a_job_that_hangs_runs_again_with_one_restart(is_rayjob: bool, seed: int) -> None:
    world = make_world(seed, 3, is_rayjob)
    for _ in range(10):
        world.pass_time(1.0)
        world.hear(lost=0.0)
        world.step()
    before = set(world.pods)
    world.hang()
    for _ in range(120):
        world.pass_time(1.0)
        world.hear(lost=0.4)
        world.step(crash=0.05)
    assert world.is_at_rest(), world
    assert world.restarts == 1
    assert set(world.pods) == before or (is_rayjob and not before & set(world.pods))
