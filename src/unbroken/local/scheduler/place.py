"""Choice of a node for a pod, or the reasons why none fits. Pure.

The order of checks, their wording and the scores are those of kube-scheduler v1.33 with its default
plugins, as far as they concern what is modelled here.

Effects of other pods on one pod are affinity, anti-affinity and spreading. They are computed once
per decision, as topology values that are required, forbidden or too full; then each node is a few
look-ups. Rules: kube-scheduler v1.33, plugins interpodaffinity, podtopologyspread.

When no node is free, a pod may push others off a node, after kube-scheduler v1.33, plugin
defaultpreemption, without disruption budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from lightkube.models.core_v1 import PodAffinityTerm, TopologySpreadConstraint
from lightkube.models.meta_v1 import LabelSelector, LabelSelectorRequirement

from unbroken.kube.cache import Key
from unbroken.spec.keys import UNSCHEDULABLE

from .model import (
    Cluster,
    NodeInfo,
    Place,
    PodInfo,
    matches_labels,
    matches_node,
    matches_term,
    tolerates,
    untolerated,
)

NO_AFFINITY = "node(s) didn't match pod affinity rules"
NO_ANTI_AFFINITY = "node(s) didn't match pod anti-affinity rules"
REPELLED = "node(s) didn't satisfy existing pods anti-affinity rules"
NO_SPREAD = "node(s) didn't match pod topology spread constraints"
NO_SPREAD_LABEL = f"{NO_SPREAD} (missing required label)"

Domain = tuple[str, str]
"""Label of nodes and its value: all nodes that have it are one place."""


@dataclass(slots=True)
class Relations:
    """Effects of the placed pods on one that is not placed."""

    near: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    """Required affinity: label and the values at which matching pods are."""
    is_first: bool = False
    """No pod matches the affinity but this one itself: any node with the labels will do."""
    apart: set[Domain] = field(default_factory=set)
    repelled: set[Domain] = field(default_factory=set)
    spread: list[tuple[TopologySpreadConstraint, Mapping[str, int], int]] = field(
        default_factory=list
    )
    """Constraint, pods that a node's domain would have, least of any domain."""
    liking: Counter[Domain] = field(default_factory=Counter)
    """Weights of preferred affinity."""

    def refusal(self, node: NodeInfo) -> str | None:
        """Why the pod may not go to the node; None if it may."""
        labels = node.labels
        for constraint, counts, least in self.spread:
            value = labels.get(constraint.topologyKey)
            if value is None:
                return NO_SPREAD_LABEL
            if counts.get(value, 0) - least > constraint.maxSkew:
                return NO_SPREAD
        for key, values in self.near:
            value = labels.get(key)
            if value is None or (value not in values and not self.is_first):
                return NO_AFFINITY
        if self.apart and not self.apart.isdisjoint(labels.items()):
            return NO_ANTI_AFFINITY
        if self.repelled and not self.repelled.isdisjoint(labels.items()):
            return REPELLED
        return None


def relations(pod: PodInfo, cluster: Cluster, without: Collection[Key] = ()) -> Relations:
    """Return the effects of the placed pods, except those of `without`, on the place of `pod`."""
    result = Relations()
    if pod.affinity:
        _attract(result, pod, cluster, without)
    for term in pod.anti_affinity:
        result.apart |= _domains(term, pod, cluster, without)
    for other in cluster.repelling.values():
        if other.key in without or other.key == pod.key:
            continue
        for term in other.anti_affinity:
            if _concerns(term, other, pod, cluster):
                result.repelled |= _domain_of(term, other, cluster)
    for constraint in pod.spread:
        result.spread.append(_spread(constraint, pod, cluster, without))
    for weight, term in pod.preferred_pods:
        for domain in _each_domain(term, pod, cluster, without):
            result.liking[domain] += weight
    return result


def _attract(found: Relations, pod: PodInfo, cluster: Cluster, without: Collection[Key]) -> None:
    # Only a pod that matches every term attracts (interpodaffinity v1.33).
    first, *rest = pod.affinity
    matching = [
        other
        for other in cluster.matching(cluster.namespaces_of(first, pod), first.labelSelector)
        if other.key not in without and all(_concerns(term, pod, other, cluster) for term in rest)
    ]
    for term in pod.affinity:
        domains = [domain for other in matching for domain in _domain_of(term, other, cluster)]
        found.near.append((term.topologyKey, frozenset(value for _, value in domains)))
    found.is_first = not any(values for _, values in found.near) and all(
        _concerns(term, pod, pod, cluster) for term in pod.affinity
    )


def _concerns(term: PodAffinityTerm, owner: PodInfo, other: PodInfo, cluster: Cluster) -> bool:
    """True if a term of `owner` speaks of `other`."""
    return matches_labels(
        term.labelSelector, other.labels
    ) and other.key.namespace in cluster.namespaces_of(term, owner)


def _domain_of(term: PodAffinityTerm, pod: PodInfo, cluster: Cluster) -> set[Domain]:
    """Return the domain of a placed pod, in the term's topology; empty if its node has none."""
    place = cluster.places.get(pod.node)
    value = place.node.labels.get(term.topologyKey) if place and place.node else None
    return set() if value is None else {(term.topologyKey, value)}


def _each_domain(
    term: PodAffinityTerm, owner: PodInfo, cluster: Cluster, without: Collection[Key]
) -> list[Domain]:
    """Return the domains of the pods that a term selects; one for each pod."""
    return [
        domain
        for other in cluster.matching(cluster.namespaces_of(term, owner), term.labelSelector)
        if other.key not in without
        for domain in _domain_of(term, other, cluster)
    ]


