"""Pods, nodes and the cluster as the scheduler sees them, and what a selector matches. Pure.

Amounts are integers: CPU in thousandths of a core, everything else in its own unit. A pod counts on
its node from the moment it is assumed there, before the API shows it. Labels are indexed, so that a
selector finds its pods without a look at every pod.

Rules of labels, taints and tolerations: apimachinery v1.33 pkg/labels and component-helpers v1.33
scheduling/corev1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from lightkube.models import core_v1 as m
from lightkube.models.core_v1 import (
    NodeSelectorRequirement,
    NodeSelectorTerm,
    PodAffinityTerm,
    Taint,
    Toleration,
)
from lightkube.models.meta_v1 import LabelSelector
from lightkube.resources.core_v1 import Node, Pod

from unbroken.errors import SpecError
from unbroken.foreign_numbers import INT64_MIN, whole_number
from unbroken.kube.cache import Key, key_of
from unbroken.kube.conditions import ready_status
from unbroken.kube.quantity import parse_quantity
from unbroken.spec.keys import NOT_READY, UNREACHABLE, UNSCHEDULABLE

SCHEDULER = "default-scheduler"
READY_TAINTS = {"False": NOT_READY, "Unknown": UNREACHABLE}

Amounts = Mapping[str, int]
Port = tuple[str, str, int]
"""Host address, protocol, host port."""


@lru_cache(maxsize=4096)
def amount_of(resource: str, text: str) -> int:
    """A quantity, rounded up; 0 for what is none."""
    try:
        value = parse_quantity(text)
    except SpecError:
        return 0
    return math.ceil(value * 1000 if resource == "cpu" else value)


def amounts(quantities: Mapping[str, str] | None) -> dict[str, int]:
    """Return the amounts as integers."""
    return {name: amount_of(name, text) for name, text in (quantities or {}).items()}


@dataclass(frozen=True, slots=True)
class PodInfo:
    """A pod; equal infos are scheduled alike."""

    key: Key
    uid: str
    labels: Mapping[str, str]
    node: str
    """Empty: not bound yet."""
    priority: int
    created: float
    """Seconds since the epoch."""
    requests: Amounts
    may_preempt: bool = True
    tolerations: tuple[m.Toleration, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_terms: tuple[m.NodeSelectorTerm, ...] | None = None
    """Required node affinity; None: any node."""
    preferred_nodes: tuple[m.PreferredSchedulingTerm, ...] = ()
    affinity: tuple[m.PodAffinityTerm, ...] = ()
    anti_affinity: tuple[m.PodAffinityTerm, ...] = ()
    preferred_pods: tuple[tuple[int, m.PodAffinityTerm], ...] = ()
    """Weight and term; a negative weight repels."""
    spread: tuple[m.TopologySpreadConstraint, ...] = ()
    """Hard ones only."""
    ports: frozenset[Port] = frozenset()
    claims: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    scheduler: str = SCHEDULER
    nominated: str = ""
    """Node on which room is being made for the pod."""
    is_finished: bool = False
    is_deleting: bool = False
    told: tuple[str, str] | None = None
    """Reason and message of PodScheduled=False, as the pod has it."""

    @property
    def is_waiting(self) -> bool:
        """The pod is to be scheduled."""
        return not (self.node or self.is_finished or self.is_deleting)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node; equal infos are the same to every pod."""

    name: str
    labels: Mapping[str, str]
    allocatable: Amounts
    taints: tuple[m.Taint, ...] = ()


