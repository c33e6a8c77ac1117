"""Watches of a job and its pods, incidents and events.  Reads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Event, Pod

from unbroken.cli.connection import Cluster, Object, is_owned
from unbroken.cli.watch import Watch
from unbroken.kube.informer import all_synced
from unbroken.spec.job import incident as incident_spec
from unbroken.spec.job import types as job_spec
from unbroken.spec.job.incident import Incident
from unbroken.spec.keys import JOB_LABEL

from .views import read_incidents

JOB = create_namespaced_resource(job_spec.GROUP, job_spec.VERSION, job_spec.KIND, job_spec.PLURAL)
INCIDENT = create_namespaced_resource(
    incident_spec.GROUP, incident_spec.VERSION, incident_spec.KIND, incident_spec.PLURAL
)


def follow_jobs(namespace: str | None) -> Callable[[Watch], None]:
    """Follow the jobs and incidents of a namespace, or of all (None)."""

    def follow(watch: Watch) -> None:
        watch.follow(JOB, namespace=namespace)
        watch.follow(INCIDENT, namespace=namespace)

    return follow


class Watched(Watch):
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
