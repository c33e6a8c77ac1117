"""Resumes jobs, by annotation or by default, wherever the API knows their kind.

`core.auto_resume` decides; this module watches the API and carries out the orders. It works
together with the operator of the kind, which makes the pods: it deletes pods, or suspends the job,
and writes its own annotations, nothing else. The kind may be installed, or removed, while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import AutoResume
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informer, Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.observe.resumed_metrics import ResumedMetrics
from unbroken.operator.kinds import job_class
from unbroken.operator.served import while_served
from unbroken.spec.job_kinds import JobKind

from .jobs import (
    JobChanges,
    Orders,
    ResumeOptions,
    concerns,
    counting,
    picture,
    pods_and_nodes,
    uid_of,
)

WORKERS = 4


async def run_auto_resume(
    client: KubeClient,
    informers: Informers | None,
    recorder: EventRecorder,
    kind: JobKind,
    options: ResumeOptions,
    metrics: ResumedMetrics | None = None,
) -> None:
    """Resume jobs of a kind until cancelled.

    `informers`: shared ones that the caller runs; None: start own ones.
    """
    namespace = options.namespace

    async def resume() -> None:
        # Not a shared one: it must end when the kind does.
        jobs = Informer(client, job_class(kind), namespace=namespace)
        with counting(metrics, kind, jobs):
            pods, nodes, own = pods_and_nodes(client, informers, kind, namespace)
            resumer = Resumer(client, recorder, kind, ResumeInformers(jobs, pods, nodes), options)
            await _resume(resumer, [jobs, *own])

    await while_served(client, kind, resume)


async def _resume(resumer: Resumer, own: Sequence[Informer[Any]]) -> None:
    """Resume jobs while the API serves their kind, and run the informers in `own`."""
    async with asyncio.TaskGroup() as tasks:
        for informer in own:
            tasks.create_task(informer.run())
        try:
            await resumer.run()
        finally:
            resumer.stop()


@dataclass(frozen=True, slots=True)
class ResumeInformers:
    """Informers of jobs, pods and nodes; the caller runs them."""

    jobs: Informer[Job]
    pods: Informer[Pod]
    nodes: Informer[Node]


class Resumer(JobChanges):
    """Keeps a machine for each job that is to be resumed."""

    def __init__(
        self,
        client: KubeClient,
        recorder: EventRecorder,
        kind: JobKind,
        watches: ResumeInformers,
        options: ResumeOptions,
    ) -> None:
        super().__init__(kind)
        self._kind = kind
        self._default = options.retries
        self._watches = watches
        self._orders = Orders(client, recorder, watches.nodes, options.dead_seconds)
        self._machines: dict[str, AutoResume] = {}
        """Machines by the job's uid."""
        self._queue: WorkQueue[Key] = WorkQueue("auto-resume", self._look, workers=WORKERS)

    async def run(self) -> None:
        """Work until cancelled."""
        await all_synced(self._watches.nodes, self._watches.pods, self._watches.jobs)
        self._watches.nodes.subscribe(self._on_node)
        self._watches.pods.subscribe(self._on_pod)
        self._watches.jobs.subscribe(self._on_job)
        await self._queue.run()

    # --- changes that informers see

    def _on_job(self, old: Job | None, new: Job | None) -> None:
        item = changed(old, new)
        if new is None or (old is not None and uid_of(old) != uid_of(new)):
            self._machines.pop(uid_of(old or item), None)
        self._queue.add(key_of(item))

    def _add(self, key: Key) -> None:
        self._queue.add(key)

    # --- one job

    async def _look(self, key: Key) -> float | None:
        job = self._watches.jobs.get(key.name, key.namespace)
        if job is None or not concerns(job, self._default):
            return None
        uid = uid_of(job)
        pods = self._pods.of_job(job)
        nodes = await self._orders.nodes_of(pods)
        seen = picture(self._kind, job, pods, nodes, self._default)
        machine, now = self._machines.setdefault(uid, AutoResume()), wall()
        for effect in machine.step(seen, now):
            await self._orders.carry_out(self._kind, job, effect)
        deadline = machine.deadline()
        return None if deadline is None else max(deadline - wall(), 0.0)