def pod_info(pod: Pod) -> PodInfo:
    """Return the parts of a pod that the scheduler needs."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    assert metadata is not None
    assert spec is not None
    affinity = spec.affinity or m.Affinity()
    nodes = affinity.nodeAffinity or m.NodeAffinity()
    required = nodes.requiredDuringSchedulingIgnoredDuringExecution
    together = affinity.podAffinity or m.PodAffinity()
    apart = affinity.podAntiAffinity or m.PodAntiAffinity()
    created = metadata.creationTimestamp
    return PodInfo(
        key=key_of(pod),
        uid=metadata.uid or "",
        labels=metadata.labels or {},
        node=spec.nodeName or "",
        priority=spec.priority or 0,
        created=created.timestamp() if created else 0.0,
        requests=pod_requests(spec),
        may_preempt=spec.preemptionPolicy != "Never",
        tolerations=tuple(spec.tolerations or ()),
        node_selector=spec.nodeSelector or {},
        node_terms=tuple(required.nodeSelectorTerms) if required else None,
        preferred_nodes=tuple(nodes.preferredDuringSchedulingIgnoredDuringExecution or ()),
        affinity=tuple(together.requiredDuringSchedulingIgnoredDuringExecution or ()),
        anti_affinity=tuple(apart.requiredDuringSchedulingIgnoredDuringExecution or ()),
        preferred_pods=_preferred(together, apart),
        spread=_hard_spread(spec),
        ports=_host_ports(spec),
        claims=_claims(spec, metadata.name or ""),
        gates=tuple(gate.name for gate in spec.schedulingGates or ()),
        scheduler=spec.schedulerName or SCHEDULER,
        nominated=(status and status.nominatedNodeName) or "",
        is_finished=bool(status and status.phase in ("Succeeded", "Failed")),
        is_deleting=metadata.deletionTimestamp is not None,
        told=_unschedulable(status),
    )


def node_info(node: Node) -> NodeInfo:
    """Return the parts of a node that the scheduler needs.

    A node that is not ready or not schedulable counts as tainted accordingly even before the
    controllers have written the taint.
    """
    metadata, spec, status = node.metadata, node.spec, node.status
    assert metadata is not None
    taints = list((spec and spec.taints) or ())
    wanted = [UNSCHEDULABLE] if spec and spec.unschedulable else []
    ready = ready_status(node) or "False"
    if ready in READY_TAINTS:
        wanted.append(READY_TAINTS[ready])
    present = {taint.key for taint in taints}
    taints += [m.Taint(effect="NoSchedule", key=key) for key in wanted if key not in present]
    allocatable = (status and (status.allocatable or status.capacity)) or {}
    return NodeInfo(metadata.name or "", metadata.labels or {}, amounts(allocatable), tuple(taints))


def pod_requests(spec: m.PodSpec) -> dict[str, int]:
    """Return a pod's largest need (component-helpers v1.33, resource.PodRequests).

    Containers and sidecars run together; each init container runs with the sidecars before it.
    """
    total: dict[str, int] = {}
    for container in spec.containers:
        _add(total, _requests(container.resources))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.initContainers or ():
        needs = _requests(container.resources)
        if container.restartPolicy == "Always":
            _add(total, needs)
            _add(sidecars, needs)
            needs = sidecars
        else:
            _add(needs, sidecars)
        _raise(peak, needs)
    _raise(total, peak)
    if spec.resources is not None:
        total.update(_requests(spec.resources))
    _add(total, amounts(spec.overhead))
    return {name: amount for name, amount in total.items() if amount}


def _requests(resources: m.ResourceRequirements | None) -> dict[str, int]:
    if resources is None:
        return {}
    # The API fills in requests from limits; an object may come from one that did not.
    return {**amounts(resources.limits), **amounts(resources.requests)}


def _add(total: dict[str, int], more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def _raise(total: dict[str, int], floor: Amounts) -> None:
    for name, amount in floor.items():
        total[name] = max(total.get(name, 0), amount)


def _preferred(
    together: m.PodAffinity, apart: m.PodAntiAffinity
) -> tuple[tuple[int, m.PodAffinityTerm], ...]:
    near = together.preferredDuringSchedulingIgnoredDuringExecution or ()
    far = apart.preferredDuringSchedulingIgnoredDuringExecution or ()
    return (
        *((term.weight, term.podAffinityTerm) for term in near),
        *((-term.weight, term.podAffinityTerm) for term in far),
    )


def _hard_spread(spec: m.PodSpec) -> tuple[m.TopologySpreadConstraint, ...]:
    return tuple(
        constraint
        for constraint in spec.topologySpreadConstraints or ()
        if constraint.whenUnsatisfiable == "DoNotSchedule"
    )


def _host_ports(spec: m.PodSpec) -> frozenset[Port]:
    return frozenset(
        (port.hostIP or "0.0.0.0", port.protocol or "TCP", port.hostPort)
        for container in spec.containers
        for port in container.ports or ()
        if port.hostPort
    )


def _claims(spec: m.PodSpec, pod_name: str) -> tuple[str, ...]:
    names = []
    for volume in spec.volumes or ():
        if volume.persistentVolumeClaim is not None:
            names.append(volume.persistentVolumeClaim.claimName)
        elif volume.ephemeral is not None:
            names.append(f"{pod_name}-{volume.name}")
    return tuple(names)


def _unschedulable(status: m.PodStatus | None) -> tuple[str, str] | None:
    for condition in (status and status.conditions) or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.reason or "", condition.message or ""
    return None


Entry = TypeVar("Entry")


@dataclass(slots=True)
class Place:
    """A node, the pods on it, and what they take."""

    node: NodeInfo | None = None
    """The node; None: pods name a node that is not known."""
    pods: dict[Key, PodInfo] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim, as far as pods wait for it."""

    is_bound: bool
    is_deleting: bool = False


