"""Choice of a node for a pod, or the reasons why none fits. Pure.

The order of checks, their wording and the scores are those of kube-scheduler v1.33 with its default
plugins, as far as they concern what is modelled here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from unbroken.kube.cache import Key
from unbroken.spec.keys import UNSCHEDULABLE

from .cluster import Cluster, Place
from .model import NodeInfo, PodInfo
from .relations import Relations, relations, wants_node
from .selectors import matches_term, tolerates, untolerated

NOT_WANTED = "node(s) didn't match Pod's node affinity/selector"
PORTS_TAKEN = "node(s) didn't have free ports for the requested pod ports"
TOO_MANY_PODS = "Too many pods"
UNBOUND_CLAIMS = "pod has unbound immediate PersistentVolumeClaims"

MISSING_MAX = 3
"""Missing labels that are named."""

HARD_EFFECTS = ("NoSchedule", "NoExecute")

TAINT_WEIGHT, NODE_WEIGHT, POD_WEIGHT = 3, 2, 2
"""kube-scheduler v1.33 default_plugins.go; least-allocated has 1."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one node will not do."""

    reasons: tuple[str, ...]
    may_yield: bool
    """Removing pods from the node might help."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A node, or for every node the reason against it."""

    node: str | None = None
    refusals: Mapping[str, Refusal] | None = None
    """Refusals by node; only if no node fits."""
    obstacle: str = ""
    """The reason that keeps the pod from every node."""
    missing: tuple[str, ...] = ()
    """Labels (KEY=VALUE) that the pod requires and no node has."""

    def sentence(self) -> str:
        """Return kube-scheduler's sentence: 0/3 nodes are available: 1 Too many pods, 2 ...

        Sentences about missing labels follow it: here a user gives nodes their labels.
        """
        refusals = self.refusals or {}
        if self.obstacle:
            return f"0/{len(refusals)} nodes are available: {self.obstacle}."
        if not refusals:
            return "no nodes available to schedule pods"
        counts = Counter(reason for refusal in refusals.values() for reason in refusal.reasons)
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
        missing = "".join(f" No node has the label {label}." for label in self.missing)
        return f"0/{len(refusals)} nodes are available: {listed}.{missing}"


def place(pod: PodInfo, cluster: Cluster) -> Decision:
    """Choose a node for a pod that has none."""
    obstacle = claim_obstacle(pod, cluster)
    if obstacle:
        fixed = Refusal((obstacle,), may_yield=False)
        return Decision(None, {node.name: fixed for node, _ in cluster.nodes()}, obstacle)
    related = relations(pod, cluster)
    refusals: dict[str, Refusal] = {}
    fitting: list[tuple[NodeInfo, Place]] = []
    for node, held in cluster.nodes():
        refusal = refuses(pod, node, held, related, cluster)
        if refusal is None:
            fitting.append((node, held))
        else:
            refusals[node.name] = refusal
    if not fitting:
        return Decision(None, refusals, missing=missing_labels(pod, cluster))
    return Decision(best(pod, fitting, related))


def missing_labels(pod: PodInfo, cluster: Cluster) -> tuple[str, ...]:
    """Return labels (KEY=VALUE) that the pod requires of its node and no node has, a few."""
    terms = pod.node_terms or ()
    rules = terms[0].matchExpressions or () if len(terms) == 1 else ()
    wanted = [(key, [value]) for key, value in pod.node_selector.items()]
    wanted += [(rule.key, rule.values or []) for rule in rules if rule.operator == "In"]
    nodes = [node for node, _ in cluster.nodes()]
    found = (
        f"{key}={values[0]}"
        for key, values in wanted
        if values and not any(node.labels.get(key) in values for node in nodes)
    )
    return tuple(islice(found, MISSING_MAX))


def claim_obstacle(pod: PodInfo, cluster: Cluster) -> str:
    """Return the problem of the pod's PersistentVolumeClaims; empty if there is none."""
    for name in pod.claims:
        claim = cluster.claims.get(Key(pod.key.namespace, name))
        if claim is None:
            return f'persistentvolumeclaim "{name}" not found'
        if claim.is_deleting:
            return f'persistentvolumeclaim "{name}" is being deleted'
        if not claim.is_bound:
            return UNBOUND_CLAIMS
    return ""


