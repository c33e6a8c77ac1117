"""Runs RayClusters and RayJobs where KubeRay's operator is absent, with the tokens of their heads.

It installs KubeRay's kinds if they are missing.  Where KubeRay's own operator runs, switch this
program off (`up --no-ray`).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.generic_resource import GenericNamespacedResource as Cluster
from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.core_v1 import PodSpec, PodStatus
from lightkube.resources.core_v1 import Pod, Secret, Service

from unbroken.agent_http.sessions import plain_session
from unbroken.errors import WorldError
from unbroken.kube.cache import Key, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.errors import ApiRefusal, Conflict
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.job_definitions import install_definition
from unbroken.local.listeners import strangers
from unbroken.log_lines import Log
from unbroken.operator.job_pods import is_owned, job_of
from unbroken.operator.kinds import job_class
from unbroken.operator.resume.ray_dashboard import (
    Dashboard,
    DashboardAddress,
    JobDetails,
    RefusedError,
    Tokens,
)
from unbroken.spec.job_kinds import RAY_CLUSTER
from unbroken.spec.keys import RAY_HEAD

from .decisions.pods import DASHBOARD_PORT
from .decisions.raycluster import plan
from .decisions.rayjob import KIND, PLURAL, Answer, JobPicture, JobPlan, plan_job
from .decisions.values import (
    Access,
    ClusterPicture,
    Create,
    DeletePod,
    Order,
    RayPod,
    RecordClusterEvent,
    access_body,
    is_autoscaled,
    token_body,
    token_of,
)


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


log = Log(__name__)

JOB_COMPONENT = "rayjob-controller"
STATUS_CHARACTERS, MESSAGE_CHARACTERS = 64, 4096


async def run_rayjobs(client: KubeClient, informers: Informers, dashboard: Dashboard) -> None:
    """Run RayJobs until cancelled."""
    recorder = EventRecorder(client, JOB_COMPONENT)
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
            await self._client.raw("PUT", f"{_job_path(key, PLURAL, key.name)}/status", body=body)
        await self._carry_out(job, seen, job_plan)
        return job_plan.again_seconds

    async def _ask(self, job: Job, seen: JobPicture) -> Answer | None:
        try:
            details = await self._dashboard.job(self._place(seen), seen.status["jobId"])
        except RefusedError as error:
            self._recorder.record(reference_to(job), "Warning", "DashboardRefused", str(error))
            return None
        return answer_of(details) if details is not None else None

    def _place(self, seen: JobPicture) -> DashboardAddress:
        assert seen.cluster is not None
        return DashboardAddress(seen.url, partial(self._tokens, seen.cluster, seen.url))

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
            path = _job_path(key, RAY_CLUSTER.plural)
            if not await self._client.create_if_absent(path, job_plan.create):
                return
        if job_plan.delete:
            path = _job_path(key, RAY_CLUSTER.plural, job_plan.delete)
            await self._client.delete_if_present(path, propagation="Background")
        if job_plan.submit is not None:
            why = await self._dashboard.submit(self._place(seen), job_plan.submit)
            if why:
                log.warning("dashboard refused a job", job=key, error=why)
        if job_plan.tell is not None:
            tell = job_plan.tell
            self._recorder.record(reference_to(job), "Normal", tell.reason, tell.message)


def _job_path(key: Key, plural: str, name: str = "") -> str:
    path = f"{RAY_CLUSTER.path}/namespaces/{quote(key.namespace)}/{plural}"
    return f"{path}/{quote(name)}" if name else path


COMPONENT = "raycluster-controller"
ASK_SECONDS = 5.0
"""Longest wait for an answer of a dashboard."""
SILENCE_SECONDS = 15.0
"""Seconds until a head that did not answer is asked again whether it wants a token."""
TAKEN_SECONDS = 2.0
"""Seconds between attempts to create a pod whose name one that is being deleted still has."""


async def run_ray(client: KubeClient, informers: Informers) -> None:
    """Install the kinds, run RayClusters and RayJobs until cancelled; the caller runs the
    informers."""
    await install(client)
    recorder = EventRecorder(client, COMPONENT)
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with plain_session(timeout) as session, asyncio.TaskGroup() as tasks:
        dashboard = Dashboard(session)
        tasks.create_task(recorder.run())
        tasks.create_task(RayClusters(client, informers, recorder, dashboard).run())
        tasks.create_task(run_rayjobs(client, informers, dashboard))


async def install(client: KubeClient) -> None:
    """Install KubeRay's kinds where they are missing, and wait until the API serves them."""
    text = resources.files(__package__).joinpath("definitions.json").read_text()
    for line in text.splitlines():
        body = json.loads(line)
        path = f"{RAY_CLUSTER.path}/{body['spec']['names']['plural']}"
        await install_definition(client, body, path)


