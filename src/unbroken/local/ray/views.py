"""Readers of RayClusters and their pods for `decisions`.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightkube.models.core_v1 import PodSpec, PodStatus
from lightkube.resources.core_v1 import Pod, Service

from unbroken.spec.keys import RAY_HEAD

from .decisions.values import ClusterPicture, RayPod


def cluster_picture(
    cluster: Mapping[str, Any], pods: Iterable[Pod], services: Iterable[Service]
) -> ClusterPicture:
    """Return all that the decisions need of a RayCluster."""
    metadata = cluster["metadata"]
    return ClusterPicture(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        spec=cluster["spec"],
        status=cluster.get("status") or {},
        is_leaving=bool(metadata.get("deletionTimestamp")),
        pods=tuple(_pods(pods)),
        service=next((service.to_dict() for service in services), None),
    )


def _pods(pods: Iterable[Pod]) -> Iterator[RayPod]:
    for pod in pods:
        metadata, spec, status = pod.metadata, pod.spec, pod.status or PodStatus()
        if metadata is None or spec is None:
            continue
        labels, annotations = metadata.labels or {}, metadata.annotations or {}
        ready = next(
            (condition for condition in status.conditions or () if condition.type == "Ready"), None
        )
        yield RayPod(
            name=metadata.name or "",
            uid=metadata.uid or "",
            node_type=labels.get("ray.io/node-type", ""),
            group=labels.get("ray.io/group", ""),
            address=status.podIP or "",
            phase=status.phase or "Pending",
            is_leaving=metadata.deletionTimestamp is not None,
            is_ready=ready is not None and ready.status == "True",
            why_not_ready=((ready and ready.reason) or "", (ready and ready.message) or ""),
            exit_code=_exit_code(spec, status),
            restart_policy=spec.restartPolicy or "Always",
            head_uid=annotations.get(RAY_HEAD, ""),
        )


def _exit_code(spec: PodSpec, status: PodStatus) -> int | None:
    """Return the exit code of the first container, which runs Ray."""
    for container_status in status.containerStatuses or ():
        ended = container_status.state.terminated if container_status.state else None
        if container_status.name == spec.containers[0].name and ended is not None:
            return ended.exitCode
    return None
