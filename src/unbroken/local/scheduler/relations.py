"""Effects of other pods on one pod: affinity, anti-affinity and spreading. Pure.

They are computed once per decision, as topology values that are required, forbidden or too full;
then each node is a few look-ups. Rules: kube-scheduler v1.33, plugins interpodaffinity,
podtopologyspread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightkube.models.core_v1 import PodAffinityTerm, TopologySpreadConstraint
from lightkube.models.meta_v1 import LabelSelector, LabelSelectorRequirement

from unbroken.kube.cache import Key

from .cluster import Cluster
from .model import NodeInfo, PodInfo
from .selectors import matches_labels, matches_node

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