class RayClusters:
    """Works on a RayCluster after each change of it, its pods or its service."""

    def __init__(
        self,
        client: KubeClient,
        informers: Informers,
        recorder: EventRecorder,
        dashboard: Dashboard,
    ) -> None:
        self._client = client
        self._key = key_of_tokens(client.config)
        self._dashboard = dashboard
        self._recorder = recorder
        self._access = access_of(client.config)
        self._given: set[str] = set()
        """Uids of the RayClusters whose Secrets were written since this program began."""
        self._judged: set[str] = set()
        """Uids of the heads of which is known whether they ask for a token."""
        self._clusters = informers.of(job_class(RAY_CLUSTER))
        self._pods = informers.of(Pod)
        self._services = informers.of(Service)
        self._queue: WorkQueue[Key] = WorkQueue("rayclusters", self._work, workers=4)
        self._questions: WorkQueue[Key] = WorkQueue("ray-heads", self._warn_if_open, workers=4)

    async def run(self) -> None:
        """Work until cancelled."""
        await all_synced(self._pods, self._services, self._clusters)
        self._pods.subscribe(self._on_part)
        self._services.subscribe(self._on_part)
        self._clusters.subscribe(self._on_cluster)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._questions.run())
            tasks.create_task(self._queue.run())

    def _on_cluster(self, old: Cluster | None, new: Cluster | None) -> None:
        if new is not None:
            self._queue.add(key_of(new))

    def _on_part(self, old: Pod | Service | None, new: Pod | Service | None) -> None:
        item = new or old
        assert item is not None
        key = job_of(item, RAY_CLUSTER)
        if key is not None:
            self._queue.add(key)

    async def _work(self, key: Key) -> float | None:
        cluster = self._clusters.get(key.name, key.namespace)
        if cluster is None:
            return None
        uid, seen = cluster["metadata"]["uid"], self._picture(cluster)
        with closing(_free_ports()) as ports:
            result = plan(seen, wall(), ports)
        makes = any(isinstance(order, Create) for order in result.orders)
        if not seen.is_leaving and (makes or uid not in self._given):
            bodies = [token_body(key.name, uid, token_of(self._key, uid))]
            if is_autoscaled(seen.spec):
                bodies.append(access_body(key.name, uid, self._access))
            if not all([await self._give(cluster, body) for body in bodies]):
                return TAKEN_SECONDS
            self._given.add(uid)
        done = [await self._carry_out(cluster, order) for order in result.orders]
        if result.status is not None:
            body = {**cluster, "status": result.status}
            await self._client.raw("PUT", f"{_path(cluster)}/status", body=body)
        if seen.head is not None and seen.head.is_ready and seen.head.uid not in self._judged:
            self._questions.add(key)
        return None if all(done) else TAKEN_SECONDS

    def _picture(self, cluster: Cluster) -> ClusterPicture:
        uid = cluster["metadata"]["uid"]
        pods = [pod for pod in self._pods.items() if is_owned(pod, uid)]
        services = [service for service in self._services.items() if is_owned(service, uid)]
        return cluster_picture(cluster, pods, services)

    async def _warn_if_open(self, key: Key) -> float | None:
        """Warn if the head's dashboard lets everybody run programs."""
        cluster = self._clusters.get(key.name, key.namespace)
        seen = self._picture(cluster) if cluster is not None else None
        if cluster is None or seen is None or seen.head is None or not seen.head.is_ready:
            return None
        if seen.head.uid in self._judged:
            return None
        try:
            place = DashboardAddress(f"http://{seen.head.address}:{DASHBOARD_PORT}")
            if await self._dashboard.jobs(place) is None:
                return SILENCE_SECONDS
            text = (
                f"{seen.head.name} asks for no token: every user of this machine can run programs "
                "as the user of this pod. Use Ray 2.52 or later and do not set RAY_AUTH_MODE"
            )
            self._record(cluster, RecordClusterEvent("RayIsOpen", text, True))
        except RefusedError:
            pass  # as it should
        self._judged.add(seen.head.uid)
        return None

    async def _give(self, cluster: Cluster, body: Mapping[str, Any]) -> bool:
        """Write a Secret that the pods need; return False while another one has its name."""
        name, uid = body["metadata"]["name"], cluster["metadata"]["uid"]
        path = f"api/v1/namespaces/{quote(key_of(cluster).namespace)}/secrets"
        if await self._client.create_if_absent(path, body):
            return True
        place = f"{path}/{quote(name)}"
        found = await self._client.get_or_none(place, Secret)
        if found is None or found.metadata is None:
            return False
        owners = found.metadata.ownerReferences or ()
        if any(owner.uid == uid for owner in owners):
            secret = found.metadata.uid
            return await self._client.merge_if_present(place, body, uid=secret)
        if not any(owner.kind == RAY_CLUSTER.name for owner in owners):
            # Else it was of a RayCluster of the same name, and is about to be deleted with it.
            text = f"Secret {name} is not of this RayCluster: delete it, then pods are made"
            self._record(cluster, RecordClusterEvent("FailedToCreateSecret", text, True))
        return False

    async def _carry_out(self, cluster: Cluster, order: Order) -> bool:
        """Carry out an order; return False if another object has the name."""
        parts = f"api/v1/namespaces/{quote(key_of(cluster).namespace)}"
        match order:
            case Create(collection, body, then, failure):
                try:
                    await self._client.raw("POST", f"{parts}/{collection}", body=body)
                except Conflict:
                    return False  # it is there, or being deleted, or a stranger's
                except ApiRefusal as error:
                    self._record(
                        cluster, RecordClusterEvent(failure, f"Failed to create: {error}", True)
                    )
                    raise
                self._record(cluster, then)
            case DeletePod(name, uid, then):
                if await self._client.delete_if_present(f"{parts}/pods/{quote(name)}", uid):
                    self._record(cluster, then)
        return True

    def _record(self, cluster: Cluster, what: RecordClusterEvent) -> None:
        type = "Warning" if what.is_warning else "Normal"
        self._recorder.record(reference_to(cluster), type, what.reason, what.message)
        log.info("event recorded", cluster=key_of(cluster), event=what.reason, message=what.message)


