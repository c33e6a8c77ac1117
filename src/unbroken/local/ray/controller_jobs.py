"""Carries out what `decisions.rayjob` plans, for every RayJob of the cluster."""

from __future__ import annotations

import asyncio
from functools import partial
from urllib.parse import quote

from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.generic_resource import create_namespaced_resource

from unbroken.kube.cache import Key, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informers import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.kinds import job_class
from unbroken.operator.resume.ray_api import Dashboard, JobDetails, Place, RefusedError
from unbroken.spec.job_kinds import RAY_CLUSTER

from .decisions.rayjob import KIND, PLURAL, Answer, JobPicture, JobPlan, plan_job
from .tokens import ray_tokens

log = Log(__name__)

COMPONENT = "rayjob-controller"
STATUS_CHARACTERS, MESSAGE_CHARACTERS = 64, 4096


async def run_rayjobs(client: KubeClient, informers: Informers, dashboard: Dashboard) -> None:
    """Run RayJobs until cancelled."""
    recorder = EventRecorder(client, COMPONENT)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.run())
        tasks.create_task(RayJobs(client, informers, recorder, dashboard).run())


def answer_of(job_details: JobDetails) -> Answer:
    """Return the bounded answer of a dashboard; the times are in seconds."""
    ended = None if job_details.end_time is None else job_details.end_time / 1000
    message = (job_details.message or "")[:MESSAGE_CHARACTERS]
    return Answer(job_details.status[:STATUS_CHARACTERS], message, ended)


class RayJobs:
    """Works on a RayJob after each change of it or its RayCluster, and while its job runs."""

    def __init__(
        self,
        client: KubeClient,
        informers: Informers,
        recorder: EventRecorder,
        dashboard: Dashboard,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._dashboard = dashboard
        self._tokens = ray_tokens(client.config)
        kind = create_namespaced_resource(RAY_CLUSTER.group, RAY_CLUSTER.version, KIND, PLURAL)
        self._jobs = informers.of(kind)
        self._clusters = informers.of(job_class(RAY_CLUSTER))
        self._queue: WorkQueue[Key] = WorkQueue(PLURAL, self._work, workers=4)

    async def run(self) -> None:
        """Work until cancelled."""
        await all_synced(self._jobs, self._clusters)
        self._clusters.subscribe(self._on_cluster)
        self._jobs.subscribe(self._on_job)
        await self._queue.run()

    def _on_job(self, old: Job | None, new: Job | None) -> None:
        if new is not None:
            self._queue.add(key_of(new))

    def _on_cluster(self, old: Job | None, new: Job | None) -> None:
        item = new or old
        assert item is not None
        for owner in item["metadata"].get("ownerReferences") or ():
            if owner["kind"] == KIND:
                self._queue.add(Key(key_of(item).namespace, owner["name"]))

    async def _work(self, key: Key) -> float | None:
        job = self._jobs.get(key.name, key.namespace)
        if job is None:
            return None
        seen = self._picture(job)
        answer = None
        if seen.url:
            answer = await self._ask(job, seen)
        job_plan = plan_job(seen, answer, wall())
        if job_plan.status is not None:
            body = {**job, "status": job_plan.status}
            await self._client.raw("PUT", f"{_path(key, PLURAL, key.name)}/status", body=body)
        await self._carry_out(job, seen, job_plan)
        return job_plan.again_seconds

    async def _ask(self, job: Job, seen: JobPicture) -> Answer | None:
        try:
            details = await self._dashboard.job(self._place(seen), seen.status["jobId"])
        except RefusedError as error:
            self._recorder.record(reference_to(job), "Warning", "DashboardRefused", str(error))
            return None
        return answer_of(details) if details is not None else None

    def _place(self, seen: JobPicture) -> Place:
        assert seen.cluster is not None
        return Place(seen.url, partial(self._tokens, seen.cluster, seen.url))

    def _picture(self, job: Job) -> JobPicture:
        metadata, status = job["metadata"], job.get("status") or {}
        name = status.get("rayClusterName")
        return JobPicture(
            *(metadata["name"], metadata["namespace"], metadata["uid"], metadata["generation"]),
            spec=job["spec"],
            status=status,
            is_leaving=bool(metadata.get("deletionTimestamp")),
            cluster=self._clusters.get(name, metadata["namespace"]) if name else None,
        )

    async def _carry_out(self, job: Job, seen: JobPicture, job_plan: JobPlan) -> None:
        key = key_of(job)
        if job_plan.create is not None:
            path = _path(key, RAY_CLUSTER.plural)
            if not await self._client.create_if_absent(path, job_plan.create):
                return
        if job_plan.delete:
            path = _path(key, RAY_CLUSTER.plural, job_plan.delete)
            await self._client.delete_if_present(path, propagation="Background")
        if job_plan.submit is not None:
            why = await self._dashboard.submit(self._place(seen), job_plan.submit)
            if why:
                log.warning("dashboard refused a job", job=key, error=why)
        if job_plan.tell is not None:
            tell = job_plan.tell
            self._recorder.record(reference_to(job), "Normal", tell.reason, tell.message)


def _path(key: Key, plural: str, name: str = "") -> str:
    path = f"{RAY_CLUSTER.path}/namespaces/{quote(key.namespace)}/{plural}"
    return f"{path}/{quote(name)}" if name else path
