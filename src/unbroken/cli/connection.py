"""Objects of a cluster, read and changed through the Kubernetes API.

Objects are decoded JSON here; `job/views` and `nodes/views` decide what a command shows of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from unbroken.cli.job.views import read_incidents
from unbroken.errors import SpecError, WorldError
from unbroken.kube.bounds import DEPTH_MAX, cut
from unbroken.kube.errors import Forbidden, NotFound
from unbroken.spec.job import incident as incident_spec
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.spec.nodes.kinds import NODE_CHECK, NODE_RECORD, OwnKind

from .place import ClusterPlace

if TYPE_CHECKING:
    from unbroken.kube.client import KubeClient
    from unbroken.wire.agent import AgentReport

Object = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """The objects of one kind, and the words for what is missing."""

    prefix: str
    """The path before the namespace."""
    plural: str
    noun: str
    """The word for one object in an error."""
    listing: str = ""
    """The command that lists the objects."""
    unknown: str = ""
    """The error of a cluster that does not know the kind; empty for a built-in kind."""
    is_namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group; empty: the core group."""
        return self.prefix.split("/")[1] if self.prefix.startswith("apis/") else ""


def _own(kind: OwnKind[Any, Any]) -> ObjectKind:
    return ObjectKind(
        kind.path.rpartition("/")[0],
        kind.plural,
        kind.kind,
        unknown=f"this cluster knows no {kind.kind}: the operator is not installed there; "
        "see: unbroken operator --help",
        is_namespaced=False,
    )


JOBS = ObjectKind(
    HYPERPOD_JOB.path,
    HYPERPOD_JOB.plural,
    "job",
    "unbroken jobs -A",
    f"this cluster knows no {HYPERPOD_JOB.name}: its operator is not installed",
)
INCIDENTS = ObjectKind(
    f"apis/{incident_spec.GROUP}/{incident_spec.VERSION}", incident_spec.PLURAL, "incident"
)
PODS = ObjectKind("api/v1", "pods", "pod")
SECRETS = ObjectKind("api/v1", "secrets", "Secret")
EVENTS = ObjectKind("api/v1", "events", "event")
NODES = ObjectKind("api/v1", "nodes", "node", "unbroken nodes", is_namespaced=False)
RECORDS, CHECKS = _own(NODE_RECORD), _own(NODE_CHECK)
DOTS = (".", "..")
"""Parts of a path that name another path, and that no quoting changes. Nor does quoting help with a
slash: the Kubernetes API reads `a%2Fstatus` as `a/status`."""
JOB_LABEL = HYPERPOD_JOB.pod_label


class ReportSource(Protocol):
    """Another way to the reports of a job's agents than to ask the agents."""

    @property
    def problem(self) -> str:
        """A sentence that says why there were none the last time; empty: there were."""

    async def of_job(self, namespace: str, job: str) -> Mapping[str, AgentReport]:
        """Return the newest reports by the uid of their pod."""


