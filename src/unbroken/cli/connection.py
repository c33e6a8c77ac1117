"""Jobs and what belongs to them, read and changed through the Kubernetes API.

Objects are decoded JSON here; what a command shows of them is decided in `views`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from unbroken.cli.job.views import read_incidents
from unbroken.errors import SpecError, WorldError
from unbroken.kube.errors import NotFound
from unbroken.kube.nesting import DEPTH_MAX, cut
from unbroken.spec.job import incident as incident_spec
from unbroken.spec.job import types as job_spec
from unbroken.spec.keys import JOB_LABEL

from .place import Place

if TYPE_CHECKING:
    from unbroken.kube.client import KubeClient

Object = dict[str, Any]
T = TypeVar("T")

JOBS = (f"apis/{job_spec.GROUP}/{job_spec.VERSION}", job_spec.PLURAL)
INCIDENTS = (f"apis/{incident_spec.GROUP}/{incident_spec.VERSION}", incident_spec.PLURAL)
PODS, NODES, SECRETS, EVENTS = (
    ("api/v1", plural) for plural in ("pods", "nodes", "secrets", "events")
)
Collection = tuple[str, str]


class Cluster:
    """A connection to a cluster, and the namespace that is meant."""

    def __init__(self, place: Place, client: KubeClient, namespace: str) -> None:
        self.place = place
        self.client = client
        self.namespace = namespace

    def path(self, collection: Collection, name: str = "", namespace: str | None = None) -> str:
        """Path of a collection or of one object; `namespace` empty: all of them."""
        prefix, plural = collection
        inside = self.namespace if namespace is None else namespace
        scope = f"namespaces/{inside}/" if inside and collection != NODES else ""
        return f"{prefix}/{scope}{plural}" + (f"/{name}" if name else "")

    async def get(self, collection: Collection, name: str, namespace: str | None = None) -> Object:
        """Read one object; NotFound if it does not exist."""
        path = self.path(collection, name, namespace)
        return _decoded(await self.client.raw("GET", path))

    async def select(
        self, collection: Collection, labels: str = "", namespace: str | None = None
    ) -> list[Object]:
        """All objects of the namespace (empty: of all) with these labels."""
        query = {"labelSelector": labels} if labels else None
        path = self.path(collection, namespace=namespace)
        found = _decoded(await self.client.raw("GET", path, parameters=query))
        items: list[Object] = found.get("items") or []
        return items

    async def create(self, collection: Collection, value: Object) -> Object:
        """Create an object; AlreadyExists if the name is taken."""
        return _decoded(await self.client.raw("POST", self.path(collection), body=value))

    async def patch(self, collection: Collection, name: str, value: Object) -> Object:
        """Merge into an object."""
        return _decoded(await self.client.merge(self.path(collection, name), value))

    async def delete(self, collection: Collection, name: str, grace: int | None = None) -> None:
        """Ask for an object's deletion."""
        query = {} if grace is None else {"gracePeriodSeconds": str(grace)}
        await self.client.raw("DELETE", self.path(collection, name), parameters=query)

    async def job(self, name: str) -> Object:
        """A job; SpecError where there is none."""
        try:
            return await self.get(JOBS, name)
        except NotFound as refusal:
            await self.jobs()
            text = f'no job "{name}" in namespace {self.namespace}; see: unbroken jobs -A'
            raise SpecError(text) from refusal

    async def jobs(self, namespace: str | None = None) -> list[Object]:
        """All jobs; SpecError where the cluster knows no such kind."""
        try:
            return await self.select(JOBS, namespace=namespace)
        except NotFound as refusal:
            raise SpecError(
                f"this cluster knows no {job_spec.KIND}: its operator is not installed"
            ) from refusal

    async def pods(self, job: str) -> list[Object]:
        """The job's pods."""
        return await self.select(PODS, f"{JOB_LABEL}={job}")

    async def incidents(self, job: Object) -> list[incident_spec.Incident]:
        """The job's incidents, oldest first; none of an earlier job with the same name."""
        return (await self.incidents_of([job]))[job["metadata"]["uid"]]

    async def incidents_of(
        self, jobs: Iterable[Object], namespace: str | None = None
    ) -> dict[str, list[incident_spec.Incident]]:
        """The incidents of each job, oldest first, by the job's uid."""
        try:
            objects = await self.select(INCIDENTS, namespace=namespace)
        except NotFound:
            objects = []
        found: dict[str, list[Object]] = {job["metadata"]["uid"]: [] for job in jobs}
        for one in objects:
            for uid in {str(owner.get("uid")) for owner in _owners(one)} & found.keys():
                found[uid].append(one)
        return {uid: read_incidents(mine) for uid, mine in found.items()}


def _owners(item: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (item.get("metadata") or {}).get("ownerReferences") or ()


def is_owned(item: Mapping[str, Any], uid: str) -> bool:
    """Whether the object belongs to the one with the uid."""
    return any(owner.get("uid") == uid for owner in _owners(item))


def _decoded(body: bytes) -> Object:
    """An answer of the API; what is nested too deeply in it is replaced by a number."""
    try:
        found: Object = msgspec.json.decode(body)
    except RecursionError:
        found = msgspec.json.decode(cut(body, DEPTH_MAX)[0])
    return found


@asynccontextmanager
async def opened(place: Place, namespace: str = "") -> AsyncIterator[Cluster]:
    """A connection for the time of the block."""
    from unbroken.kube.client import connect  # slow to load

    place.require_running()
    async with connect(place.kubeconfig, context=place.context, manager="unbroken-cli") as client:
        yield Cluster(place, client, namespace or client.namespace or "default")


def on_cluster(place: Place, namespace: str, act: Callable[[Cluster], Awaitable[T]]) -> T:
    """Run `act` with a connection; for the commands, which are not asynchronous."""

    async def run() -> T:
        async with opened(place, namespace) as cluster:
            return await act(cluster)

    try:
        return asyncio.run(run())
    except (WorldError, BaseExceptionGroup) as raised:
        error = _sole(raised)
        is_away = isinstance(error, WorldError) and error.retry_after_seconds is not None
        if is_away and place.paths is not None:
            error = WorldError(f"{error} (cluster of {place.paths.directory})")
        elif error is raised:
            raise
        raise error from raised


def _sole(error: BaseException) -> BaseException:
    """What a group of tasks failed of, where that is one thing."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
