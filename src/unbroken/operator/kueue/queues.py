"""Jobs in Kueue's queues: each owns a Workload, and runs while that is admitted.

`core.job.kueue` decides; this module reads the objects and carries out the orders. It keeps no
state: a new operator finds everything in the Workloads. Kueue may be installed, or removed, while
this runs; without it every job runs at once. `served_version` follows which version of Kueue's API
is served, if any.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, assert_never
from urllib.parse import quote

import msgspec
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.core_v1 import Pod

from unbroken.core.job.kueue import (
    Ask,
    Gate,
    GiveBack,
    Hold,
    Move,
    QueueDecision,
    QueuedJob,
    QueueOrder,
    Report,
    Withdraw,
    decide_gate,
)
from unbroken.core.job.record.conditions import current_condition
from unbroken.kube.backoff import persist
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import pause, wall
from unbroken.kube.conditions import is_ready
from unbroken.kube.errors import AlreadyExists, ApiRefusal, NotFound
from unbroken.kube.events import reference_to
from unbroken.kube.informer import Informer, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.job_pods import JobPods
from unbroken.operator.jobs.pods import job_identity
from unbroken.operator.jobs.runner import JobResources
from unbroken.operator.kinds import JobObject
from unbroken.spec.job.codec import job_status_from
from unbroken.spec.job.types import JobSpec, queue_of, queue_warnings
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.spec.keys import JOB_LABEL, KUEUE_GROUP, QUEUE_PRIORITY, REPLICA_LABEL, WORKLOAD

from .objects import (
    FLAVORS,
    OF_KUEUE,
    OF_PODS,
    PRIORITIES,
    VERSIONS,
    WORKLOADS,
    Priority,
    pods_of,
    shape_of,
    status_after,
    workload_body,
    workload_name,
    workload_view,
)

LAG_SECONDS = 1.0
"""Seconds after which the API serves a kind whose definition is established."""


async def served_version(client: KubeClient, tasks: asyncio.TaskGroup) -> AsyncIterator[str | None]:
    """Yield the newest supported version, None without Kueue, and every later one.

    Discovery is open to every client. If the definition itself may not be read, a Kueue that is
    installed later is found at the next start.
    """
    definition = _WorkloadDefinition()
    name = f"metadata.name={WORKLOADS}.{KUEUE_GROUP}"
    watch = Informer(client, CustomResourceDefinition, fields=name, on_change=definition.changed)
    tasks.create_task(watch.run())
    told: list[str | None] = []
    while True:
        definition.change.clear()
        result = await persist("discover Kueue", lambda: _discovered(client))
        if told != [result]:
            told = [result]
            yield result
        if watch.synced.is_set() and definition.version != result:
            await pause(LAG_SECONDS)
            continue
        await definition.change.wait()


class _WorkloadDefinition:
    """Served version of Workloads, according to their definition."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.change = asyncio.Event()

    def changed(
        self, old: CustomResourceDefinition | None, new: CustomResourceDefinition | None
    ) -> None:
        """Take the definition."""
        conditions = (new.status and new.status.conditions) if new is not None else None
        is_served = any(
            condition.type == "Established" and condition.status == "True"
            for condition in conditions or ()
        )
        served = (
            {version.name for version in new.spec.versions if version.served}
            if new is not None
            else set()
        )
        self.version = next((v for v in VERSIONS if is_served and v in served), None)
        self.change.set()


async def _discovered(client: KubeClient) -> str | None:
    for version in VERSIONS:
        listed = await client.get_or_none(f"apis/{KUEUE_GROUP}/{version}", dict[str, Any])
        if listed is not None and any(item["name"] == WORKLOADS for item in listed["resources"]):
            return version
    return None


log = Log(__name__)

WORKERS = 4
LOOK_SECONDS = 0.5
"""Seconds to the next look at a job that is to stop: no event reports its operator's progress."""
OnChange = Callable[[Key], None]