def refuses(
    pod: PodInfo,
    node: NodeInfo,
    held: Place,
    related: Relations,
    cluster: Cluster,
    without: Collection[Key] = (),
) -> Refusal | None:
    """Why a node will not do, were the pods of `without` not there; None: it will."""
    taint = untolerated(node.taints, pod.tolerations, HARD_EFFECTS)
    if taint is not None:
        if taint.key == UNSCHEDULABLE:
            return Refusal(("node(s) were unschedulable",), may_yield=False)
        shown = f"{{{taint.key}: {taint.value or ''}}}"
        return Refusal((f"node(s) had untolerated taint {shown}",), may_yield=False)
    if not wants_node(pod, node):
        return Refusal((NOT_WANTED,), may_yield=False)
    if pod.ports and _ports_taken(pod, held, without):
        return Refusal((PORTS_TAKEN,), may_yield=True)
    lacking = _lacking(pod, node, held, cluster, without)
    if lacking:
        # A node that is too small for the pod stays so without any other pod.
        small = any(amount > node.allocatable.get(name, 0) for name, amount in pod.requests.items())
        return Refusal(lacking, may_yield=not small)
    reason = related.refusal(node)
    return None if reason is None else Refusal((reason,), may_yield=True)


def _ports_taken(pod: PodInfo, held: Place, without: Collection[Key]) -> bool:
    for other in held.pods.values():
        if other.key in without:
            continue
        for address, protocol, port in other.ports:
            for wanted, wanted_protocol, wanted_port in pod.ports:
                same = (protocol, port) == (wanted_protocol, wanted_port)
                if same and (address == wanted or "0.0.0.0" in (address, wanted)):
                    return True
    return False


def _lacking(
    pod: PodInfo, node: NodeInfo, held: Place, cluster: Cluster, without: Collection[Key]
) -> tuple[str, ...]:
    used: Mapping[str, int] = held.used
    pods = len(held.pods)
    gone = [held.pods[key] for key in without if key in held.pods]
    coming = [
        other
        for other in cluster.nominated.values()
        if other.nominated == node.name
        and other.key != pod.key
        and other.priority >= pod.priority
        and other.key not in held.pods
    ]
    if gone or coming:
        adjusted = dict(used)
        for sign, group in ((-1, gone), (1, coming)):
            for other in group:
                pods += sign
                for name, amount in other.requests.items():
                    adjusted[name] = adjusted.get(name, 0) + sign * amount
        used = adjusted
    allocatable = node.allocatable
    reasons = []
    if pods + 1 > allocatable.get("pods", 0):
        reasons.append(TOO_MANY_PODS)
    for name, amount in pod.requests.items():
        if amount > allocatable.get(name, 0) - used.get(name, 0):
            reasons.append(f"Insufficient {name}")
    return tuple(reasons)


def best(pod: PodInfo, fitting: list[tuple[NodeInfo, Place]], related: Relations) -> str:
    """The node with the highest score; of equals the one with fewest pods, then by name."""
    if len(fitting) == 1:
        return fitting[0][0].name
    dislikes = _normal([-_soft_taints(pod, node) for node, _ in fitting])
    preferred = _normal([_preference(pod, node) for node, _ in fitting])
    liked = _normal([_liking(node, related) for node, _ in fitting])
    scored = []
    for index, (node, held) in enumerate(fitting):
        score = (
            _free(pod, node, held)
            + TAINT_WEIGHT * dislikes[index]
            + NODE_WEIGHT * preferred[index]
            + POD_WEIGHT * liked[index]
        )
        scored.append((-score, len(held.pods), node.name))
    return min(scored)[2]


def _free(pod: PodInfo, node: NodeInfo, held: Place) -> int:
    """Share of CPU and memory left with the pod there, in percent (least-allocated)."""
    total = 0
    for name in ("cpu", "memory"):
        capacity = node.allocatable.get(name, 0)
        if capacity:
            left = capacity - held.used.get(name, 0) - pod.requests.get(name, 0)
            total += max(0, left * 100 // capacity)
    return total // 2


def _soft_taints(pod: PodInfo, node: NodeInfo) -> int:
    return sum(
        taint.effect == "PreferNoSchedule"
        and not any(tolerates(toleration, taint) for toleration in pod.tolerations)
        for taint in node.taints
    )


def _preference(pod: PodInfo, node: NodeInfo) -> int:
    return sum(
        term.weight
        for term in pod.preferred_nodes
        if matches_term(term.preference, node.labels, node.name)
    )


def _liking(node: NodeInfo, related: Relations) -> int:
    if not related.liking:
        return 0
    return sum(related.liking[domain] for domain in node.labels.items() if domain in related.liking)


def _normal(values: list[int]) -> list[int]:
    """Spread from 0 to 100; all 0 where there is no difference."""
    low, high = min(values), max(values)
    if low == high:
        return [0] * len(values)
    return [(value - low) * 100 // (high - low) for value in values]
