"""Nodes, pods, checks and incidents of the API as the repairer sees them.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from lightkube.models.core_v1 import NodeCondition
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.nodes.repair.events import CheckSeen, NodeFault, RepairNode
from unbroken.core.nodes.repair.records import FAULT_ANNOTATIONS
from unbroken.operator.jobs.views import FAULTS, node_view
from unbroken.spec import keys
from unbroken.spec.job_kinds import is_pod_of_a_job
from unbroken.spec.nodes.kinds import NODE_CHECK
from unbroken.spec.nodes.notices import FAULT_LABELS
from unbroken.spec.nodes.record import NodeRecordSpec, RepairRecord
from unbroken.spec.nodes.values import DeepCheck, Health, health_of
from unbroken.spec.schema.fields import fields_of
from unbroken.spec.schema.write import write_record

Object = dict[str, Any]
CONDITIONS = FAULTS | {keys.GPU_UNHEALTHY, keys.HARDWARE_UNHEALTHY}
UNINITIALIZED = "node.cloudprovider.kubernetes.io/uninitialized"
"""Taint of a new node until the cloud's controller has set its provider ID."""
MESSAGE_MAX = 300
OUR_FENCE = {"key": keys.OUT_OF_SERVICE, "value": "machine-replaced", "effect": "NoExecute"}
"""The taint of a node whose machine a provider has replaced; others use other values."""
APPEAL = ("clearedAt", "clearedBy")
"""Fields of a NodeRecord that only a person writes."""


def repair_node(node: Node) -> RepairNode:
    """Return the view of a node for the repairer."""
    metadata, view = node.metadata, node_view(node)
    assert metadata is not None
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    taints = (node.spec and node.spec.taints) or ()
    conditions = {
        node_condition.type: node_condition
        for node_condition in (node.status and node.status.conditions) or ()
    }
    ready, info = conditions.get("Ready"), node.status.nodeInfo if node.status else None
    return RepairNode(
        name=view.name,
        is_ready=view.is_ready,
        ready_at=_seconds(ready.lastTransitionTime if ready else metadata.creationTimestamp),
        is_silent=ready is not None and ready.status == "Unknown",
        is_awaited=bool(annotations.get(keys.FENCE)) and not view.is_fenced,
        is_fence_asked=keys.FENCE in annotations,
        is_fenced=any(is_our_fence(taint.to_dict()) for taint in taints),
        boot_id=(info.bootID if info else "") or "",
        uid=metadata.uid or "",
        machine=(node.spec and node.spec.providerID) or "",
        has_joined=not any(taint.key == UNINITIALIZED for taint in taints),
        cluster=labels.get(keys.CLUSTER_NAME, ""),
        rack=_rack(view.topology),
        health=_health(health_of(labels)),
        unknown_health="" if _health(health_of(labels)) else labels.get(keys.HEALTH, ""),
        has_taint=any(taint.key == keys.HEALTH for taint in taints),
        faults=_faults(conditions),
        fault_reason=labels.get(keys.FAULT_REASONS, "") or labels.get(keys.FAULT_REASONS_ALSO, ""),
        marks=frozenset(
            {key for key in (*FAULT_LABELS, keys.DEEP_CHECK) if key in labels}
            | {key for key in FAULT_ANNOTATIONS if key in annotations}
        ),
        order=annotations.get(keys.REPAIR, ""),
        advice=annotations.get(keys.ADVICE, ""),
        verified=annotations.get(keys.VERIFIED, ""),
        has_failed_check=labels.get(keys.DEEP_CHECK) == DeepCheck.FAILED.value,
        is_in_deep_check=labels.get(keys.DEEP_CHECK) == DeepCheck.IN_PROGRESS.value,
    )


def is_our_fence(taint: Mapping[str, object]) -> bool:
    """True if a taint is the out-of-service taint as the repairer sets it."""
    return taint.get("key") == keys.OUT_OF_SERVICE and taint.get("value") == OUR_FENCE["value"]


def _rack(topology: tuple[str, ...]) -> str:
    """Return the rack with its zone; else the switch nearest to the node; a zone is no rack."""
    zone, _, _, switch, rack = topology
    return f"{zone}/{rack}" if rack else switch


def _health(text: str) -> Health | None:
    try:
        return Health(text) if text else None
    except ValueError:
        return None


def _faults(conditions: Mapping[str, NodeCondition]) -> tuple[NodeFault, ...]:
    """Return the conditions that are True while the node is at fault, newest first."""
    node_faults = [
        NodeFault(
            name,
            condition.reason or name,
            _seconds(condition.lastTransitionTime),
            (condition.message or "")[:MESSAGE_MAX],
        )
        for name, condition in conditions.items()
        if name in CONDITIONS and condition.status == "True"
    ]
    return tuple(sorted(node_faults, key=lambda node_fault: (-node_fault.at, node_fault.type)))


def _seconds(at: datetime | None) -> float:
    return at.timestamp() if at is not None else 0.0


def is_of_a_job(pod: Pod) -> bool:
    """True if the pod belongs to a job and has not ended."""
    labels = (pod.metadata and pod.metadata.labels) or {}
    phase = pod.status.phase if pod.status else None
    return is_pod_of_a_job(labels, phase)


def check_seen(name: str, content: object) -> CheckSeen:
    """Return the view of a NodeCheck for the repairer."""
    status, _ = NODE_CHECK.status_of(content)
    return CheckSeen(name, status.phase, status.message, status.faulty)


def record_patch(record: NodeRecordSpec) -> Object:
    """Return a merge patch that keeps a person's part of a record, and nothing stale of ours."""
    written = write_record(record)
    ours = [field.key for field in fields_of(NodeRecordSpec) if field.key not in APPEAL]
    patch: Object = {key: written.get(key) for key in ours}
    if patch["repair"] is not None:
        # A merge goes into objects, where a value that is now empty would stay.
        patch["repair"] = {
            **dict.fromkeys(field.key for field in fields_of(RepairRecord)),
            **patch["repair"],
        }
    return {"spec": patch}
