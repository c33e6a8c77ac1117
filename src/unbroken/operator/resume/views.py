"""Readers of jobs, pods and nodes for auto-resume.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightkube.models.core_v1 import NodeCondition, PodStatus
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import Picture, PodNode, PodState, Readiness
from unbroken.operator.jobs.views import FAULTS, node_view
from unbroken.spec import keys
from unbroken.spec.auto_resume import Resume, has_annotations, resume_of, resume_problems
from unbroken.spec.job_kinds import JobKind, controller_of, names_our_runtime

from .record import read_record


def annotations_of(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of an object that is a dict."""
    return dict(job["metadata"].get("annotations") or {})


def uid_of(job: Mapping[str, Any]) -> str:
    """Return the uid of an object that is a dict."""
    return str(job["metadata"].get("uid") or "")


def concerns(job: Mapping[str, Any], default: int = 0) -> bool:
    """True if a job has an annotation of auto-resume, valid or not, or the cluster has a default.

    A TrainJob of unbroken's runtime does not concern auto-resume: it restarts by itself.
    """
    if names_our_runtime(job):
        return False
    found = annotations_of(job)
    by_operator = (keys.RESUME_SUSPENDED, keys.RESUME_DEFAULT)
    return default > 0 or has_annotations(found) or any(key in found for key in by_operator)


def picture(
    kind: JobKind,
    job: Mapping[str, Any],
    pods: Iterable[Pod],
    nodes: Mapping[str, PodNode],
    default: int = 0,
) -> Picture:
    """Return all that auto-resume needs of a job; `default` as in `resume_of`."""
    metadata, annotations = job["metadata"], annotations_of(job)
    obstacle = _obstacle(kind, job)
    is_leaving, is_suspended = bool(metadata.get("deletionTimestamp")), kind.is_suspended(job)
    ended_as = kind.end_of(job)
    problems = (obstacle,) if obstacle else resume_problems(annotations)
    return Picture(
        kind=kind.name,
        name=metadata["name"],
        version=metadata.get("resourceVersion") or "",
        resume=Resume() if obstacle else resume_of(annotations, default),
        record=read_record(annotations),
        problems=problems if has_annotations(annotations) else (),
        is_over=is_leaving or is_suspended or bool(ended_as),
        by_suspension=kind.restarts_by_suspension,
        is_suspended=is_suspended,
        is_leaving=is_leaving,
        ended_as=ended_as,
        pods=tuple(pod_state(pod) for pod in pods),
        nodes=nodes,
    )


def _obstacle(kind: JobKind, job: Mapping[str, Any]) -> str:
    """Say why a job is not resumed whatever its annotations say; empty: nothing is in the way."""
    title = f"{kind.name} {job['metadata']['name']}"
    controller = controller_of(job)
    if controller is not None:
        above, name = controller
        return (
            f"{title} is resumed with {above.name} {name}, which controls it: "
            f"only the annotations of that {above.name} count"
        )
    queue = (job["metadata"].get("labels") or {}).get(keys.QUEUE)
    if kind.restarts_by_suspension and queue:
        return (
            f"{title} is not resumed while it has the label {keys.QUEUE}: a restart would suspend "
            "it, and Kueue lets an admitted job run again at once"
        )
    return ""


def pod_state(pod: Pod) -> PodState:
    """Return what auto-resume needs of a pod."""
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
    """Return what auto-resume needs of a node."""
    view = node_view(node)
    ready = _condition(node, "Ready")
    status = ready.status if ready is not None else "Unknown"
    since = ready.lastTransitionTime if ready is not None else None
    is_ordered = view.notice is not None and view.notice.is_order
    return PodNode(
        name=view.name,
        readiness=Readiness(status) if status in ("True", "False") else Readiness.SILENT,
        not_ready_since=since.timestamp() if since is not None else 0.0,
        trouble="" if view.is_healthy and not is_ordered else _trouble(node),
        is_fenced=view.is_fenced,
    )


def _condition(node: Node, type: str) -> NodeCondition | None:
    listed = (node.status and node.status.conditions) or ()
    return next((one for one in listed if one.type == type), None)


def _trouble(node: Node) -> str:
    """Why a node counts as unhealthy."""
    for type in sorted(FAULTS):
        found = _condition(node, type)
        if found is not None and found.status == "True":
            return f"{type}: {found.reason}" if found.reason else type
    labels = (node.metadata and node.metadata.labels) or {}
    return f"{keys.HEALTH.rpartition('/')[2]} {labels.get(keys.HEALTH, '')}"