class Cluster:
    """Nodes, the pods on them, and what else a decision looks at."""

    def __init__(self, nodes: Iterable[NodeInfo] = (), pods: Iterable[PodInfo] = ()) -> None:
        self.places: dict[str, Place] = {}
        self.claims: dict[Key, Claim] = {}
        self.namespaces: dict[str, Mapping[str, str]] = {}
        """Labels by name."""
        self.repelling: dict[Key, PodInfo] = {}
        """Placed pods with required anti-affinity, which concerns every later pod."""
        self.nominated: dict[Key, PodInfo] = {}
        """Waiting pods for which room is being made."""
        self._placed: dict[Key, PodInfo] = {}
        self._by_label: defaultdict[tuple[str, str, str], dict[Key, PodInfo]] = defaultdict(dict)
        self._by_namespace: defaultdict[str, dict[Key, PodInfo]] = defaultdict(dict)
        for node in nodes:
            self.set_node(node)
        for pod in pods:
            self.put_pod(pod)

    def nodes(self) -> Iterator[tuple[NodeInfo, Place]]:
        """Known nodes."""
        for place in self.places.values():
            if place.node is not None:
                yield place.node, place

    def set_node(self, node: NodeInfo) -> None:
        """Add a node or take its new state."""
        self.places.setdefault(node.name, Place()).node = node

    def remove_node(self, name: str) -> None:
        """Forget a node; pods that name it are remembered."""
        place = self.places.get(name)
        if place is not None:
            place.node = None
            self._tidy(name)

    def pod(self, key: Key) -> PodInfo | None:
        """A placed pod."""
        return self._placed.get(key)

    def put_pod(self, pod: PodInfo) -> None:
        """Count a pod on `pod.node`, where it runs or is assumed to."""
        assert pod.node, pod.key
        self.remove_pod(pod.key)
        self._placed[pod.key] = pod
        place = self.places.setdefault(pod.node, Place())
        place.pods[pod.key] = pod
        for name, amount in pod.requests.items():
            place.used[name] = place.used.get(name, 0) + amount
        self._by_namespace[pod.key.namespace][pod.key] = pod
        for label, value in pod.labels.items():
            self._by_label[pod.key.namespace, label, value][pod.key] = pod
        if pod.anti_affinity:
            self.repelling[pod.key] = pod

    def remove_pod(self, key: Key) -> None:
        """Forget a pod that is gone or done."""
        pod = self._placed.pop(key, None)
        if pod is None:
            return
        place = self.places[pod.node]
        del place.pods[key]
        for name, amount in pod.requests.items():
            place.used[name] -= amount
        self._tidy(pod.node)
        _drop(self._by_namespace, key.namespace, key)
        for label, value in pod.labels.items():
            _drop(self._by_label, (key.namespace, label, value), key)
        self.repelling.pop(key, None)

    def matching(
        self, namespaces: Collection[str], selector: LabelSelector | None
    ) -> Iterator[PodInfo]:
        """Placed pods in the namespaces whose labels the selector matches."""
        if selector is None:
            return
        for namespace in namespaces:
            pods: Mapping[Key, PodInfo] = self._by_namespace.get(namespace, {})
            for label, value in (selector.matchLabels or {}).items():
                fewer = self._by_label.get((namespace, label, value), {})
                if len(fewer) < len(pods):
                    pods = fewer
            for pod in pods.values():
                if matches_labels(selector, pod.labels):
                    yield pod

    def namespaces_of(self, term: PodAffinityTerm, owner: PodInfo) -> Collection[str]:
        """Namespaces that a term of `owner` looks at; its own if the term names none."""
        if not term.namespaces and term.namespaceSelector is None:
            return {owner.key.namespace}
        result = set(term.namespaces or ())
        if term.namespaceSelector is not None:
            selector = term.namespaceSelector
            result.update(
                name for name, labels in self.namespaces.items() if matches_labels(selector, labels)
            )
        return result

    def _tidy(self, name: str) -> None:
        place = self.places[name]
        if place.node is None and not place.pods:
            del self.places[name]


