"""Auto-resume of Ray against an API whose news come late, twice or never, which breaks anywhere,
and beside an operator of KubeRay's kind that deletes and makes the same pods at any moment.

The truth is kept here.  These fail the test at once: a job that runs on two heads at a time, a
restart too many, a pod deleted that no decision was about, and a force-delete of a pod whose node
may still run it.  After the faults end, the job must run on good nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.auto_resume import (
    AskForFence,
    DeleteResumedPod,
    PodNode,
    PodState,
    Readiness,
    Record,
    Say,
    WriteResumeRecord,
)
from unbroken.core.ray_resume import (
    Answer,
    BeginAgain,
    Head,
    RayPicture,
    RayResume,
    RayState,
    Submission,
    SubmitAgain,
    SuspendRayCluster,
    WriteRayRecord,
    base_id,
)
from unbroken.spec.auto_resume import Resume

WORKERS = 2
NODES = WORKERS + 4
GRACE = 5.0
SILENT = Readiness.SILENT
JOB = Submission("raysubmit_1", "{}")
NAMES = ("head", *(f"w-{number}" for number in range(WORKERS)))


@dataclass
class Told:
    """What the program has heard."""

    version: int = 1
    record: Record = field(default_factory=Record)
    state: RayState = field(default_factory=RayState)
    deployment: str = "Running"
    cluster: tuple[str, str, bool] = ("", "", False)
    """Name, uid and `spec.suspend` of the RayCluster."""
    suspended: bool = False
    pods: dict[str, PodState] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    nodes: dict[str, PodNode] = field(default_factory=dict)
    answer: Answer | None = None


@dataclass
class World:
    """What is really so."""

    random: Random
    most: int
    is_rayjob: bool
    now: float = 100.0
    version: int = 1
    record: Record = field(default_factory=Record)
    state: RayState = field(default_factory=RayState)
    deployment: str = "Running"
    clusters: int = 1
    is_cluster_there: bool = True
    is_suspended: bool = False
    nodes: dict[str, PodNode] = field(default_factory=dict)
    pods: dict[str, PodState] = field(default_factory=dict)
    """Those that the API knows, by uid."""
    living: dict[str, str] = field(default_factory=dict)
    """Node by the uid of each pod whose processes may run, known to the API or not."""
    jobs: dict[str, set[str]] = field(default_factory=dict)
    """Ids of the jobs that a head was given, by its uid."""
    homes: dict[str, str] = field(default_factory=dict)
    """Uid of the RayCluster of each pod, by the pod's."""
    uids: int = 0
    told: Told = field(default_factory=Told)
    restarts: int = 0
    machine: RayResume = field(default_factory=RayResume)

    def __post_init__(self) -> None:
        self.nodes = {f"n{index}": PodNode(f"n{index}") for index in range(NODES)}
        self.make_pods(slow=0.0)
        (head,) = (uid for uid, pod in self.pods.items() if pod.name == "head")
        self.start_job(head, JOB.id)
        self.tell(lost=0.0)

    @property
    def name(self) -> str:
        """Name of the present RayCluster."""
        return f"ray-{self.clusters}"

    # --- the cluster

    def make_pods(self, slow: float = 0.3) -> None:
        """KubeRay: a suspended cluster loses its pods; of others, ended pods are deleted and
        missing ones made.  It may be slow."""
        if self.random.random() < slow:
            return
        if self.is_rayjob and self.deployment == "Retrying":
            # The RayCluster is deleted; its pods follow when they can.
            self.leave(list(self.pods))
            self.clusters, self.is_suspended = self.clusters + 1, False
            self.deployment, self.version = "Initializing", self.version + 1
        if self.is_suspended:
            self.leave(list(self.pods))
            return
        self.leave([uid for uid, pod in self.pods.items() if pod.phase == "Failed"])
        here = {pod.name for pod in self.pods.values()}
        for name in NAMES:
            good = [n for n in self.nodes.values() if n.readiness is Readiness.READY]
            is_blind = self.random.random() < 0.2
            good = [n for n in good if not n.is_fenced and (is_blind or not n.trouble)]
            if name not in here and good:
                self.uids += 1
                uid, node = f"u{self.uids}", self.random.choice(good).name
                self.pods[uid] = PodState(name, uid, node, "Running")
                self.living[uid], self.homes[uid] = node, f"c{self.clusters}"
        self.submit_rayjob()

    def leave(self, uids: list[str]) -> None:
        """Pods are deleted with grace."""
        for uid in uids:
            pod = self.pods[uid]
            if pod.phase == "Failed":
                self.end(uid)
            elif pod.ends_by is None:
                self.pods[uid] = replace(pod, ends_by=self.now + GRACE)

    def end(self, uid: str) -> None:
        """The kubelet says that a pod has ended."""
        self.pods.pop(uid, None)
        self.living.pop(uid, None)

    def submit_rayjob(self) -> None:
        """KubeRay submits the job of a new attempt once."""
        heads = [uid for uid, pod in self.pods.items() if pod.name == "head"]
        ready = [uid for uid in heads if self.is_reachable(uid)]
        if self.is_rayjob and self.deployment == "Initializing" and ready:
            self.start_job(ready[0], JOB.id)
            self.deployment, self.version = "Running", self.version + 1

    def is_reachable(self, uid: str) -> bool:
        """True if the API knows the pod, and its processes answer."""
        pod = self.pods.get(uid)
        node = self.nodes.get((pod and pod.node) or "")
        answers = node is not None and node.readiness is Readiness.READY and not node.is_fenced
        return answers and pod is not None and pod.ends_by is None and pod.phase == "Running"

    def start_job(self, head: str, id: str) -> None:
        """A head is given a job: no other head that lives may have it."""
        for uid in self.living.keys() & self.jobs.keys() - {head}:
            assert not self.jobs[uid], f"{id} runs on {uid} and would run on {head}"
        self.jobs.setdefault(head, set()).add(id)
        assert len(self.jobs[head]) == 1, f"{self.jobs[head]} run beside each other"

    def pass_time(self, seconds: float) -> None:
        """Kubelets end what was deleted; providers fence what was asked for."""
        self.now += seconds
        for uid, pod in list(self.pods.items()):
            node = self.nodes.get(pod.node or "")
            answers = node is not None and node.readiness is Readiness.READY
            if pod.ends_by is not None and answers and self.now >= pod.ends_by - GRACE / 2:
                self.end(uid)
        for name, node in list(self.nodes.items()):
            if node.is_asked_for and self.random.random() < 0.5:
                self.nodes[name] = replace(node, is_fenced=True)
                self.power_off(name)
        self.make_pods()

    def power_off(self, name: str) -> None:
        """Nothing runs on the node any more, whatever the API knows."""
        self.living = {uid: node for uid, node in self.living.items() if node != name}

    def break_something(self) -> None:
        """A node falls silent or ill, leaves, or comes back; a pod is evicted or deleted."""
        name = self.random.choice(sorted(self.nodes)) if len(self.nodes) > 1 else None
        match self.random.randrange(6), name:
            case 0, str(found):
                self.nodes[found] = replace(self.nodes[found], readiness=SILENT)
            case 1, str(found):
                self.nodes[found] = replace(self.nodes[found], trouble="Xid79")
            case 2, str(found):
                del self.nodes[found]
                self.power_off(found)
            case 3, _ if self.pods:
                uid = self.random.choice(sorted(self.pods))
                self.pods[uid] = replace(self.pods[uid], phase="Failed", reason="Evicted")
                self.living.pop(uid, None)
            case 4, _ if self.pods:
                self.leave([self.random.choice(sorted(self.pods))])
            case _:
                self.heal()

    def heal(self) -> None:
        """Nodes come back; those that were fenced or gone have been emptied first."""
        for name in [f"n{index}" for index in range(NODES)]:
            node = self.nodes.get(name)
            if node is None or node.is_fenced:
                self.pods = {u: p for u, p in self.pods.items() if p.node != name}
                self.power_off(name)
            self.nodes[name] = PodNode(name)

    # --- the program

    def tell(self, lost: float) -> None:
        """News of each object reach the program, or do not."""
        hears, told = self.random.random, self.told
        self._tell_parts(lost)
        if hears() >= lost:
            told.version, told.record, told.state = self.version, self.record, self.state
            told.deployment = self.deployment
            told.cluster = (self.name, f"c{self.clusters}", self.is_suspended)
        if hears() >= lost:
            told.suspended = self.is_suspended and not self.pods
        if hears() >= lost:
            head = next((u for u, p in self.pods.items() if p.name == "head"), "")
            ids = self.jobs.get(head, set())
            found = tuple(Submission(id, "{}") for id in sorted(ids))
            if self.is_reachable(head) and not self.is_rayjob:
                told.answer = Answer(Head("head", head), frozenset(ids), found)

    def _tell_parts(self, lost: float) -> None:
        hears, told = self.random.random, self.told
        for uid in sorted(self.pods.keys() | told.pods.keys()):
            if hears() >= lost:
                if uid in self.pods:
                    told.pods[uid] = self.pods[uid]
                else:
                    told.pods.pop(uid, None)
        for name in sorted(self.nodes.keys() | told.nodes.keys()):
            if hears() >= lost and name in self.nodes:
                told.nodes[name] = self.nodes[name]
            elif name not in self.nodes:
                told.nodes.pop(name, None)  # that one is gone is asked of the API

    def picture(self) -> RayPicture:
        """What the program sees."""
        told = self.told
        name, uid, suspended = told.cluster
        pods = tuple(pod for pod in told.pods.values() if self.homes[pod.uid] == uid)
        heads = {pod.uid: Head("head", pod.uid) for pod in pods if pod.name == "head"}
        ready = [pod.uid for pod in pods if pod.name == "head" and pod.phase == "Running"]
        active = ("Running", "Initializing")
        return RayPicture(
            *("RayJob" if self.is_rayjob else "RayCluster", "ray", str(told.version)),
            *(Resume(True, self.most), told.record),
            is_over=self.is_rayjob and told.deployment not in active,
            pods=pods,
            nodes={**self.nodes, **told.nodes},
            is_rayjob=self.is_rayjob,
            cluster=name,
            cluster_uid=uid,
            is_running=told.deployment == "Running",
            is_suspension_asked=suspended,
            is_cluster_suspended=told.suspended,
            state=told.state,
            heads=heads,
            ready=frozenset(ready),
            answer=told.answer,
        )

    def step(self, crash: float = 0.0) -> None:
        """The program looks and acts; it may die between any two acts."""
        for effect in self.machine.step(self.picture(), self.now):
            if self.random.random() < crash:
                self.machine = RayResume()
                self.told.answer = None
                return
            if not self.carry_out(effect):
                return

    def carry_out(self, effect: object) -> bool:
        """One act, as the API takes it; False: what follows it is left undone."""
        match effect:
            case WriteResumeRecord(record, version) | WriteRayRecord(record, _, version):
                return self.write(record, version, effect)
            case DeleteResumedPod(_, uid, node, force):
                self.delete(uid, node, force)
            case AskForFence(node, _) if node in self.nodes:
                self.nodes[node] = replace(self.nodes[node], is_asked_for=True)
            case SuspendRayCluster(_, uid):
                self.is_suspended |= uid == f"c{self.clusters}"
            case BeginAgain(_, version):
                return self.begin_again(version)
            case SubmitAgain(head, _, id, _):
                # The edge looks once more at what runs there.
                known = {base_id(one) for one in self.jobs.get(head.uid, ())}
                if self.is_reachable(head.uid) and base_id(id) not in known:
                    self.start_job(head.uid, id)
            case AskForFence() | Say():
                pass
            case _:
                raise AssertionError(effect)
        return True

    def write(self, record: Record, version: str, effect: object) -> bool:
        """The annotations are written, if nobody wrote before."""
        if version != str(self.version):
            return False
        assert record.count - self.record.count in (0, 1)
        self.restarts += record.count - self.record.count
        assert self.restarts <= self.most
        self.record, self.version = record, self.version + 1
        if isinstance(effect, WriteRayRecord):
            self.state = effect.state
        return True

    def begin_again(self, version: str) -> bool:
        """The deployment status is written, if nobody wrote before and there is no pod."""
        if version != str(self.version) or self.pods:
            return False
        self.deployment, self.version = "Retrying", self.version + 1
        return True

    def delete(self, uid: str, node: str | None, force: bool) -> None:
        """As the edge does it: a node is looked at once more before a force-delete."""
        begins_again = self.is_rayjob and self.state.is_lost
        assert uid in self.record.pods or begins_again, "no decision was about this pod"
        if force:
            now = self.nodes.get(node or "")
            if now is not None and not now.is_fenced:
                return
            assert uid not in self.living, "it may still run"
        pod = self.pods.get(uid)
        if pod is None:
            return
        if force:
            self.pods.pop(uid)
        else:
            self.leave([uid])

    def is_at_rest(self) -> bool:
        """All pods run on good nodes, and the head has the job."""
        reachable = all(self.is_reachable(uid) for uid in self.pods)
        heads = [uid for uid, pod in self.pods.items() if pod.name == "head"]
        has_job = len(heads) == 1 and len(self.jobs.get(heads[0], ())) == 1
        return reachable and len(self.pods) == len(NAMES) and has_job


