"""The Node object and what fits on the node: pure.

Words and reasons are kubelet's (v1.33, nodestatus/setters.go, lifecycle/predicate.go).
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from unbroken.kube.clock import rfc3339
from unbroken.kube.quantity import parse_quantity
from unbroken.local.node.pods.events import Object, Rejected
from unbroken.spec.keys import NOT_ENFORCED

PODS_MAX = 110
"""Kubelet's --max-pods."""
KUBELET_VERSION = "v1.33.0"
"""The behaviour that is followed; clients compare it with the server's."""
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node for its object."""

    name: str
    address: str
    port: int
    capacity: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    first_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that others change: given where the node has none of the key."""
    taints: tuple[Mapping[str, str], ...] = ()
    """Taints of a node that joins for the first time."""
    not_enforced: tuple[str, ...] = ()
    machine_id: str = ""
    boot_id: str = ""


def labels_of(facts: NodeFacts) -> dict[str, str]:
    """Labels that every node has, and its own."""
    machines = {"x86_64": "amd64", "aarch64": "arm64"}
    arch = machines.get(platform.machine(), platform.machine())
    return {
        "kubernetes.io/hostname": facts.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": arch,
        "beta.kubernetes.io/os": "linux",
        "beta.kubernetes.io/arch": arch,
        **facts.labels,
    }


def new_node(facts: NodeFacts) -> Object:
    """The object with which a node joins."""
    metadata: Object = {"name": facts.name, "labels": {**facts.first_labels, **labels_of(facts)}}
    metadata["annotations"] = annotations_of(facts)
    spec: Object = {"providerID": f"unbroken://{facts.name}"}
    if facts.taints:
        spec["taints"] = [dict(taint) for taint in facts.taints]
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec}


def annotations_of(facts: NodeFacts) -> dict[str, str | None]:
    """Return the node's annotations; None removes."""
    return {NOT_ENFORCED: "; ".join(facts.not_enforced) or None}


def node_status(facts: NodeFacts, known: Object, now: float) -> Object:
    """The status; times of conditions that have not changed are those of `known`."""
    arch = labels_of(facts)["kubernetes.io/arch"]
    return {
        "capacity": dict(facts.capacity),
        "allocatable": dict(facts.capacity),
        "conditions": _conditions(known, now),
        "addresses": [
            {"type": "InternalIP", "address": facts.address},
            {"type": "Hostname", "address": facts.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": facts.port}},
        "nodeInfo": {
            "architecture": arch,
            "bootID": facts.boot_id,
            "containerRuntimeVersion": "unbroken://0.1",
            "kernelVersion": platform.release(),
            "kubeProxyVersion": "",
            "kubeletVersion": KUBELET_VERSION,
            "machineID": facts.machine_id,
            "operatingSystem": "linux",
            "osImage": _os_image(),
            "systemUUID": facts.machine_id,
        },
    }


def _os_image() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def _conditions(known: Object, now: float) -> list[Object]:
    wanted = (
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "has sufficient memory"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure", "has no disk pressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID", "has sufficient PID"),
        ("Ready", "True", "KubeletReady", "is posting ready status"),
    )
    before = {c["type"]: c for c in known.get("conditions") or ()}
    result = []
    for kind, status, reason, message in wanted:
        old = before.get(kind) or {}
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": f"unbroken {message}",
                "lastHeartbeatTime": rfc3339(now),
                "lastTransitionTime": since or rfc3339(now),
            }
        )
    return result


# --- what fits


def pod_requests(pod: Object) -> dict[str, Decimal]:
    """Return the resources that a pod takes of its node (resource helpers of Kubernetes,
    PodRequests).

    It is the sum of its containers and sidecars, or the need of an init container at its time if
    that is more.
    """
    spec = pod["spec"]
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or ():
        _add(total, container_requests(container))
    sidecars: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        own = container_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(total, own)
            _add(sidecars, own)
            own = dict(sidecars)
        else:
            _add(own, sidecars)
        for name, amount in own.items():
            peak[name] = max(peak.get(name, Decimal(0)), amount)
    for name, amount in peak.items():
        total[name] = max(total.get(name, Decimal(0)), amount)
    _add(total, {n: parse_quantity(a) for n, a in (spec.get("overhead") or {}).items()})
    return total


def container_requests(container: Object) -> dict[str, Decimal]:
    """Requests of a container, with limits where no request is given."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_quantity(amount) for name, amount in asked.items()}


def _add(total: dict[str, Decimal], more: Mapping[str, Decimal]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, Decimal(0)) + amount


def admission(
    pod: Object, others: Iterable[Object], allocatable: Mapping[str, str]
) -> Rejected | None:
    """Return why the pod does not fit with the others that run here; None when it does."""
    pods = list(others)
    if len(pods) >= int(allocatable.get("pods", PODS_MAX)):
        return _rejected("pods", Decimal(1), Decimal(len(pods)), allocatable)
    used: dict[str, Decimal] = {}
    for other in pods:
        _add(used, pod_requests(other))
    for name, amount in pod_requests(pod).items():
        capacity = parse_quantity(allocatable.get(name, "0"))
        if amount > 0 and used.get(name, Decimal(0)) + amount > capacity:
            return _rejected(name, amount, used.get(name, Decimal(0)), allocatable)
    return None


def _rejected(name: str, asked: Decimal, used: Decimal, allocatable: Mapping[str, str]) -> Rejected:
    # Kubelet prints whole numbers here, of cpu in thousandths.
    factor = 1000 if name == "cpu" else 1
    capacity = parse_quantity(allocatable.get(name, "0"))
    numbers = [int(amount * factor) for amount in (asked, used, capacity)]
    text = (
        f"Pod was rejected: Node didn't have enough resource: {name}, requested: {numbers[0]}, "
        f"used: {numbers[1]}, capacity: {numbers[2]}"
    )
    return Rejected(f"OutOf{name}", text)