def _drop(index: dict[Entry, dict[Key, PodInfo]], entry: Entry, key: Key) -> None:
    held = index[entry]
    del held[key]
    if not held:
        del index[entry]


Labels = Mapping[str, str]


def matches_labels(selector: LabelSelector | None, labels: Labels) -> bool:
    """No selector matches nothing, an empty one everything."""
    if selector is None:
        return False
    for key, value in (selector.matchLabels or {}).items():
        if labels.get(key) != value:
            return False
    return all(
        _holds(rule.operator, labels.get(rule.key), rule.values or ())
        for rule in selector.matchExpressions or ()
    )


def matches_node(terms: Sequence[NodeSelectorTerm], labels: Labels, name: str) -> bool:
    """A node matches if one term does; a term without rules matches nothing."""
    return any(matches_term(term, labels, name) for term in terms)


def matches_term(term: NodeSelectorTerm, labels: Labels, name: str) -> bool:
    """Every rule of the term holds; metadata.name is the only field there is."""
    expressions, fields = term.matchExpressions or (), term.matchFields or ()
    if not expressions and not fields:
        return False
    return all(_matches(rule, labels) for rule in expressions) and all(
        rule.key == "metadata.name" and _holds(rule.operator, name, rule.values or ())
        for rule in fields
    )


def _matches(rule: NodeSelectorRequirement, labels: Labels) -> bool:
    return _holds(rule.operator, labels.get(rule.key), rule.values or ())


def _holds(operator: str, value: str | None, values: Sequence[str]) -> bool:
    match operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(operator, value, values)
        case _:
            return False


def _compares(operator: str, value: str | None, values: Sequence[str]) -> bool:
    present = whole_number(value or "", INT64_MIN)
    bound = whole_number(values[0], INT64_MIN) if values else None
    if present is None or bound is None:
        return False
    return present > bound if operator == "Gt" else present < bound


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Empty effect: all effects; empty key with Exists: all keys."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    # Equal, which is also what no operator means; it needs a key.
    return bool(toleration.key) and (toleration.value or "") == (taint.value or "")


def untolerated(
    taints: Iterable[Taint], tolerations: Sequence[Toleration], effects: Iterable[str]
) -> Taint | None:
    """The first taint with one of the effects that nothing tolerates."""
    for taint in taints:
        if taint.effect in effects and not any(
            tolerates(toleration, taint) for toleration in tolerations
        ):
            return taint
    return None
