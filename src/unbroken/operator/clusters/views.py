"""Clusters, machines, nodes and checks of the API as `core/clusters/rules` sees them.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightkube.resources.core_v1 import Node

from unbroken.core.clusters.draft import CheckView, ClusterNode, MachineView, World
from unbroken.core.clusters.groups import node_config
from unbroken.core.clusters.state import ClusterPhase, ClusterState, read_state
from unbroken.kube.conditions import is_ready
from unbroken.spec.keys import CHECK_HOLD, DEEP_CHECK, REPAIR
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE, NODE_CHECK
from unbroken.spec.nodes.values import health_of
from unbroken.spec.times import time_seconds

Object = Mapping[str, Any]


def world_of(
    cluster: Object,
    machines: Iterable[Object],
    node_of: Callable[[str], Node | None],
    checks: Iterable[Object],
) -> tuple[World, ClusterState]:
    """Return a cluster with its machines; `node_of` finds the node of a name."""
    spec, _ = CLUSTER.spec_of(cluster)
    status, _ = CLUSTER.status_of(cluster)
    seen = [machine_view(machine) for machine in machines]
    nodes = {machine.name: node_view(machine.name, node_of(machine.name)) for machine in seen}
    result = [check_view(check) for check in checks]
    world = World(
        name=cluster["metadata"]["name"],
        spec=spec,
        phase=phase_of(status.phase),
        message=status.message,
        is_deleting=bool(cluster["metadata"].get("deletionTimestamp")),
        machines=seen,
        nodes=nodes,
        checks=[check for check in result if any(name in nodes for name in check.nodes)],
    )
    return world, read_state(status.state)


def phase_of(text: str) -> ClusterPhase:
    """Return the phase; Creating if it is none."""
    try:
        return ClusterPhase(text)
    except ValueError:
        return ClusterPhase.CREATING


def machine_view(machine: Object) -> MachineView:
    """Return the view of a Machine object."""
    spec, _ = MACHINE.spec_of(machine)
    status, _ = MACHINE.status_of(machine)
    metadata = machine["metadata"]
    return MachineView(
        metadata["name"],
        spec.logical_id,
        spec.instance_group,
        status.phase,
        status.message,
        bool(metadata.get("deletionTimestamp")),
        time_seconds(metadata["creationTimestamp"]) if metadata.get("creationTimestamp") else 0.0,
        node_config(spec),
    )


def node_view(name: str, node: Node | None) -> ClusterNode:
    """Return the view of a Node, which may not exist yet."""
    metadata = node.metadata if node is not None else None
    if node is None or metadata is None:
        return ClusterNode(name)
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    return ClusterNode(
        name,
        is_ready(node),
        health_of(labels),
        labels.get(DEEP_CHECK, ""),
        CHECK_HOLD in annotations,
        annotations.get(REPAIR, ""),
    )


def check_view(check: Object) -> CheckView:
    """Return the view of a NodeCheck object."""
    spec, _ = NODE_CHECK.spec_of(check)
    status, _ = NODE_CHECK.status_of(check)
    name = check["metadata"]["name"]
    return CheckView(name, spec.nodes, spec.kinds, status.phase, status.faulty, status.message)