def _domains(
    term: PodAffinityTerm, owner: PodInfo, cluster: Cluster, without: Collection[Key]
) -> set[Domain]:
    return set(_each_domain(term, owner, cluster, without))


def _spread(
    constraint: TopologySpreadConstraint,
    pod: PodInfo,
    cluster: Cluster,
    without: Collection[Key],
) -> tuple[TopologySpreadConstraint, Mapping[str, int], int]:
    selector = _with_own_values(constraint, pod)
    counts: dict[str, int] = {}
    eligible = {
        node.name: node.labels[constraint.topologyKey]
        for node, _ in cluster.nodes()
        if constraint.topologyKey in node.labels
        and (constraint.nodeAffinityPolicy == "Ignore" or wants_node(pod, node))
    }
    for value in eligible.values():
        counts.setdefault(value, 0)
    for other in cluster.matching({pod.key.namespace}, selector):
        if other.key not in without and not other.is_deleting and other.node in eligible:
            counts[eligible[other.node]] += 1
    least = min(counts.values(), default=0)
    if len(counts) < (constraint.minDomains or 1):
        least = 0
    own = 1 if matches_labels(selector, pod.labels) else 0
    return constraint, {value: count + own for value, count in counts.items()}, least


def _with_own_values(constraint: TopologySpreadConstraint, pod: PodInfo) -> LabelSelector | None:
    """The selector narrowed to pods with the values that this pod has for matchLabelKeys."""
    selector = constraint.labelSelector
    keys = [key for key in constraint.matchLabelKeys or () if key in pod.labels]
    if selector is None or not keys:
        return selector
    own = [
        LabelSelectorRequirement(key=key, operator="In", values=[pod.labels[key]]) for key in keys
    ]
    return LabelSelector(
        matchLabels=selector.matchLabels,
        matchExpressions=[*(selector.matchExpressions or ()), *own],
    )


def wants_node(pod: PodInfo, node: NodeInfo) -> bool:
    """The pod's node selector and required node affinity allow the node."""
    labels = node.labels
    for key, value in pod.node_selector.items():
        if labels.get(key) != value:
            return False
    return pod.node_terms is None or matches_node(pod.node_terms, labels, node.name)


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


NOT_HELPFUL = "Preemption is not helpful for scheduling"
NO_VICTIMS = "No preemption victims found for incoming pod"


@dataclass(frozen=True, slots=True)
class Preemption:
    """The node to make room on and the pods to delete there, or why it is no use."""

    node: str | None
    victims: tuple[PodInfo, ...] = ()
    explanation: str = ""
    """Text that kube-scheduler adds to its sentence."""


def preempt(pod: PodInfo, cluster: Cluster, decision: Decision) -> Preemption:
    """Find victims of lower priority for a pod that `decision` found no node for."""
    refusals = decision.refusals or {}
    if not pod.may_preempt:
        return Preemption(None, explanation="not eligible due to preemptionPolicy=Never.")
    reasons: Counter[str] = Counter()
    options: list[tuple[str, tuple[PodInfo, ...]]] = []
    for node, held in cluster.nodes():
        refusal = refusals.get(node.name)
        if refusal is None or not refusal.may_yield:
            reasons[NOT_HELPFUL] += 1
            continue
        victims = _victims(pod, node, held, cluster)
        if victims:
            options.append((node.name, victims))
        else:
            reasons[NO_VICTIMS] += 1
    if not options:
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        return Preemption(None, explanation=f"0/{len(refusals)} nodes are available: {listed}.")
    node_name, chosen = min(options, key=_cost)
    return Preemption(node_name, chosen)


def waits_for_room(pod: PodInfo, cluster: Cluster) -> bool:
    """Room is being made already: a victim of the pod has not ended yet."""
    held = cluster.places.get(pod.nominated)
    return held is not None and any(
        other.is_deleting and other.priority < pod.priority for other in held.pods.values()
    )


def _victims(pod: PodInfo, node: NodeInfo, held: Place, cluster: Cluster) -> tuple[PodInfo, ...]:
    """The pods that must go, as few and as unimportant as can be; empty if that is no use."""
    lower = [other for other in held.pods.values() if other.priority < pod.priority]
    gone: set[Key] = {other.key for other in lower}
    if not lower or not _fits(pod, node, held, cluster, gone):
        return ()
    # The most important come first, and are spared if the pod still fits; of equals the older.
    lower.sort(key=lambda other: (-other.priority, other.created))
    for other in lower:
        gone.discard(other.key)
        if not _fits(pod, node, held, cluster, gone):
            gone.add(other.key)
    return tuple(other for other in lower if other.key in gone)


def _fits(pod: PodInfo, node: NodeInfo, held: Place, cluster: Cluster, gone: set[Key]) -> bool:
    related = relations(pod, cluster, gone)
    return refuses(pod, node, held, related, cluster, gone) is None


def _cost(option: tuple[str, tuple[PodInfo, ...]]) -> tuple[int, int, int, float, str]:
    """Least important victims, then least in sum, then fewest, then youngest; then by name."""
    name, victims = option
    priorities = [victim.priority for victim in victims]
    top = [victim.created for victim in victims if victim.priority == max(priorities)]
    # Sums are shifted so that more victims never look cheaper for being negative.
    total = sum(priority + 2**31 for priority in priorities)
    return max(priorities), total, len(victims), -min(top), name
