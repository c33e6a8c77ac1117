"""Resumes RayJobs and RayClusters, by annotation or by default, together with KubeRay's operator.

`core.ray_resume` decides; this module watches the API, asks dashboards and carries out the orders.
It deletes pods, writes annotations of its own, and restarts a RayJob by its spec and status; it
makes no pod.  RayClusters that belong to anything but a RayJob are left alone.  Without annotations
it asks no dashboard and reads no log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec
from lightkube.generic_resource import GenericNamespacedResource as Object
from lightkube.resources.core_v1 import Node, Pod

from unbroken.agent_http.sessions import plain_session, small_socket
from unbroken.budget import Budget
from unbroken.core.auto_resume import ResumeEffect
from unbroken.core.ray_resume import (
    NOT_RESUMED,
    BeginAgain,
    DashboardAnswer,
    Head,
    RayEffect,
    RayResume,
    StopHung,
    SubmitAgain,
    SuspendRayCluster,
    WriteRayRecord,
)
from unbroken.errors import SpecError, WorldError
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import monotonic, wall
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informer, Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.observe.resumed_metrics import ResumedMetrics
from unbroken.operator.kinds import job_class
from unbroken.operator.served import while_served
from unbroken.spec.job_kinds import RAY_CLUSTER, RAY_JOB, JobKind
from unbroken.spec.log_monitoring import log_monitoring_of

from .jobs import (
    JobChanges,
    Orders,
    ResumeOptions,
    annotations_of,
    concerns,
    counting,
    path_of,
    pods_and_nodes,
    uid_of,
)
from .ray_dashboard import ASK_SECONDS, Budgets, DashboardAddress, RayDashboards, Tokens, no_token
from .ray_logs import RayLogs
from .ray_views import (
    begun_jobs,
    cluster_of,
    dashboard_url,
    is_of_cluster,
    next_runtime_env,
    owner_of,
    ray_picture,
    recorded_uid,
    write_ray_record,
)

log = Log(__name__)

WORKERS = 4
LABEL = RAY_CLUSTER.pod_label
BUSY_SECONDS = 1.0
"""Seconds until a RayCluster that still has pods is looked at again."""


async def run_ray_resume(
    client: KubeClient,
    informers: Informers | None,
    recorder: EventRecorder,
    options: ResumeOptions,
    metrics: ResumedMetrics | None = None,
    tokens: Tokens = no_token,
) -> None:
    """Resume RayJobs and RayClusters until cancelled.

    `informers`: shared ones that the caller runs; None: start own ones.
    """
    namespace = options.namespace

    async def resume() -> None:
        clusters = Informer(client, job_class(RAY_CLUSTER), namespace=namespace)
        jobs = Informer(client, job_class(RAY_JOB), namespace=namespace)
        pods, nodes, own = pods_and_nodes(client, informers, RAY_CLUSTER, namespace)
        watches = RayWatches(clusters, jobs, pods, nodes)
        with counting(metrics, RAY_CLUSTER, clusters), counting(metrics, RAY_JOB, jobs):
            await _resume(client, recorder, watches, [clusters, jobs, *own], options, tokens)

    async def rayjobs() -> None:
        await while_served(client, RAY_JOB, resume)

    await while_served(client, RAY_CLUSTER, rayjobs)


async def _resume(
    client: KubeClient,
    recorder: EventRecorder,
    watches: RayWatches,
    own: Sequence[Informer[Any]],
    options: ResumeOptions,
    tokens: Tokens,
) -> None:
    """Resume while the API serves the kinds, and run the informers in `own`."""
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    session = plain_session(timeout, make_socket=small_socket)
    async with session, asyncio.TaskGroup() as tasks:
        for informer in own:
            tasks.create_task(informer.run())
        resumer = RayResumer(client, recorder, watches, session, options, tokens)
        try:
            await resumer.run()
        finally:
            resumer.stop()


@dataclass(frozen=True, slots=True)
class RayWatches:
    """Informers of RayClusters, RayJobs, pods and nodes; the caller runs them."""

    clusters: Informer[Object]
    jobs: Informer[Object]
    pods: Informer[Pod]
    nodes: Informer[Node]


class RaySubject(NamedTuple):
    """A RayJob, or a RayCluster that stands alone."""

    kind: JobKind
    key: Key

    @property
    def path(self) -> str:
        """The path of the object at the API server."""
        return path_of(self.kind, self.key)


class RayResumer(JobChanges):
    """Keeps a machine for each RayJob and RayCluster that is to be resumed."""

    def __init__(
        self,
        client: KubeClient,
        recorder: EventRecorder,
        watches: RayWatches,
        session: aiohttp.ClientSession,
        options: ResumeOptions,
        tokens: Tokens,
    ) -> None:
        super().__init__(RAY_CLUSTER)
        self._default = options.retries
        self._client = client
        self._tokens = tokens
        self._watches = watches
        self._recorder = recorder
        self._orders = Orders(client, recorder, watches.nodes, options.dead_seconds)
        self._machines: dict[str, RayResume] = {}
        """Machines by the subject's uid."""
        self._queue: WorkQueue[RaySubject] = WorkQueue("ray-resume", self._look, workers=WORKERS)
        self._budgets = Budgets(monotonic())
        self._dashboards = RayDashboards(client, session, self._on_answer, self._on_refusal)
        self._logs: RayLogs[RaySubject] = RayLogs(session, self._queue.add)

    async def run(self) -> None:
        """Work until cancelled."""
        watches = self._watches
        await all_synced(watches.nodes, watches.pods, watches.clusters, watches.jobs)
        watches.nodes.subscribe(self._on_node)
        watches.pods.subscribe(self._on_pod)
        watches.clusters.subscribe(self._on_cluster)
        watches.jobs.subscribe(self._on_job)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._dashboards.run())
            tasks.create_task(self._logs.run())
            tasks.create_task(self._queue.run())

    # --- changes that informers see

    def _on_cluster(self, old: Object | None, new: Object | None) -> None:
        for item in (old, new):
            if item is not None:
                self._add_subject(item)
        item = changed(old, new)
        if new is None or (old is not None and uid_of(old) != uid_of(new)):
            self._machines.pop(uid_of(old or item), None)
            self._dashboards.forget(key_of(item))

    def _add_subject(self, cluster: Object) -> None:
        owner, key = owner_of(cluster), key_of(cluster)
        if owner is None:
            self._queue.add(RaySubject(RAY_CLUSTER, key))
        elif owner:
            self._queue.add(RaySubject(RAY_JOB, Key(key.namespace, owner)))

    def _on_job(self, old: Object | None, new: Object | None) -> None:
        item = changed(old, new)
        if new is None or (old is not None and uid_of(old) != uid_of(new)):
            self._machines.pop(uid_of(old or item), None)
        self._queue.add(RaySubject(RAY_JOB, key_of(item)))

    def _on_answer(self, key: Key) -> None:
        self._queue.add(RaySubject(RAY_CLUSTER, key))

    def _on_refusal(self, key: Key, why: str) -> None:
        cluster = self._watches.clusters.get(key.name, key.namespace)
        if cluster is not None:
            text = f"jobs are not submitted again: {why}"
            self._recorder.record(reference_to(cluster), "Warning", NOT_RESUMED, text)

    def _add(self, key: Key) -> None:
        cluster = self._watches.clusters.get(key.name, key.namespace)
        if cluster is not None:
            self._add_subject(cluster)

    # --- one subject

    async def _look(self, subject: RaySubject) -> float | None:
        kind, key = subject
        is_rayjob = kind is RAY_JOB
        found = (self._watches.jobs if is_rayjob else self._watches.clusters).get(
            key.name, key.namespace
        )
        is_part = found is not None and not is_rayjob and owner_of(found) is not None
        if found is None or is_part or not concerns(found, self._default):
            self._forget(subject)
            return None
        item: Object = found
        place = Key(key.namespace, cluster_of(item)) if is_rayjob else key
        cluster = self._cluster(item, place) if is_rayjob else item
        # Pods may outlive their RayCluster.
        uid = uid_of(cluster) if cluster is not None else recorded_uid(item)
        pods = self._pods.of(place, uid)
        asked = self._ready_head(kind, item, cluster, pods)
        if asked is None:
            self._forget(subject)
        answer = None
        if asked is not None and not is_rayjob:
            answer = self._dashboards.want(key, *asked, self._budget(subject))
        hung = self._hung(subject, item, asked, answer)
        nodes = await self._orders.nodes_of(pods)
        seen = ray_picture(kind, item, cluster, pods, nodes, self._default, answer)
        seen = replace(seen, hung=hung)
        machine, now = self._machines.setdefault(uid_of(item), RayResume()), wall()
        for effect in machine.step(seen, now):
            await self._carry_out(subject, item, effect)
        deadline = machine.deadline()
        return None if deadline is None else max(deadline - wall(), 0.0)

    def _cluster(self, job: Object, place: Key) -> Object | None:
        """Return the RayCluster of a RayJob's attempt, if it is its own."""
        found = self._watches.clusters.get(place.name, place.namespace) if place.name else None
        is_own = found is not None and owner_of(found) == key_of(job).name
        return found if is_own else None

    def _forget(self, subject: RaySubject) -> None:
        """Ask the head of a subject no more, and read no log of its jobs."""
        self._logs.forget(subject)
        if subject.kind is not RAY_JOB:
            self._dashboards.forget(subject.key)

    def _ready_head(
        self, kind: JobKind, item: Object, cluster: Object | None, pods: list[Pod]
    ) -> tuple[Head, DashboardAddress] | None:
        """Return the head that is ready and the place of its dashboard, if jobs may run there."""
        seen = ray_picture(kind, item, cluster, pods, {})
        head = seen.ready_head if seen.watches_jobs and not seen.is_over else None
        pod = next((one for one in pods if head and _is(one, head.uid)), None)
        if head is None or cluster is None or pod is None:
            return None
        url = dashboard_url(cluster, pod)
        return (head, DashboardAddress(url, partial(self._tokens, cluster, url))) if url else None

    def _hung(
        self,
        subject: RaySubject,
        item: Object,
        asked: tuple[Head, DashboardAddress] | None,
        answer: DashboardAnswer | None,
    ) -> Mapping[str, str]:
        """Have the logs of the jobs that run read by the log rules; say how they break rules."""
        rules = log_monitoring_of(annotations_of(item)).rules
        if asked is None or not rules:
            self._logs.forget(subject)
            return {}
        begun = begun_jobs(subject.kind, item, answer)
        return self._logs.want(subject, *asked, begun, rules, self._budget(subject))

    def _budget(self, subject: RaySubject) -> Budget:
        return self._budgets.of(subject.key.namespace, subject, monotonic())

    async def _carry_out(
        self, subject: RaySubject, item: Object, effect: ResumeEffect | RayEffect
    ) -> None:
        match effect:
            case WriteRayRecord():
                await self._write(subject, item, effect)
            case SuspendRayCluster():
                path = path_of(RAY_CLUSTER, Key(subject.key.namespace, effect.name))
                suspended = {"spec": {"suspend": True}}
                if await self._client.merge_if_present(path, suspended, uid=effect.uid):
                    log.info("RayCluster suspended", cluster=effect.name)
            case BeginAgain():
                await self._begin_again(subject, item, effect)
            case SubmitAgain():
                self._dashboards.submit(subject.key, effect)
            case StopHung():
                self._dashboards.stop(subject.key, effect)
            case _:
                await self._orders.carry_out(subject.kind, item, effect)

    async def _write(self, subject: RaySubject, item: Object, order: WriteRayRecord) -> None:
        """Raises Conflict, which leaves the rest undone, if the subject has changed meanwhile."""
        body: dict[str, Any] = {
            "metadata": {"annotations": write_ray_record(order.record, order.state)}
        }
        if order.attempt is not None:
            text = str(item["spec"].get("runtimeEnvYAML") or "")
            try:
                body["spec"] = {"runtimeEnvYAML": next_runtime_env(text, order.attempt)}
            except SpecError as error:
                log.warning("environment of a RayJob not changed", job=subject.key, error=error)
        path = subject.path
        await self._client.merge(path, body, uid=uid_of(item), version=order.version)

    async def _begin_again(self, subject: RaySubject, job: Object, order: BeginAgain) -> None:
        """Raises Conflict if the RayJob has changed meanwhile."""
        space = f"api/v1/namespaces/{quote(subject.key.namespace)}/pods"
        label = quote(f"{LABEL}={order.cluster}", safe="")
        body = await self._client.raw("GET", f"{space}?labelSelector={label}")
        pods = msgspec.json.decode(body)["items"]
        if any(is_of_cluster(pod, order.cluster) for pod in pods):
            raise WorldError(f"RayCluster {order.cluster} still has pods", BUSY_SECONDS)
        status = {"status": {"jobDeploymentStatus": "Retrying"}}
        path = f"{subject.path}/status"
        await self._client.merge(path, status, uid=uid_of(job), version=order.version)
        log.info("RayJob starts again", job=subject.key, cluster=order.cluster)


def _is(pod: Pod, uid: str) -> bool:
    return pod.metadata is not None and pod.metadata.uid == uid
