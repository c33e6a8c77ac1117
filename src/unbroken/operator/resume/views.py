"""Jobs, their pods and nodes as auto-resume sees them; its record as annotations.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightkube.models.core_v1 import NodeCondition, PodStatus
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import Picture, PodNode, PodState, Readiness, Record
from unbroken.operator.jobs.requests import FENCE
from unbroken.operator.jobs.views import FAULTS, HEALTH_LABEL, node_view
from unbroken.spec.auto_resume import AUTO_RESUME, MAX_RETRIES, resume_of, resume_problems
from unbroken.spec.job_kinds import JobKind
from unbroken.spec.times import time_seconds, time_text

PREFIX = "unbroken.dev/auto-resume-"
COUNT, FAULT, TIME, PODS, NODES, EXHAUSTED = (
    PREFIX + name for name in ("count", "fault", "time", "pods", "nodes", "exhausted")
)
"""Annotations of a job: restarts so far; cause and time of the latest, the uids of the pods
that it removes, the nodes that were unhealthy; the cause that found no retry left."""


def annotations_of(job: Mapping[str, Any]) -> dict[str, str]:
    """The annotations of an object that is a dict."""
    return dict(job["metadata"].get("annotations") or {})


def concerns(job: Mapping[str, Any]) -> bool:
    """Whether somebody has asked for something that is ours to do."""
    found = annotations_of(job)
    return AUTO_RESUME in found or MAX_RETRIES in found


def picture(
    kind: JobKind, job: Mapping[str, Any], pods: Iterable[Pod], nodes: Mapping[str, PodNode]
) -> Picture:
    """All that is known of a job."""
    metadata, annotations = job["metadata"], annotations_of(job)
    return Picture(
        kind=kind.name,
        name=metadata["name"],
        version=metadata.get("resourceVersion") or "",
        resume=resume_of(annotations),
        record=read_record(annotations),
        problems=resume_problems(annotations),
        is_over=bool(metadata.get("deletionTimestamp"))
        or kind.is_suspended(job)
        or kind.has_ended(job),
        pods=tuple(pod_state(pod) for pod in pods),
        nodes=nodes,
    )


def pod_state(pod: Pod) -> PodState:
    """What counts of a pod."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status or PodStatus()
    assert metadata is not None
    leaves = metadata.deletionTimestamp
    return PodState(
        name=metadata.name or "",
        uid=metadata.uid or "",
        node=(spec and spec.nodeName) or None,
        phase=status.phase or "Pending",
        reason=status.reason or "",
        restarts_containers=(spec and spec.restartPolicy) != "Never",
        ends_by=leaves.timestamp() if leaves is not None else None,
    )


def node_state(node: Node) -> PodNode:
    """What counts of a node."""
    view = node_view(node)
    ready = _condition(node, "Ready")
    status = ready.status if ready is not None else "Unknown"
    since = ready.lastTransitionTime if ready is not None else None
    annotations = (node.metadata and node.metadata.annotations) or {}
    return PodNode(
        name=view.name,
        readiness=Readiness(status) if status in ("True", "False") else Readiness.SILENT,
        not_ready_since=since.timestamp() if since is not None else 0.0,
        trouble="" if view.is_healthy else _trouble(node),
        is_fenced=view.is_fenced,
        is_asked_for=bool(annotations.get(FENCE)),
    )


def _condition(node: Node, type: str) -> NodeCondition | None:
    listed = (node.status and node.status.conditions) or ()
    return next((one for one in listed if one.type == type), None)


def _trouble(node: Node) -> str:
    """Why a node is taken for unhealthy."""
    for type in sorted(FAULTS):
        found = _condition(node, type)
        if found is not None and found.status == "True":
            return f"{type}: {found.reason}" if found.reason else type
    labels = (node.metadata and node.metadata.labels) or {}
    return f"{HEALTH_LABEL.rpartition('/')[2]} {labels.get(HEALTH_LABEL, '')}"


# --- the record


def read_record(annotations: Mapping[str, str]) -> Record:
    """What the annotations say; what is garbled counts as not there."""
    count, time = annotations.get(COUNT, ""), annotations.get(TIME, "")
    try:
        at = time_seconds(time) if time else None
    except (ValueError, OverflowError):
        at = None
    return Record(
        count=int(count) if count.isascii() and count.isdecimal() and len(count) < 10 else 0,
        fault=annotations.get(FAULT, ""),
        at=at,
        pods=frozenset(annotations.get(PODS, "").split()),
        nodes=frozenset(annotations.get(NODES, "").split()),
        exhausted=annotations.get(EXHAUSTED, ""),
    )


def write_record(record: Record) -> dict[str, str | None]:
    """The annotations as a merge patch: None takes one away."""
    return {
        COUNT: str(record.count),
        FAULT: record.fault or None,
        TIME: None if record.at is None else time_text(record.at),
        PODS: " ".join(sorted(record.pods)) or None,
        NODES: " ".join(sorted(record.nodes)) or None,
        EXHAUSTED: record.exhausted or None,
    }
