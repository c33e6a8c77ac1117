"""Runs PyTorchJobs where Kubeflow's operator is absent, and checks them when they are applied.

It installs the kind if it is missing.  Where Kubeflow's own operator runs, switch this program off
(`up --no-pytorchjobs`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, assert_never
from urllib.parse import quote

import yaml
from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.models.core_v1 import ContainerStatus, PodStatus
from lightkube.resources.core_v1 import Pod, Service

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.kube.cache import Key, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.errors import ApiRefusal, Conflict
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.admissions import with_templates
from unbroken.local.apiserver.http.status import Object
from unbroken.local.job_definitions import install_definition
from unbroken.log_lines import Log
from unbroken.operator.job_pods import is_owned, job_of
from unbroken.operator.kinds import job_class
from unbroken.spec.job.rules import PORT_MAX
from unbroken.spec.job_kinds import PYTORCHJOB
from unbroken.spec.keys import (
    RENDEZVOUS_PORT,
    REPLACED_PODS,
    REPLICA_INDEX_LABEL,
    REPLICA_TYPE_LABEL,
)
from unbroken.spec.kubeflow.pytorchjob import (
    CONTAINER,
    OPERATOR,
    PATH,
    PLURAL,
    PyTorchJobStatus,
    Replica,
    parse_pytorchjob,
    status_from,
    status_to,
)
from unbroken.spec.problems import Verdict

from .decisions import (
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    DeleteService,
    JobPicture,
    JobPod,
    Order,
    RecordJobEvent,
    Replaced,
    plan,
)

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


log = Log(__name__)

TAKEN_SECONDS = 5.0
"""Seconds between attempts to create a pod or service whose name another object has."""


async def run_pytorchjobs(client: KubeClient, informers: Informers) -> None:
    """Install the kind and run its jobs until cancelled; the caller runs the informers."""
    await install(client)
    recorder = EventRecorder(client, OPERATOR)
    controller = PyTorchJobs(client, informers, recorder)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.run())
        tasks.create_task(controller.run())


async def install(client: KubeClient) -> None:
    """Install the kind where it is missing, and wait until the API serves it."""
    text = resources.files(__package__).joinpath("definition.yaml").read_text()
    await install_definition(client, yaml.safe_load(text), f"{PATH}/{PLURAL}")


class PyTorchJobs:
    """Works on a job after each change of the job, its pods or its services."""

    def __init__(self, client: KubeClient, informers: Informers, recorder: EventRecorder) -> None:
        self._client = client
        self._recorder = recorder
        self._jobs = informers.of(job_class(PYTORCHJOB))
        self._pods = informers.of(Pod)
        self._services = informers.of(Service)
        self._queue: WorkQueue[Key] = WorkQueue("pytorchjobs", self._work, workers=4)

    async def run(self) -> None:
        """Work until cancelled."""
        await all_synced(self._pods, self._services, self._jobs)
        self._pods.subscribe(self._on_part)
        self._services.subscribe(self._on_part)
        self._jobs.subscribe(self._on_job)
        await self._queue.run()

    def _on_job(self, old: Job | None, new: Job | None) -> None:
        if new is not None:
            self._queue.add(key_of(new))

    def _on_part(self, old: Pod | Service | None, new: Pod | Service | None) -> None:
        item = new or old
        assert item is not None
        key = job_of(item, PYTORCHJOB)
        if key is not None:
            self._queue.add(key)

    async def _work(self, key: Key) -> float | None:
        job = self._jobs.get(key.name, key.namespace)
        if job is None:
            return None
        uid = job["metadata"]["uid"]
        pods = [pod for pod in self._pods.items() if is_owned(pod, uid)]
        services = [service for service in self._services.items() if is_owned(service, uid)]
        now = wall()
        result = plan(job_picture(job, pods, services), now, _meeting_port(pods))
        if result.status is not None:
            await self._write(job, result.status)
        if result.replaced is not None:
            annotations = replaced_annotation(result.replaced)
            await self._client.merge(
                _path(job), {"metadata": {"annotations": annotations}}, uid=uid
            )
        done = [await self._carry_out(job, order) for order in result.orders]
        waits = [] if all(done) else [TAKEN_SECONDS]
        if result.again_at is not None:
            waits.append(max(result.again_at - now, 0.0))
        return min(waits, default=None)

    async def _write(self, job: Job, status: PyTorchJobStatus) -> None:
        """Write the status if the job still has this version."""
        metadata = job["metadata"]
        path, body = f"{_path(job)}/status", {"status": status_to(status)}
        version = metadata["resourceVersion"]
        await self._client.merge_if_present(path, body, uid=metadata["uid"], version=version)
        newest, before = status.conditions[-1:], status_from(job.get("status")).conditions[-1:]
        for job_condition in newest:
            if newest != before:
                log.info(
                    "condition changed",
                    job=key_of(job),
                    condition=job_condition.type,
                    message=job_condition.message,
                )

    async def _carry_out(self, job: Job, order: Order) -> bool:
        """Carry out an order; return False if another object has the name."""
        pods = f"api/v1/namespaces/{quote(key_of(job).namespace)}/pods"
        services = f"api/v1/namespaces/{quote(key_of(job).namespace)}/services"
        match order:
            case CreatePod(name, body):
                return await self._create(job, pods, body, ("Pod", name))
            case CreateService(name, body):
                return await self._create(job, services, body, ("Service", name))
            case DeletePod(name, uid):
                if await self._delete(f"{pods}/{quote(name)}", uid):
                    self._record(job, "Normal", "SuccessfulDeletePod", f"Deleted pod: {name}")
            case DeleteService(name):
                await self._delete(f"{services}/{quote(name)}", None)
            case DeleteJob():
                await self._delete(_path(job), job["metadata"]["uid"])
            case RecordJobEvent(reason, message, is_warning):
                self._record(job, "Warning" if is_warning else "Normal", reason, message)
            case _:
                assert_never(order)
        return True

    async def _create(
        self, job: Job, path: str, body: Mapping[str, Any], what: tuple[str, str]
    ) -> bool:
        kind, name = what
        try:
            await self._client.raw("POST", path, body=body)
        except Conflict:
            return False  # it is there, or one of an earlier job, or a stranger's
        except ApiRefusal as error:
            text = f"Error creating: {error}"
            self._record(job, "Warning", f"FailedCreate{kind}", text)
            raise
        self._record(job, "Normal", f"SuccessfulCreate{kind}", f"Created {kind.lower()}: {name}")
        return True

    async def _delete(self, path: str, uid: str | None) -> bool:
        return await self._client.delete_if_present(path, uid, propagation="Background")

    def _record(self, job: Job, type: str, reason: str, message: str) -> None:
        self._recorder.record(reference_to(job), type, reason, message)


def _path(job: Job) -> str:
    key = key_of(job)
    return f"{PATH}/namespaces/{quote(key.namespace)}/{PLURAL}/{quote(key.name)}"


def _meeting_port(pods: list[Pod]) -> int:
    """Return the rendezvous port of the pods that stay, or a free port if none stays.

    A job that is restarted as a whole gets another port: old processes may still hold the old one.
    """
    for pod in pods:
        annotations = (pod.metadata and pod.metadata.annotations) or {}
        is_leaving = pod.metadata is not None and pod.metadata.deletionTimestamp is not None
        known = whole_number(annotations.get(RENDEZVOUS_PORT, ""), 1, PORT_MAX)
        if not is_leaving and known is not None:
            return known
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def admit_pytorchjob(job: Object) -> Verdict:
    """Check a PyTorchJob and the pods that it would make."""
    parsed = parse_pytorchjob(job)
    templates = (
        (f"spec.pytorchReplicaSpecs.{replica.value}.template", one.template)
        for replica, one in parsed.spec.replicas().items()
    )
    warnings, policy = parsed.warnings, parsed.spec.elastic_policy
    if policy is not None and policy.metrics:
        warnings += ("spec.elasticPolicy.metrics: this cluster makes no autoscaler",)
    return Verdict(with_templates(parsed.problems, templates), warnings)
