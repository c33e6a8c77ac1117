"""Resumes jobs that ask for it by annotation, wherever the API knows their kind.

`core.auto_resume` decides; this module watches the API and carries out the orders.  It works beside
the operator of the kind, which makes the pods: it deletes pods, or suspends the job, and writes its
own annotations, nothing else.  The kind may be installed, or removed, while it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, assert_never
from urllib.parse import quote

from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import (
    AskForFence,
    AutoResume,
    DeleteResumedPod,
    ResumeEffect,
    Say,
    WriteResumeRecord,
)
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informer
from unbroken.kube.informers import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.operator.job_pods import JobPods
from unbroken.operator.kinds import job_class
from unbroken.spec.job_kinds import JobKind

from .orders import PodOrders
from .views import concerns, node_state, picture, write_record

log = logging.getLogger(__name__)

WORKERS = 4


async def run_auto_resume(
    client: KubeClient,
    informers: Informers | None,
    recorder: EventRecorder,
    kind: JobKind,
    namespace: str | None = None,
) -> None:
    """Resume jobs of a kind until cancelled; `namespace` None: in all namespaces.

    `informers`: shared ones that the caller runs; None: start own ones.
    """
    await while_served(
        client,
        kind,
        lambda: _resume(client, informers, recorder, kind, namespace),
    )


async def while_served(
    client: KubeClient, kind: JobKind, work: Callable[[], Coroutine[None, None, None]]
) -> None:
    """Run `work` whenever the API serves a kind, until cancelled."""
    definition = _Definition()
    name = f"metadata.name={kind.resource}"
    watch = Informer(client, CustomResourceDefinition, fields=name, on_change=definition.changed)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch.run())
        while True:
            await definition.becomes(True)
            log.info("auto_resume=running kind=%s", kind.name)
            running = tasks.create_task(work())
            await definition.becomes(False)
            log.info('auto_resume=waiting kind=%s reason="the API does not serve it"', kind.name)
            running.cancel()


class _Definition:
    """Whether the API serves the kind."""

    def __init__(self) -> None:
        self._is_served = False
        self._change = asyncio.Event()

    def changed(
        self, old: CustomResourceDefinition | None, new: CustomResourceDefinition | None
    ) -> None:
        """Take in a change of the definition."""
        conditions = (new.status and new.status.conditions) if new is not None else None
        self._is_served = any(
            one.type == "Established" and one.status == "True" for one in conditions or ()
        )
        self._change.set()

    async def becomes(self, wanted: bool) -> None:
        """Return once the kind is served (`wanted`), or no longer served."""
        while self._is_served is not wanted:
            self._change.clear()
            await self._change.wait()


async def _resume(
    client: KubeClient,
    informers: Informers | None,
    recorder: EventRecorder,
    kind: JobKind,
    namespace: str | None,
) -> None:
    """Resume jobs while the API serves their kind."""
    async with asyncio.TaskGroup() as tasks:
        # Not a shared one: it must end when the kind does.
        jobs = Informer(client, job_class(kind), namespace=namespace)
        own: list[Informer[Any]] = [jobs]
        if informers is None:
            pods = Informer(client, Pod, namespace=namespace, labels=kind.pod_label)
            nodes = Informer(client, Node)
            own += [pods, nodes]
        else:
            pods, nodes = informers.of(Pod), informers.of(Node)
        for informer in own:
            tasks.create_task(informer.run())
        resumer = Resumer(client, recorder, kind, Watches(jobs, pods, nodes))
        try:
            await resumer.run()
        finally:
            resumer.stop()


@dataclass(frozen=True, slots=True)
class Watches:
    """Informers of jobs, pods and nodes; the caller runs them."""

    jobs: Informer[Job]
    pods: Informer[Pod]
    nodes: Informer[Node]


class Resumer:
    """Keeps a machine for each job that asks to be resumed."""

    def __init__(
        self, client: KubeClient, recorder: EventRecorder, kind: JobKind, watches: Watches
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._kind = kind
        self._watches = watches
        self._orders = PodOrders(client, watches.nodes)
        self._machines: dict[str, AutoResume] = {}
        """By the job's uid."""
        self._pods = JobPods(kind)
        self._is_stopped = False
        self._queue: WorkQueue[Key] = WorkQueue("auto-resume", self._look, workers=WORKERS)

    async def run(self) -> None:
        """Work until cancelled."""
        await all_synced(self._watches.nodes, self._watches.pods, self._watches.jobs)
        self._watches.nodes.subscribe(self._on_node)
        self._watches.pods.subscribe(self._on_pod)
        self._watches.jobs.subscribe(self._on_job)
        await self._queue.run()

    def stop(self) -> None:
        """Forget all pods and ignore the shared informers, which go on calling."""
        self._is_stopped = True
        self._pods.clear()

    # --- changes that informers see

    def _on_job(self, old: Job | None, new: Job | None) -> None:
        item = changed(old, new)
        if new is None or (old is not None and _uid(old) != _uid(new)):
            self._machines.pop(_uid(old or item), None)
        self._queue.add(key_of(item))

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        if self._is_stopped:
            return
        key = self._pods.changed(old, new)
        if key is not None:
            self._queue.add(key)

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if self._is_stopped or (old and new and node_state(old) == node_state(new)):
            return
        for key in self._pods.jobs_on(key_of(changed(old, new)).name):
            self._queue.add(key)

    # --- one job

    async def _look(self, key: Key) -> float | None:
        job = self._watches.jobs.get(key.name, key.namespace)
        if job is None or not concerns(job):
            return None
        uid = _uid(job)
        pods = self._pods.of_job(job)
        seen = picture(self._kind, job, pods, await self._orders.nodes_of(pods))
        machine, now = self._machines.setdefault(uid, AutoResume()), wall()
        for effect in machine.step(seen, now):
            await self._carry_out(job, effect)
        deadline = machine.deadline()
        return None if deadline is None else max(deadline - wall(), 0.0)

    async def _carry_out(self, job: Job, effect: ResumeEffect) -> None:
        match effect:
            case WriteResumeRecord():
                await self._write(job, effect)
            case DeleteResumedPod():
                await self._orders.delete(key_of(job).namespace, effect)
            case AskForFence():
                await self._orders.fence(effect)
            case Say():
                log.warning(
                    '%s=%s %s="%s"',
                    *(self._kind.name.lower(), key_of(job), effect.reason, effect.message),
                )
                self._recorder.record(reference_to(job), "Warning", effect.reason, effect.message)
            case _:
                assert_never(effect)

    async def _write(self, job: Job, order: WriteResumeRecord) -> None:
        """Raises Conflict, which leaves the rest undone, if the job has changed meanwhile."""
        key, kind = key_of(job), self._kind
        body: dict[str, Any] = {"metadata": {"annotations": write_record(order.record)}}
        if order.suspends is not None:
            body |= kind.suspension(order.suspends)
        path = f"{kind.path}/namespaces/{quote(key.namespace)}/{kind.plural}/{quote(key.name)}"
        await self._client.merge(path, body, uid=_uid(job), version=order.version)


def _uid(job: Mapping[str, Any]) -> str:
    return str(job["metadata"].get("uid") or "")
