"""Pods and nodes as the scheduler sees them: what a decision needs, worked out once.

Amounts are integers: CPU in thousandths of a core, everything else in its own unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from lightkube.models import core_v1 as m
from lightkube.resources.core_v1 import Node, Pod

from unbroken.errors import SpecError
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