both = pytest.mark.parametrize("is_rayjob", [False, True], ids=["raycluster", "rayjob"])


@both
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_never_two_heads_with_one_job_nor_more_restarts_than_allowed(
    is_rayjob: bool, seed: int, most: int
) -> None:
    world = World(Random(seed), most, is_rayjob)
    for _ in range(80):
        if world.random.random() < 0.15:
            world.break_something()
        world.pass_time(world.random.choice((0.1, 1.0, 3.0)))
        world.tell(lost=0.5)
        world.step(crash=0.1)
        if world.random.random() < 0.3:
            world.step()  # told twice


@both
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_after_one_fault_the_job_runs_again_with_at_most_one_restart(
    is_rayjob: bool, seed: int
) -> None:
    world = World(Random(seed), 3, is_rayjob)
    for _ in range(10):
        world.pass_time(1.0)
        world.tell(lost=0.0)
        world.step()
    assert world.state.head is not None
    victim = world.random.choice(sorted(world.pods))
    is_head = world.pods[victim].name == "head"
    node = world.pods[victim].node
    assert node is not None
    is_alone = sum(pod.node == node for pod in world.pods.values()) == 1
    before = set(world.pods)
    match world.random.randrange(4):
        case 0:
            del world.nodes[node]
            world.power_off(node)
        case 1:
            world.nodes[node] = replace(world.nodes[node], readiness=SILENT)
        case 2:
            world.nodes[node] = replace(world.nodes[node], trouble="Xid79")
        case _:
            world.leave([victim])
    for _ in range(120):
        world.pass_time(1.0)
        world.tell(lost=0.4)
        world.step(crash=0.05)
    assert world.is_at_rest(), world
    assert world.restarts <= 1
    assert victim not in world.pods
    if is_head:
        assert not before & set(world.pods), "all were made anew"
    elif is_alone:
        assert before - {victim} <= set(world.pods), "only the lost one was"
