"""Feeds the metrics of nodes from the API."""

from __future__ import annotations

from lightkube.resources.core_v1 import Node
from prometheus_client import CollectorRegistry

from unbroken.kube.cache import changed, key_of
from unbroken.kube.informers import Informers
from unbroken.observe.node_metrics import NodeMetrics, NodeState
from unbroken.operator.jobs.views import node_view
from unbroken.operator.kinds import NodeCheckObject, NodeRecordObject
from unbroken.spec.keys import CLUSTER_NAME, INSTANCE_GROUP
from unbroken.spec.nodes.kinds import NODE_CHECK, NODE_RECORD
from unbroken.spec.nodes.values import health_of


def watch_nodes(informers: Informers, registry: CollectorRegistry, since: float) -> None:
    """Keep the metrics of nodes, their records and checks in `registry`.

    Ended repairs and checks count from `since`, in seconds since the epoch.
    """
    metrics = NodeMetrics(registry, since)

    def on_node(old: Node | None, new: Node | None) -> None:
        metrics.node(key_of(changed(old, new)).name, None if new is None else _state(new))

    def on_record(old: NodeRecordObject | None, new: NodeRecordObject | None) -> None:
        item = changed(old, new)
        record = None if new is None else NODE_RECORD.spec_of(new)[0]
        metrics.record(key_of(item).name, record)

    def on_check(old: NodeCheckObject | None, new: NodeCheckObject | None) -> None:
        item = changed(old, new)
        status = None if new is None else NODE_CHECK.status_of(new)[0]
        metrics.check(key_of(item).name, NODE_CHECK.spec_of(item)[0], status)

    informers.of(Node).subscribe(on_node)
    informers.of(NodeRecordObject).subscribe(on_record)
    informers.of(NodeCheckObject).subscribe(on_check)


def _state(node: Node) -> NodeState:
    labels = (node.metadata and node.metadata.labels) or {}
    return NodeState(
        node_view(node).is_ready,
        health_of(labels),
        labels.get(CLUSTER_NAME, ""),
        labels.get(INSTANCE_GROUP, ""),
    )