class Queues:
    """The queues' decision about each job; `run` keeps it current.

    `jobs` and `pods` are copies that the caller keeps; `namespace` None: all. `on_change` is called
    with jobs whose gate may have changed; `is_idle` returns whether nothing of a job runs.
    """

    def __init__(
        self,
        shared: JobResources,
        jobs: Informer[JobObject],
        pods: Informer[Pod],
        on_change: OnChange,
        is_idle: Callable[[Key], bool],
        namespace: str | None,
    ) -> None:
        self._client = shared.client
        self._recorder = shared.recorder
        self._parsed = shared.parsed
        self._jobs = jobs
        self._pods = pods
        self._namespace = namespace
        self._version: str | None = None
        self._is_known = False
        self._workloads: Informer[Any] | None = None
        self._flavors: Informer[Any] | None = None
        self._own = JobPods(HYPERPOD_JOB)
        """Pods by job and uid."""
        self._gates: dict[str, Gate] = {}
        """Gates by the job's uid; only decided ones."""
        self._on_change = on_change
        self._is_idle = is_idle
        self._queue: WorkQueue[Key] = WorkQueue("kueue", self._look, workers=WORKERS)

    # --- questions of the operator

    def knows(self, job: JobObject) -> bool:
        """True if the queue's decision is known; if not, `on_change` will follow."""
        if not queue_of(job):
            return True
        return self._is_known and (self._version is None or _uid(job) in self._gates)

    def gate(self, job: JobObject) -> Gate:
        """Return the queue's decision about a job for which `knows` is true."""
        if not queue_of(job) or self._version is None:
            return None
        return self._gates.get(_uid(job))

    def warnings(self, job: JobObject) -> tuple[str, ...]:
        """Return warnings about parts of the job that need Kueue, if the cluster has none."""
        is_absent = self._is_known and self._version is None
        return queue_warnings(job) if is_absent else ()

    # --- life

    async def run(self, *, is_on: bool) -> None:
        """Work until cancelled.  `is_on` False: as if the cluster had no Kueue."""
        await all_synced(self._pods, self._jobs)
        if not is_on:
            self._is_known = True
            for job in self._jobs.items():
                self._on_change(key_of(job))
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._queue.run())
            self._jobs.subscribe(self._on_job)
            self._pods.subscribe(self._on_pod)
            work: asyncio.Task[None] | None = None
            async for version in served_version(self._client, tasks):
                log.info("Kueue is served" if version else "Kueue is absent", version=version)
                if work is not None:
                    work.cancel()
                self._version, self._is_known = version, version is None
                self._workloads = self._flavors = None
                work = None if version is None else tasks.create_task(self._follow(version))
                for job in self._jobs.items() if version is None else ():
                    self._on_change(key_of(job))

    async def _follow(self, version: str) -> None:
        """Keep copies of Kueue's objects."""
        workload = create_namespaced_resource(KUEUE_GROUP, version, "Workload", WORKLOADS)
        flavor = create_global_resource(KUEUE_GROUP, version, "ResourceFlavor", FLAVORS)
        workloads: Informer[Any] = Informer(
            self._client, workload, namespace=self._namespace, labels=JOB_LABEL
        )
        flavors: Informer[Any] = Informer(self._client, flavor)
        async with asyncio.TaskGroup() as tasks:
            for informer in (workloads, flavors):
                tasks.create_task(informer.run())
            await all_synced(workloads, flavors)
            self._workloads, self._flavors, self._is_known = workloads, flavors, True
            workloads.subscribe(self._on_workload)
            flavors.subscribe(self._on_flavor)
            self._ask_all()

    def _ask_all(self) -> None:
        for job in self._jobs.items():
            self._on_job(None, job)

    # --- events of the API

    def _on_job(self, old: JobObject | None, new: JobObject | None) -> None:
        for job in (old, new):
            if job is not None and (queue_of(job) or _uid(job) in self._gates):
                self._queue.add(key_of(job))
        if old is not None and (new is None or _uid(old) != _uid(new)):
            self._gates.pop(_uid(old), None)

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        key = self._own.changed(old, new)
        if key is not None:
            self._queue.add(key)

    def _on_workload(self, old: Any, new: Any) -> None:
        item = changed(old, new)
        name = (item["metadata"].get("labels") or {}).get(JOB_LABEL, "")
        self._queue.add(Key(key_of(item).namespace, name))

    def _on_flavor(self, old: Any, new: Any) -> None:
        self._ask_all()

    # --- one job

    async def _look(self, key: Key) -> float | None:
        job = self._jobs.get(key.name, key.namespace)
        if job is None or not self._is_known:
            return None
        if not queue_of(job):
            if self._gates.pop(_uid(job), None) is not None:
                self._on_change(key)
            return None
        if self._workloads is None or self._flavors is None:
            return None
        parsed = self._parsed.of(job)
        if parsed.problems:
            return None
        workload = self._workloads.get(workload_name(job_identity(job)), key.namespace)
        flavors = {key_of(flavor).name: flavor for flavor in self._flavors.items()}
        seen = None if workload is None else workload_view(workload, parsed.spec, flavors)
        before = self._gates.get(_uid(job))
        picture = self._picture(key, job, parsed.spec)
        decision = decide_gate(picture, seen, before)
        self._take(key, job, decision)
        if decision.order is not None:
            await self._carry_out(job, parsed.spec, workload, decision.order)
        must_stop = picture.is_suspended or isinstance(decision.gate, Hold)
        is_stopping = seen is not None and must_stop and not picture.is_idle
        return LOOK_SECONDS if is_stopping else None

    def _take(self, key: Key, job: JobObject, decision: QueueDecision) -> None:
        uid = _uid(job)
        is_news = uid not in self._gates or self._gates[uid] != decision.gate
        self._gates[uid] = decision.gate
        if is_news:
            log.info("decision of the queue", job=key, gate=decision.gate)
            self._on_change(key)

    def _picture(self, key: Key, job: JobObject, spec: JobSpec) -> QueuedJob:
        status, _ = job_status_from(job.get("status"))
        own = self._own.of(key, _uid(job))
        stood = current_condition(status.conditions)
        return QueuedJob(
            queue=queue_of(job),
            shape=shape_of(job, spec),
            condition=stood,
            message=status.conditions[-1].message if stood else "",
            is_suspended=spec.run_policy.suspend,
            is_deleting=bool(job["metadata"].get("deletionTimestamp")),
            is_empty=not any(map(pods_of, spec.replica_specs)),
            is_idle=not own and self._is_idle(key),
            has_own_pods=any(WORKLOAD not in _annotations(pod) for pod in own),
            are_pods_ready=_are_ready(own, spec),
        )

    async def _carry_out(
        self, job: JobObject, spec: JobSpec, found: Object | None, order: QueueOrder
    ) -> None:
        key = key_of(job)
        match order:
            case Ask():
                await self._ask(job, spec)
                return
            case Withdraw(reason):
                assert found is not None
                uid = found["metadata"]["uid"]
                if await self._client.delete_if_present(self._path(found), uid):
                    log.info("workload withdrawn", job=key, reason=reason)
            case Move():
                assert found is not None
                body = {"spec": {"queueName": queue_of(job)}}
                version = found["metadata"]["resourceVersion"]
                await self._client.merge_if_present(self._path(found), body, version=version)
            case GiveBack() | Report():
                assert found is not None
                status = status_after(found, order, wall())
                # With its resourceVersion: what Kueue has just written is not undone.
                head: Object = {"apiVersion": f"{KUEUE_GROUP}/{self._version}", "kind": "Workload"}
                body = {**found, **head, "status": status}
                with suppress(NotFound):
                    await self._client.raw("PUT", f"{self._path(found)}/status", body=body)
                    log.info(
                        "workload status written",
                        job=key,
                        workload=found["metadata"]["name"],
                        order=order,
                    )
            case _:
                assert_never(order)

    async def _ask(self, job: JobObject, spec: JobSpec) -> None:
        assert self._version is not None
        identity = job_identity(job)
        try:
            priority = await self._priority(job, spec)
            body = workload_body(job, identity, spec, self._version, priority)
            await self._client.raw("POST", self._collection(identity.namespace), body=body)
        except AlreadyExists:
            return
        except ApiRefusal as error:
            text = f"the job cannot be queued: {error}"
            self._recorder.record(reference_to(job), "Warning", "NotQueued", text)
            raise
        text = f"waits in queue {queue_of(job)} as Workload {workload_name(identity)}"
        self._recorder.record(reference_to(job), "Normal", "CreatedWorkload", text)

    async def _priority(self, job: JobObject, spec: JobSpec) -> Priority:
        """Return the priority by the job's label, else by the pods' class, else the cluster's
        default."""
        named = (job["metadata"].get("labels") or {}).get(QUEUE_PRIORITY)
        if named:
            path = f"apis/{KUEUE_GROUP}/{self._version}/{PRIORITIES}/{quote(named)}"
            return Priority(int((await self._get(path))["value"]), named, OF_KUEUE)
        classes = "apis/scheduling.k8s.io/v1/priorityclasses"
        for replica in spec.replica_specs:
            name = (replica.template.get("spec") or {}).get("priorityClassName")
            if name:
                result = await self._get(f"{classes}/{quote(name)}")
                return Priority(int(result["value"]), name, OF_PODS)
        for item in (await self._get(classes)).get("items") or ():
            if item.get("globalDefault"):
                return Priority(int(item["value"]), item["metadata"]["name"], OF_PODS)
        return Priority()

    async def _get(self, path: str) -> Object:
        result: Object = msgspec.json.decode(await self._client.raw("GET", path))
        return result

    def _collection(self, namespace: str) -> str:
        return f"apis/{KUEUE_GROUP}/{self._version}/namespaces/{quote(namespace)}/{WORKLOADS}"

    def _path(self, found: Mapping[str, Any]) -> str:
        metadata = found["metadata"]
        return f"{self._collection(metadata['namespace'])}/{quote(metadata['name'])}"


def _uid(job: Mapping[str, Any]) -> str:
    return str(job["metadata"].get("uid") or "")


def _annotations(pod: Pod) -> Mapping[str, str]:
    return (pod.metadata and pod.metadata.annotations) or {}


def _are_ready(pods: list[Pod], spec: JobSpec) -> bool:
    """True if enough pods are ready to train; a missing spare is not waited for."""
    ready = [
        (pod.metadata.labels or {}).get(REPLICA_LABEL)
        for pod in pods
        if pod.metadata and not pod.metadata.deletionTimestamp and is_ready(pod)
    ]
    return all(ready.count(replica.name) >= replica.replicas for replica in spec.replica_specs)
