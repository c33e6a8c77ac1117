"""Carries out what `decisions.rayjob` plans, for every RayJob of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.generic_resource import create_namespaced_resource

from unbroken.agent_http.sessions import plain_session
from unbroken.errors import PeerError
from unbroken.kube.cache import Key, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informers import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.operator.kinds import job_class
from unbroken.spec.job_kinds import RAY_CLUSTER

from .decisions.rayjob import KIND, PLURAL, Answer, JobPicture, JobPlan, plan_job

log = logging.getLogger(__name__)

COMPONENT = "rayjob-controller"
ASK_SECONDS = 5.0
"""Longest wait for an answer of a dashboard."""
ANSWER_BYTES_MAX = 1024 * 1024
REFUSAL_BYTES_MAX = 4096
NO_ANSWER = (aiohttp.ClientError, TimeoutError, PeerError)
STATUS_CHARACTERS, MESSAGE_CHARACTERS = 64, 4096


async def run_rayjobs(client: KubeClient, informers: Informers) -> None:
    """Run RayJobs until cancelled."""
    recorder = EventRecorder(client, COMPONENT)
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with plain_session(timeout) as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.run())
        tasks.create_task(RayJobs(client, informers, recorder, Dashboard(session)).run())


class JobDetails(msgspec.Struct):
    """What a dashboard says of a job, as far as it is read."""

    status: str
    message: str | None = None
    end_time: float | None = None
    """Milliseconds since the epoch."""


class Dashboard:
    """The API of jobs that each head's dashboard has.  Answers come from a program of a user: they
    are bounded."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, url: str, job_id: str) -> Answer | None:
        """Return what the dashboard says of a job; None if it does not answer."""
        try:
            where = f"{url}/api/jobs/{quote(job_id, safe='')}"
            async with self._session.get(where) as answer:
                if answer.status == 404:
                    return Answer("")
                if answer.status != 200:
                    return None
                body = await _beginning(answer, ANSWER_BYTES_MAX)
            found = msgspec.json.decode(body, type=JobDetails)
        except (*NO_ANSWER, msgspec.MsgspecError, RecursionError) as error:
            log.debug('dashboard=%s reason="%s"', url, error)
            return None
        ended = None if found.end_time is None else found.end_time / 1000
        message = (found.message or "")[:MESSAGE_CHARACTERS]
        return Answer(found.status[:STATUS_CHARACTERS], message, ended)

    async def submit(self, url: str, body: Mapping[str, Any]) -> None:
        """Submit a job.  A refusal is logged: the next question shows that the job is unknown."""
        try:
            where = f"{url}/api/jobs/"
            async with self._session.post(where, json=body) as answer:
                if answer.status != 200:
                    said = (await _beginning(answer, REFUSAL_BYTES_MAX))[-500:]
                    log.warning("dashboard=%s status=%d refused=%r", url, answer.status, said)
        except NO_ANSWER as error:
            log.debug('dashboard=%s reason="%s"', url, error)


async def _beginning(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body, or so many bytes of it."""
    found = bytearray()
    while len(found) < most and (piece := await answer.content.read(most - len(found))):
        found += piece
    return bytes(found)


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
            answer = await self._dashboard.ask(seen.url, seen.status["jobId"])
        found = plan_job(seen, answer, wall())
        if found.status is not None:
            body = {**job, "status": found.status}
            await self._client.raw("PUT", f"{_path(key, PLURAL, key.name)}/status", body=body)
        await self._carry_out(job, seen, found)
        return found.again_seconds

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

    async def _carry_out(self, job: Job, seen: JobPicture, found: JobPlan) -> None:
        key = key_of(job)
        if found.create is not None:
            path = _path(key, RAY_CLUSTER.plural)
            if not await self._client.create_if_absent(path, found.create):
                return
        if found.delete:
            path = _path(key, RAY_CLUSTER.plural, found.delete)
            await self._client.delete_if_present(path, propagation="Background")
        if found.submit is not None:
            await self._dashboard.submit(seen.url, found.submit)
        if found.tell is not None:
            tell = found.tell
            self._recorder.record(reference_to(job), "Normal", tell.reason, tell.message)


def _path(key: Key, plural: str, name: str = "") -> str:
    path = f"{RAY_CLUSTER.path}/namespaces/{quote(key.namespace)}/{plural}"
    return f"{path}/{quote(name)}" if name else path
