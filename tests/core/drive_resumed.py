"""Pods and nodes of a job with auto-resume: the real ones, and those that the machine knows.

Events of an object may come late, twice or never. Pods are deleted with a grace period, which only
a kubelet that answers can end. Nodes fail and return at random.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from unbroken.core.auto_resume import PodNode, PodState, Readiness, Record

GRACE = 5.0
"""Seconds that a deleted pod has to end."""


@dataclass
class ResumedWorld:
    """The real state of nodes and pods, and the state that the machine knows."""

    random: Random
    most: int
    """Restarts that the job may have."""
    node_count: int
    names: tuple[str, ...]
    """Names of the job's pods."""
    blind: float
    """Probability that a pod may be placed on a node that is marked as faulty."""
    now: float = 100.0
    version: int = 1
    record: Record = field(default_factory=Record)
    nodes: dict[str, PodNode] = field(default_factory=dict)
    pods: dict[str, PodState] = field(default_factory=dict)
    """Pods that the API knows, by uid."""
    living: dict[str, str] = field(default_factory=dict)
    """Node of each pod whose processes may run, by the pod's uid, known to the API or not."""
    uids: int = 0
    asked: set[str] = field(default_factory=set)
    """Nodes whose fence was asked for."""
    heard_pods: dict[str, PodState] = field(default_factory=dict)
    heard_nodes: dict[str, PodNode] = field(default_factory=dict)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.nodes = {f"n{index}": PodNode(f"n{index}") for index in range(self.node_count)}

    # --- the cluster

    def make_missing_pods(self) -> None:
        """Make the pods that are missing, each on a random node that takes pods."""
        here = {pod.name for pod in self.pods.values()}
        for name in self.names:
            good = [n for n in self.nodes.values() if n.readiness is Readiness.READY]
            is_blind = self.random.random() < self.blind
            good = [n for n in good if not n.is_fenced and (is_blind or not n.trouble)]
            if name not in here and good:
                self.uids += 1
                uid, node = f"u{self.uids}", self.random.choice(good).name
                self.pods[uid] = PodState(name, uid, node, "Running")
                self.living[uid] = node

    def manage_job(self) -> None:
        """Let the controller that runs the job act once."""
        self.make_missing_pods()

    def delete_with_grace(self, uid: str) -> None:
        """Delete a pod: at once if it has ended, else when its grace is over."""
        pod = self.pods[uid]
        if pod.phase == "Failed":
            self.end_pod(uid)
        elif pod.ends_by is None:
            self.pods[uid] = replace(pod, ends_by=self.now + GRACE)

    def end_pod(self, uid: str) -> None:
        """Let the kubelet say that a pod has ended."""
        self.pods.pop(uid, None)
        self.living.pop(uid, None)

    def pass_time(self, seconds: float) -> None:
        """Let kubelets end deleted pods, and providers fence the nodes they were asked for."""
        self.now += seconds
        for uid, pod in list(self.pods.items()):
            node = self.nodes.get(pod.node or "")
            answers = node is not None and node.readiness is Readiness.READY
            if pod.ends_by is not None and answers and self.now >= pod.ends_by - GRACE / 2:
                self.end_pod(uid)
        for name, node in list(self.nodes.items()):
            if name in self.asked and self.random.random() < 0.5:
                self.asked.discard(name)
                self.nodes[name] = replace(node, is_fenced=True)
                self.power_off(name)
        self.manage_job()

    def power_off(self, name: str) -> None:
        """End all processes on a node, whatever the API knows."""
        self.living = {uid: node for uid, node in self.living.items() if node != name}

    def break_something(self) -> None:
        """Break or heal a node, or evict or delete a pod."""
        name = self.random.choice(sorted(self.nodes)) if len(self.nodes) > 1 else None
        match self.random.randrange(6), name:
            case 0, str(found):
                self.break_node(found, 0)
            case 1, str(found):
                self.break_node(found, 1)
            case 2, str(found):
                self.break_node(found, 2)
            case 3, _ if self.pods:
                uid = self.random.choice(sorted(self.pods))
                self.pods[uid] = replace(self.pods[uid], phase="Failed", reason="Evicted")
                self.living.pop(uid, None)
            case 4, _ if self.pods:
                self.delete_with_grace(self.random.choice(sorted(self.pods)))
            case _:
                self.heal()

    def break_node(self, name: str, kind: int) -> None:
        """Remove a node (0), silence it (1), or mark it as faulty (2)."""
        if kind == 0:
            del self.nodes[name]
            self.power_off(name)
        elif kind == 1:
            self.nodes[name] = replace(self.nodes[name], readiness=Readiness.SILENT)
        else:
            self.nodes[name] = replace(self.nodes[name], trouble="Xid79")

    def heal(self) -> None:
        """Bring all nodes back; those that were fenced or gone have been emptied first."""
        for name in [f"n{index}" for index in range(self.node_count)]:
            node = self.nodes.get(name)
            if node is None or node.is_fenced:
                self.pods = {u: p for u, p in self.pods.items() if p.node != name}
                self.power_off(name)
            self.nodes[name] = PodNode(name)
        self.asked.clear()

    # --- the machine

    def hear_of_pods_and_nodes(self, lost: float) -> None:
        """Pass on the news of each pod and node, but for a share that is lost."""
        hears = self.random.random
        for uid in sorted(self.pods.keys() | self.heard_pods.keys()):
            if hears() >= lost:
                if uid in self.pods:
                    self.heard_pods[uid] = self.pods[uid]
                else:
                    self.heard_pods.pop(uid, None)
        for name in sorted(self.nodes.keys() | self.heard_nodes.keys()):
            if hears() >= lost and name in self.nodes:
                self.heard_nodes[name] = self.nodes[name]
            elif name not in self.nodes:
                self.heard_nodes.pop(name, None)  # the API is asked whether a node is gone

    def write_record(self, record: Record, version: str) -> bool:
        """Write the job's record, unless somebody else has written meanwhile."""
        if version != str(self.version):
            return False
        assert record.count - self.record.count in (0, 1)
        self.restarts += record.count - self.record.count
        assert self.restarts <= self.most
        self.record, self.version = record, self.version + 1
        return True

    def ask_for_fence(self, node: str) -> None:
        """Ask the provider to fence a node that is still there."""
        if node in self.nodes:
            self.asked.add(node)

    def delete(self, uid: str, node: str | None, force: bool) -> None:
        """Delete a pod as the edge does: it looks at the node again before a force-delete."""
        assert self.may_delete(uid), "no decision was about this pod"
        if force:
            found = self.nodes.get(node or "")
            if found is not None and not found.is_fenced:
                return
            assert uid not in self.living, "it may still run"
            self.pods.pop(uid, None)
        elif uid in self.pods:
            self.delete_with_grace(uid)

    def may_delete(self, uid: str) -> bool:
        """Return whether a decision on record is about this pod."""
        return uid in self.record.pods

    def is_reachable(self, uid: str) -> bool:
        """Return whether the API knows the pod, and its processes answer."""
        pod = self.pods.get(uid)
        node = self.nodes.get((pod and pod.node) or "")
        answers = node is not None and node.readiness is Readiness.READY and not node.is_fenced
        return answers and pod is not None and pod.ends_by is None and pod.phase == "Running"

    def all_run(self) -> bool:
        """Return whether all pods are there and run on good nodes."""
        return len(self.pods) == len(self.names) and all(map(self.is_reachable, self.pods))
