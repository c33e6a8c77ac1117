"""Nodes of clusters of machines by instance type, as `hyperpod get-clusters` shows them.  Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.job_kinds import ENDED_PHASES
from unbroken.spec.keys import CLUSTER_NAME, DEEP_CHECK
from unbroken.spec.lookup import value_at
from unbroken.spec.nodes.instance_types import GPU, NEURON
from unbroken.spec.nodes.values import DeepCheck, Health, health_of, instance_type_of

Object = Mapping[str, Any]
DEVICES = (GPU, "aws.amazon.com/neurondevice", NEURON)
"""Resources that are accelerators; a node has one of them."""
ACCELERATED = ("ml.g", "ml.p", "ml.trn")
"""Beginnings of the instance types that have accelerators."""
NOT_KNOWN = "N/A"


def capacities(
    nodes: Iterable[Object], pods: Iterable[Object], names: Collection[str]
) -> list[dict[str, Any]]:
    """Return a row for each cluster and instance type; `names` empty: of all clusters."""
    groups = defaultdict(list)
    for node in nodes:
        labels = _labels(node)
        cluster = labels.get(CLUSTER_NAME, "")
        if cluster and (not names or cluster in names):
            groups[cluster, instance_type_of(labels)].append(node)
    used: Counter[str] = Counter()
    for pod in pods:
        if value_at(pod, "status", "phase") not in ENDED_PHASES:
            used[str(value_at(pod, "spec", "nodeName") or "")] += _requested(pod)
    return [row(*where, found, used) for where, found in sorted(groups.items())]


def row(
    cluster: str, type: str, nodes: Sequence[Object], used: Mapping[str, int]
) -> dict[str, Any]:
    """Return the values of a cluster's nodes of one instance type.

    `used`: accelerators that pods have requested, by node.  Nodes that take no pods have none to
    offer.
    """
    well = [node for node in nodes if health_of(_labels(node)) == Health.SCHEDULABLE.value]
    free = sum(_offered(node) - used.get(str(node["metadata"]["name"]), 0) for node in well)
    checked = [_labels(node).get(DEEP_CHECK) for node in nodes]
    return {
        "Cluster": cluster,
        "InstanceType": type,
        "TotalNodes": len(nodes),
        "AcceleratorDevicesAvailable": free if type.startswith(ACCELERATED) else NOT_KNOWN,
        "NodeHealthStatus=Schedulable": len(well),
        "DeepHealthCheckStatus=Passed": (
            checked.count(DeepCheck.PASSED.value) if None not in checked else NOT_KNOWN
        ),
    }


def _labels(thing: Object) -> Mapping[str, str]:
    return value_at(thing, "metadata", "labels") or {}


def _offered(node: Object) -> int:
    return _devices(value_at(node, "status", "allocatable"))


def _requested(pod: Object) -> int:
    containers = value_at(pod, "spec", "containers") or ()
    # A request of an accelerator is its limit.
    return sum(_devices(value_at(one, "resources", "limits")) for one in containers)


def _devices(amounts: Mapping[str, Any] | None) -> int:
    found = (whole_number(str((amounts or {}).get(name, "")), 0, INT32_MAX) for name in DEVICES)
    return next((number for number in found if number), 0)