class Cluster:
    """A connection to a cluster, with the namespace to use."""

    operator: ReportSource | None = None
    """Gives the reports of agents; None: only the agents of a local cluster are asked."""

    def __init__(self, place: ClusterPlace, client: KubeClient, namespace: str) -> None:
        self.place = place
        self.client = client
        self.namespace = namespace

    def path(self, collection: ObjectKind, name: str = "", namespace: str | None = None) -> str:
        """Path of a collection or of one object.

        `namespace`: None for that of the connection, empty for all namespaces.  Raises SpecError
        for a name that would lead to another path.
        """
        for part in (namespace, self.namespace, name):
            if part in DOTS or "/" in (part or ""):
                raise SpecError(f'"{part}" is no name of an object')
        inside = quote(self.namespace if namespace is None else namespace, safe="")
        scope = f"namespaces/{inside}/" if inside and collection.is_namespaced else ""
        end = f"/{quote(name, safe='')}" if name else ""
        return f"{collection.prefix}/{scope}{collection.plural}{end}"

    def missing(self) -> list[str]:
        """Sentences about what was left out; a command fails instead."""
        return []

    async def may(self, verb: str, collection: ObjectKind, subresource: str = "") -> bool:
        """True if the account may do this to all objects of the namespace; a command tries it."""
        return True

    async def find(self, collection: ObjectKind, name: str) -> Object | None:
        """One object; None if the cluster has no such object or does not know the kind."""
        if "/" in name:
            return None
        body = await self._read(self.path(collection, name))
        return None if body is None else _decoded(body)

    async def get(self, collection: ObjectKind, name: str) -> Object:
        """One object; SpecError if the cluster has no such object or does not know the kind."""
        result = await self.find(collection, name)
        if result is None:
            await self.select(collection)
            inside = f" in namespace {self.namespace}" if collection.is_namespaced else ""
            hint = f"; see: {collection.listing}" if collection.listing else ""
            raise SpecError(f'no {collection.noun} "{name}"{inside}{hint}')
        return result

    async def select(
        self, collection: ObjectKind, labels: str = "", namespace: str | None = None
    ) -> list[Object]:
        """All objects with these labels; `namespace` as in `path`.

        SpecError if the cluster does not know the kind and the collection has an error for that.
        """
        query = {"labelSelector": labels} if labels else {}
        return await self._list(collection, namespace, query)

    async def may_list(self, collection: ObjectKind) -> bool:
        """True if the account may list these objects; SpecError as `select`."""
        try:
            await self._list(collection, None, {"limit": "1"})
        except Forbidden:
            return False
        return True

    async def _list(
        self, collection: ObjectKind, namespace: str | None, query: Mapping[str, str]
    ) -> list[Object]:
        body = await self._read(self.path(collection, namespace=namespace), query)
        if body is None:
            if collection.unknown:
                raise SpecError(collection.unknown)
            return []
        items: list[Object] = _decoded(body).get("items") or []
        return items

    async def _read(self, path: str, query: Mapping[str, str] | None = None) -> bytes | None:
        """The answer to a GET; None if the API has no such thing."""
        try:
            return await self.client.raw("GET", path, parameters=query)
        except NotFound:
            return None

    async def create(self, collection: ObjectKind, value: Object) -> Object:
        """Create an object; AlreadyExists if the name is taken."""
        try:
            return _decoded(await self.client.raw("POST", self.path(collection), body=value))
        except NotFound:
            await self.select(collection)
            raise

    async def patch(self, collection: ObjectKind, name: str, value: Object) -> Object:
        """Apply a JSON merge patch to an object."""
        return _decoded(await self.client.merge(self.path(collection, name), value))

    async def delete(self, collection: ObjectKind, name: str) -> None:
        """Request the deletion of an object; no error if it does not exist."""
        await self.client.delete_if_present(self.path(collection, name))

    async def job(self, name: str) -> Object:
        """A job; SpecError if it does not exist."""
        return await self.get(JOBS, name)

    async def pods(self, job: str) -> list[Object]:
        """The job's pods."""
        return await self.select(PODS, f"{JOB_LABEL}={job}")

    async def incidents(self, job: Object) -> list[incident_spec.Incident]:
        """Incidents of this job, oldest first, without those of an earlier job of the same name."""
        return (await self.incidents_of([job]))[job["metadata"]["uid"]]

    async def incidents_of(
        self, jobs: Iterable[Object], namespace: str | None = None
    ) -> dict[str, list[incident_spec.Incident]]:
        """The incidents of each job, oldest first, by the job's uid.

        What names a job of another namespace as its owner is not of that job: whoever may write in
        one namespace could say anything about the jobs of others.
        """
        places = {job["metadata"]["uid"]: job["metadata"]["namespace"] for job in jobs}
        result: dict[str, list[Object]] = {uid: [] for uid in places}
        for item in await self.select(INCIDENTS, namespace=namespace):
            for uid in {str(owner.get("uid")) for owner in _owners(item)} & result.keys():
                if item["metadata"]["namespace"] == places[uid]:
                    result[uid].append(item)
        return {uid: read_incidents(mine) for uid, mine in result.items()}


def _owners(item: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (item.get("metadata") or {}).get("ownerReferences") or ()


def is_owned(item: Mapping[str, Any], uid: str) -> bool:
    """True if an owner reference of the object has this uid."""
    return any(owner.get("uid") == uid for owner in _owners(item))


def _decoded(body: bytes) -> Object:
    """A decoded answer of the API, without values that are nested too deeply."""
    try:
        result: Object = msgspec.json.decode(body)
    except RecursionError:
        result = msgspec.json.decode(cut(body, DEPTH_MAX)[0])
    return result


@asynccontextmanager
async def opened(place: ClusterPlace, namespace: str = "") -> AsyncIterator[Cluster]:
    """Connect to a cluster for the duration of the block."""
    from unbroken.kube.client import connect  # slow to load

    place.require_running()
    async with connect(place.kubeconfig, context=place.context, manager="unbroken-cli") as client:
        yield Cluster(place, client, namespace or client.namespace or "default")


def on_cluster(place: ClusterPlace, namespace: str, act: Callable[[Cluster], Awaitable[T]]) -> T:
    """Run the coroutine `act` with a connection, and return its result."""

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
    """The only error in an exception group, else the group itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
