"""Readers of PyTorchJobs and their pods for `decisions.pytorchjob`.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightkube.models.core_v1 import ContainerStatus, PodStatus
from lightkube.resources.core_v1 import Pod, Service

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.local.kubeflow.decisions.events import JobPicture, JobPod, Replaced
from unbroken.spec.keys import REPLACED_PODS, REPLICA_INDEX_LABEL, REPLICA_TYPE_LABEL
from unbroken.spec.kubeflow.pytorchjob import CONTAINER, Replica, parse_pytorchjob
from unbroken.spec.kubeflow.pytorchjob_status import status_from

REPLICAS = {replica.value.lower(): replica for replica in Replica}


def job_picture(
    job: Mapping[str, Any], pods: Iterable[Pod], services: Iterable[Service]
) -> JobPicture:
    """Return all that the decisions need of a job."""
    metadata = job["metadata"]
    return JobPicture(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        parsed=parse_pytorchjob(job),
        status=status_from(job.get("status")),
        is_leaving=bool(metadata.get("deletionTimestamp")),
        pods=tuple(_pods(pods)),
        services=frozenset(
            service.metadata.name
            for service in services
            if service.metadata and service.metadata.name
        ),
        replaced=_replaced((metadata.get("annotations") or {}).get(REPLACED_PODS, "")),
    )


def _replaced(text: str) -> Replaced:
    count, *uids = text.split() or ("0",)
    return Replaced(whole_number(count) or 0, frozenset(uids))


def replaced_annotation(replaced: Replaced) -> dict[str, str]:
    """Return the annotation to write."""
    return {REPLACED_PODS: " ".join((str(replaced.count), *sorted(replaced.latest)))}


def _pods(pods: Iterable[Pod]) -> Iterator[JobPod]:
    for pod in pods:
        metadata, status = pod.metadata, pod.status or PodStatus()
        labels = (metadata and metadata.labels) or {}
        replica = REPLICAS.get(labels.get(REPLICA_TYPE_LABEL, ""))
        index = whole_number(labels.get(REPLICA_INDEX_LABEL, ""), 0, INT32_MAX)
        if metadata is None or replica is None or index is None:
            continue
        yield JobPod(
            name=metadata.name or "",
            uid=metadata.uid or "",
            replica=replica,
            index=index,
            phase=status.phase or "Pending",
            is_leaving=metadata.deletionTimestamp is not None,
            restarts=sum(container.restartCount for container in _containers(status)),
            exit_code=_exit_code(status),
        )


def _containers(status: PodStatus) -> Iterator[ContainerStatus]:
    yield from status.initContainerStatuses or ()
    yield from status.containerStatuses or ()


def _exit_code(status: PodStatus) -> int | None:
    for container_status in status.containerStatuses or ():
        ended = container_status.state.terminated if container_status.state else None
        if container_status.name == CONTAINER and ended is not None:
            return ended.exitCode
    return None
