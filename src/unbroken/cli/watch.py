"""Follows objects of a cluster, or a job with all that belongs to it, for as long as a command
runs.  Reads only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Event, Pod

from unbroken.cli.connection import Cluster, Object, is_owned
from unbroken.kube.informer import Informer, all_synced
from unbroken.local import state
from unbroken.spec.job import incident as incident_spec
from unbroken.spec.job import types as job_spec
from unbroken.spec.job.incident import Incident
from unbroken.spec.keys import JOB_LABEL

from .job.views import read_incidents

LOOK_SECONDS = 2.0
"""Seconds between looks whether a local cluster still runs."""
GONE_SECONDS = 10.0
"""Seconds without a process of the local cluster after which the command ends. A cluster that is
being started again has one."""


class ClusterWatch:
    """Informers that run inside an `async with`, and a wait for the next change of any of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = cluster.client
        self._place = cluster.place
        self._gone_at: float | None = None
        """Time since which the local cluster has no process, by the event loop's clock."""
        self._informers: list[Informer[Any]] = []
        self._stack = AsyncExitStack()
        self._event = asyncio.Event()

    def follow(
        self,
        kind: type[Any],
        *,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
    ) -> Informer[Any]:
        """Return an informer of the objects in this scope; only before the `async with`."""
        made: Informer[Any] = Informer(
            self._client,
            kind,
            namespace=namespace,
            labels=labels,
            fields=fields,
            on_change=self._changed,
            tells=False,
        )
        self._informers.append(made)
        return made

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for informer in self._informers:
            task = tasks.create_task(informer.run())
            self._stack.callback(task.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _changed(self, old: Any, new: Any) -> None:
        self._event.set()

    def wake(self) -> None:
        """Wake the caller of `change`."""
        self._event.set()

    async def change(self, seconds: float | None = None) -> bool:
        """Wait until an object has changed since the last call.

        False if none has in so many seconds; None: wait without a limit.  SpecError if the local
        cluster was stopped."""
        left = float("inf") if seconds is None else seconds
        while not self._event.is_set():
            if left <= 0.0:
                return False
            wait = min(left, LOOK_SECONDS)
            left -= wait
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._event.wait()
            self._require_running()
        self._event.clear()
        return True

    def _require_running(self) -> None:
        if self._place.paths is None or state.is_up(self._place.paths):
            self._gone_at = None
            return
        now = asyncio.get_running_loop().time()
        if self._gone_at is None:
            self._gone_at = now
        if now - self._gone_at >= GONE_SECONDS:
            self._place.require_running()


JOB = create_namespaced_resource(job_spec.GROUP, job_spec.VERSION, job_spec.KIND, job_spec.PLURAL)
INCIDENT = create_namespaced_resource(
    incident_spec.GROUP, incident_spec.VERSION, incident_spec.KIND, incident_spec.PLURAL
)


def follow_jobs(namespace: str | None) -> Callable[[ClusterWatch], None]:
    """Follow the jobs and incidents of a namespace, or of all (None)."""

    def follow(watch: ClusterWatch) -> None:
        watch.follow(JOB, namespace=namespace)
        watch.follow(INCIDENT, namespace=namespace)

    return follow


class WatchedJob(ClusterWatch):
    """Current copies of a job, its pods, incidents and events inside an `async with`."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster)
        self.name = name
        namespace, labels = cluster.namespace, f"{JOB_LABEL}={name}"
        about = f"involvedObject.kind={job_spec.KIND},involvedObject.name={name}"
        self._incidents = self.follow(INCIDENT, namespace=namespace, labels=labels)
        self._job = self.follow(JOB, namespace=namespace, fields=f"metadata.name={name}")
        self._pods = self.follow(Pod, namespace=namespace, labels=labels)
        self._events = self.follow(Event, namespace=namespace, fields=about)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await all_synced(self._job, self._pods)
        return self

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when the condition holds."""
        while not holds():
            await self.change()

    def job(self) -> Object | None:
        """The job; None if it does not exist."""
        return next((dict(one) for one in self._job.items()), None)

    def has_job(self, uid: str) -> bool:
        """True if the job with this uid exists; a newer job of the same name does not count."""
        job = self.job()
        return job is not None and job["metadata"]["uid"] == uid

    def pods(self) -> list[Object]:
        """The job's pods, by name."""
        found = [one.to_dict() for one in self._pods.items()]
        return sorted(found, key=lambda one: str(one["metadata"]["name"]))

    def warnings(self) -> list[Object]:
        """Events of type Warning about the job, oldest first."""
        job = self.job()
        uid = job["metadata"]["uid"] if job else ""
        found = [one.to_dict() for one in self._events.items() if one.type == "Warning"]
        mine = [one for one in found if one["involvedObject"].get("uid") == uid]
        return sorted(mine, key=lambda one: str(one["metadata"]["creationTimestamp"]))

    def incidents(self) -> list[Incident]:
        """Incidents of the job, oldest first."""
        job = self.job()
        uid = job["metadata"]["uid"] if job else ""
        return read_incidents(one for one in self._incidents.items() if is_owned(one, uid))