def access_of(config: SingleConfig) -> Access:
    """Return the access of pods to the server that a client's configuration names.

    The programs of the local cluster have an address of their own, without TLS, which changes with
    each start. Pods get the address that users have, from the file next to it.
    """
    outer = config.fname and Path(config.fname).with_name("kubeconfig")
    if outer and outer.exists():
        found = KubeConfig.from_file(outer).get()
        config = found if found is not None else config
    server, token = urlsplit(config.cluster.server), (config.user and config.user.token) or ""
    authority = config.cluster.certificate_auth_data or ""
    return Access(server.hostname or "", str(server.port or 443), token, authority)


def _path(cluster: Cluster) -> str:
    key = key_of(cluster)
    path = f"{RAY_CLUSTER.path}/namespaces/{quote(key.namespace)}/{RAY_CLUSTER.plural}"
    return f"{path}/{quote(key.name)}"


def _free_ports() -> Generator[int]:
    """Yield ports that are free at all addresses of this machine, each once."""
    with ExitStack() as stack:
        while True:
            probe = stack.enter_context(socket.socket())
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            yield port


def key_of_tokens(config: SingleConfig) -> str:
    """Return the secret of the local cluster from which the tokens of its RayClusters follow."""
    key = (config.user and config.user.token) or ""
    if not key:
        raise WorldError("the kubeconfig of the local cluster has no token: Ray's would be known")
    return key


def ray_tokens(config: SingleConfig) -> Tokens:
    """Return the tokens of all RayClusters, each for its own head only."""
    key = key_of_tokens(config)

    def token(cluster: Mapping[str, Any], url: str) -> str:
        place = urlsplit(url)
        assert place.hostname is not None
        assert place.port is not None
        pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        others = strangers(place.hostname, place.port, pod)
        if others:
            raise RefusedError(
                f"user {others[0]} of this machine listens at {place.netloc}, and not Ray alone: "
                "end that program, then delete the head's pod"
            )
        return token_of(key, cluster["metadata"]["uid"])

    return token
