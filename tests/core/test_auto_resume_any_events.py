"""Auto-resume against an API whose news come late, twice or never, and which breaks at any point.

The truth is kept here: a force-delete of a pod whose node may still run it, a restart too many, or
a pod deleted that no decision was about, fails the test at once.  After the faults end, the job
must come to rest with pods on good nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.auto_resume import (
    AskForFence,
    AutoResume,
    DeleteResumedPod,
    Picture,
    PodNode,
    PodState,
    Readiness,
    Record,
    Say,
    WriteResumeRecord,
)
from unbroken.spec.auto_resume import Resume

RANKS = 3
GRACE = 5.0
SILENT = Readiness.SILENT


@dataclass
class World:
    """What is really so, and what the program has heard of it."""

    random: Random
    most: int
    now: float = 100.0
    version: int = 1
    record: Record = field(default_factory=Record)
    nodes: dict[str, PodNode] = field(default_factory=dict)
    pods: dict[str, PodState] = field(default_factory=dict)
    """By uid."""
    uids: int = 0
    told_pods: dict[str, PodState] = field(default_factory=dict)
    told_nodes: dict[str, PodNode] = field(default_factory=dict)
    told_job: tuple[int, Record] = (1, Record())
    restarts: int = 0
    machine: AutoResume = field(default_factory=AutoResume)

    def __post_init__(self) -> None:
        self.nodes = {f"n{index}": PodNode(f"n{index}") for index in range(RANKS + 2)}
        self.run_job()
        self.tell(lost=0.0)

    # --- the cluster

    def run_job(self) -> None:
        """Whoever runs the job makes the pods that are missing, on nodes that take pods: some of
        those with the label only."""
        here = {pod.name for pod in self.pods.values()}
        for name in {f"w-{rank}" for rank in range(RANKS)} - here:
            good = [n for n in self.nodes.values() if n.readiness is Readiness.READY]
            is_blind = self.random.random() < 0.3
            good = [n for n in good if not n.is_fenced and (is_blind or not n.trouble)]
            if good:
                self.uids += 1
                uid, node = f"u{self.uids}", self.random.choice(good).name
                self.pods[uid] = PodState(name, uid, node, "Running")

    def pass_time(self, seconds: float) -> None:
        """Kubelets end what was deleted; providers fence what was asked for."""
        self.now += seconds
        for uid, pod in list(self.pods.items()):
            node = self.nodes.get(pod.node or "")
            answers = node is not None and node.readiness is Readiness.READY
            if pod.ends_by is not None and answers and self.now >= pod.ends_by - GRACE / 2:
                del self.pods[uid]
        for name, node in list(self.nodes.items()):
            if node.is_asked_for and self.random.random() < 0.5:
                self.nodes[name] = replace(node, is_fenced=True)
        self.run_job()

    def break_something(self) -> None:
        """A node falls silent or ill, leaves, or comes back; a pod is evicted."""
        name = self.random.choice(sorted(self.nodes)) if len(self.nodes) > 1 else None
        match self.random.randrange(5), name:
            case 0, str(found):
                self.nodes[found] = replace(self.nodes[found], readiness=SILENT)
            case 1, str(found):
                self.nodes[found] = replace(self.nodes[found], trouble="Xid79")
            case 2, str(found):
                del self.nodes[found]
            case 3, _ if self.pods:
                uid = self.random.choice(sorted(self.pods))
                self.pods[uid] = replace(self.pods[uid], phase="Failed", reason="Evicted")
            case _:
                self.heal()

    def heal(self) -> None:
        """Nodes come back; what was fenced has been emptied first, as PodGC and power do."""
        for name in [f"n{index}" for index in range(RANKS + 2)]:
            node = self.nodes.get(name)
            if node is None or node.is_fenced:
                self.pods = {u: p for u, p in self.pods.items() if p.node != name}
            self.nodes[name] = PodNode(name)

    # --- the program

    def tell(self, lost: float) -> None:
        """News of each object reach the program, or do not."""
        hears = self.random.random
        for uid in self.pods.keys() | self.told_pods.keys():
            if hears() >= lost:
                if uid in self.pods:
                    self.told_pods[uid] = self.pods[uid]
                else:
                    self.told_pods.pop(uid, None)
        for name in self.nodes.keys() | self.told_nodes.keys():
            if hears() >= lost and name in self.nodes:
                self.told_nodes[name] = self.nodes[name]
            elif name not in self.nodes:
                self.told_nodes.pop(name, None)  # that one is gone is asked of the API
        if hears() >= lost:
            self.told_job = (self.version, self.record)

    def step(self, crash: float = 0.0) -> None:
        """The program looks and acts; it may die between any two acts."""
        nodes = {**{n: self.nodes[n] for n in self.nodes}, **self.told_nodes}
        seen = Picture(
            *("PyTorchJob", "lm", str(self.told_job[0]), Resume(True, self.most), self.told_job[1]),
            pods=tuple(self.told_pods.values()),
            nodes=nodes,
        )
        for effect in self.machine.step(seen, self.now):
            if self.random.random() < crash:
                self.machine = AutoResume()
                return
            if not self.carry_out(effect):
                return

    def carry_out(self, effect: object) -> bool:
        """One act, as the API takes it; False: what follows it is left undone."""
        match effect:
            case WriteResumeRecord(record, version):
                if version != str(self.version):
                    return False
                self.restarts += record.count > self.record.count
                assert record.count - self.record.count in (0, 1)
                self.record, self.version = record, self.version + 1
            case DeleteResumedPod(_, uid, node, force):
                self.delete(uid, node, force)
            case AskForFence(node, _):
                if node in self.nodes:
                    self.nodes[node] = replace(self.nodes[node], is_asked_for=True)
            case Say():
                pass
        assert self.restarts <= self.most
        return True

    def delete(self, uid: str, node: str | None, force: bool) -> None:
        """As the edge does it: a node is looked at once more before a force-delete."""
        assert uid in self.record.pods, "no decision was about this pod"
        if force:
            now = self.nodes.get(node or "")
            if now is not None and not now.is_fenced:
                return
        pod = self.pods.get(uid)
        if pod is None:
            return
        if force or pod.phase == "Failed":
            del self.pods[uid]
        elif pod.ends_by is None:
            self.pods[uid] = replace(pod, ends_by=self.now + GRACE)

    def is_at_rest(self) -> bool:
        """All pods run on good nodes."""
        nodes = [self.nodes.get(pod.node or "") for pod in self.pods.values()]
        phases = {(pod.phase, pod.ends_by) for pod in self.pods.values()}
        good = all(n is not None and n.readiness is Readiness.READY for n in nodes)
        return good and len(nodes) == RANKS and phases == {("Running", None)}


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_never_more_restarts_than_allowed_and_no_pod_without_a_decision(
    seed: int, most: int
) -> None:
    world = World(Random(seed), most)
    for _ in range(60):
        if world.random.random() < 0.15:
            world.break_something()
        world.pass_time(world.random.choice((0.1, 1.0, 3.0)))
        world.tell(lost=0.5)
        world.step(crash=0.1)
        if world.random.random() < 0.3:
            world.step()  # told twice


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_after_one_fault_the_job_comes_to_rest_with_one_restart(seed: int) -> None:
    world = World(Random(seed), most=3)
    victim = world.random.choice(sorted(world.pods))
    node = world.pods[victim].node
    assert node is not None
    before = set(world.pods)
    kind = world.random.randrange(3)
    if kind == 0:
        del world.nodes[node]
    else:
        change = {"readiness": SILENT} if kind == 1 else {"trouble": "Xid79"}
        world.nodes[node] = replace(world.nodes[node], **change)  # type: ignore[arg-type]
    for _ in range(80):
        world.pass_time(1.0)
        world.tell(lost=0.4)
        world.step(crash=0.05)
    assert world.is_at_rest(), world.pods
    assert world.restarts == 1
    assert not before & set(world.pods), "all were made anew"
