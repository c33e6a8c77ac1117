"""Runs TrainJobs of the runtime `unbroken-torch`, wherever the API knows their kind.

`core.train_jobs` decides; this module watches the API and carries out the orders. It works together
with the controllers of Kubeflow Trainer and JobSet. It makes HyperPodPyTorchJobs, and writes their
results on pods of these controllers. It changes no TrainJob, JobSet or Job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, assert_never
from urllib.parse import quote

from lightkube.generic_resource import GenericGlobalResource as Runtime
from lightkube.generic_resource import GenericNamespacedResource as TrainJob
from lightkube.resources.core_v1 import Pod

from unbroken.core.auto_resume import Say
from unbroken.core.train_jobs import (
    WAITS,
    ChangeJob,
    CreateJob,
    Order,
    ResultPod,
    TrainJobPicture,
    WriteResult,
    is_run_here,
    orders_for,
)
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.errors import ApiRefusal, Conflict
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informer, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.job_pods import JobPods
from unbroken.operator.kinds import JOBS, JobObject, job_class, runtime_class
from unbroken.operator.served import while_served
from unbroken.spec.job_kinds import ENDED_PHASES, HYPERPOD_JOB, TRAIN_JOB, TRAIN_RUNTIME
from unbroken.spec.keys import RESULT, RESULT_LABEL
from unbroken.spec.kubeflow.trainjob import RUNTIME_KIND


def result_pods(pods: Iterable[Pod]) -> Iterator[ResultPod]:
    """Yield the pods of a TrainJob that can still take its result."""
    for pod in pods:
        metadata, phase = pod.metadata, pod.status and pod.status.phase
        if metadata is None or metadata.deletionTimestamp or phase in ENDED_PHASES:
            continue
        result = (metadata.annotations or {}).get(RESULT, "")
        yield ResultPod(metadata.name or "", metadata.uid or "", result)


log = Log(__name__)

WORKERS = 4


async def run_train_jobs(
    client: KubeClient,
    recorder: EventRecorder,
    jobs: Informer[JobObject],
    namespace: str | None = None,
) -> None:
    """Run TrainJobs until cancelled; `namespace` None: in all namespaces.

    `jobs`: HyperPodPyTorchJobs; the caller runs this informer.
    """

    async def work() -> None:
        watches = TrainJobInformers(
            # Not shared ones: they must end when the kind does.
            Informer(client, job_class(TRAIN_JOB), namespace=namespace),
            Informer(client, runtime_class(), fields=f"metadata.name={TRAIN_RUNTIME}"),
            Informer(client, Pod, namespace=namespace, labels=RESULT_LABEL),
            jobs,
        )
        async with asyncio.TaskGroup() as tasks:
            for informer in (watches.trains, watches.runtimes, watches.pods):
                tasks.create_task(informer.run())
            controller = TrainJobs(client, recorder, watches)
            try:
                await controller.run()
            finally:
                controller.stop()

    async def both() -> None:
        await while_served(client, RUNTIME_KIND, work)

    await while_served(client, TRAIN_JOB, both)


@dataclass(frozen=True, slots=True)
class TrainJobInformers:
    """Informers of TrainJobs, their runtime, result pods and HyperPodPyTorchJobs; the caller runs
    them."""

    trains: Informer[TrainJob]
    runtimes: Informer[Runtime]
    pods: Informer[Pod]
    jobs: Informer[JobObject]


class TrainJobs:
    """Looks at each TrainJob of the runtime when anything of it changes."""

    def __init__(
        self, client: KubeClient, recorder: EventRecorder, watches: TrainJobInformers
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._watches = watches
        self._pods = JobPods(TRAIN_JOB)
        self._told: dict[Key, tuple[str, Say]] = {}
        """Uid of each TrainJob, and its latest event: an event is recorded when it differs."""
        self._is_stopped = False
        self._queue: WorkQueue[Key] = WorkQueue("trainjobs", self._look, workers=WORKERS)

    async def run(self) -> None:
        """Work until cancelled."""
        watches = self._watches
        await all_synced(watches.runtimes, watches.pods, watches.jobs, watches.trains)
        watches.runtimes.subscribe(self._on_runtime)
        watches.pods.subscribe(self._on_pod)
        watches.jobs.subscribe(self._on_job)
        watches.trains.subscribe(self._on_train)
        await self._queue.run()

    def stop(self) -> None:
        """Ignore the shared informer, which continues to call."""
        self._is_stopped = True

    # --- changes that informers see

    def _on_train(self, old: TrainJob | None, new: TrainJob | None) -> None:
        key = key_of(changed(old, new))
        if new is None:
            self._told.pop(key, None)
        elif is_run_here(new):
            self._queue.add(key)

    def _on_job(self, old: JobObject | None, new: JobObject | None) -> None:
        if not self._is_stopped:
            self._add(key_of(changed(old, new)))

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        key = self._pods.changed(old, new)
        if key is not None:
            self._add(key)

    def _on_runtime(self, _old: Runtime | None, _new: Runtime | None) -> None:
        for train in self._watches.trains.items():
            if is_run_here(train):
                self._queue.add(key_of(train))

    def _add(self, key: Key) -> None:
        """Have the TrainJob of this name looked at, if there is one."""
        if self._watches.trains.get(key.name, key.namespace) is not None:
            self._queue.add(key)

    # --- one TrainJob

    async def _look(self, key: Key) -> None:
        train = self._watches.trains.get(key.name, key.namespace)
        if train is None:
            return
        seen = TrainJobPicture(
            train,
            self._watches.runtimes.get(TRAIN_RUNTIME),
            self._watches.jobs.get(key.name, key.namespace),
            tuple(result_pods(self._pods.of_job(train))),
        )
        for order in orders_for(seen):
            await self._carry_out(train, order)

    async def _carry_out(self, train: TrainJob, order: Order) -> None:
        """Carry out an order.  A change of an object that has changed meanwhile raises Conflict."""
        key = key_of(train)
        match order:
            case CreateJob(body):
                await self._create(train, body)
            case ChangeJob(uid, version, patch):
                path = f"{_jobs(key)}/{quote(key.name)}"
                await self._client.merge(path, patch, uid=uid, version=version)
                log.info("job changed", job=key)
            case WriteResult(pod, uid, result):
                path = f"api/v1/namespaces/{quote(key.namespace)}/pods/{quote(pod)}"
                body = {"metadata": {"annotations": {RESULT: result}}}
                if await self._client.merge_if_present(path, body, uid=uid):
                    log.info("result written", job=key, pod=pod, message=result)
            case Say():
                self._tell(train, order)
            case _:
                assert_never(order)

    async def _create(self, train: TrainJob, body: Any) -> None:
        """Create the job.  Raises ApiRefusal, after an event: what refuses may allow it later."""
        key = key_of(train)
        try:
            if await self._client.create_if_absent(_jobs(key), body):
                log.info("job created for a TrainJob", job=key)
        except Conflict:
            raise
        except ApiRefusal as error:
            text = f"the API refuses {HYPERPOD_JOB.name} {key.name}, it is tried again: {error}"
            self._tell(train, Say(WAITS, text))
            raise

    def _tell(self, train: TrainJob, told: Say) -> None:
        key, uid = key_of(train), str(train["metadata"].get("uid") or "")
        if self._told.get(key) == (uid, told):
            return
        self._told[key] = uid, told
        log.info("event recorded", job=key, event=told.reason, message=told.message)
        type = "Warning" if told.is_warning else "Normal"
        self._recorder.record(reference_to(train), type, told.reason, told.message)


def _jobs(key: Key) -> str:
    """Return the path of the HyperPodPyTorchJobs of a namespace."""
    return f"{JOBS}/namespaces/{quote(key.namespace)}/{HYPERPOD_JOB.plural}"
