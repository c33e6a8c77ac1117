"""Cluster objects and what belongs to them, in the Kubernetes API; and the arguments of operations.

Every request reads the objects again, so that a client finds what it has just written. Changes are
made to the version that was read, and made again if another writer was faster.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.core.clusters.state import ClusterState, read_state, write_state
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import Conflict
from unbroken.spec.keys import CLUSTER_ARN, CLUSTER_ID
from unbroken.spec.nodes.kinds import (
    CLUSTER,
    MACHINE,
    NODE_RECORD,
    ClusterSpec,
    ClusterStatus,
    MachineSpec,
    MachineStatus,
    RepairRecord,
    RepairState,
)
from unbroken.spec.schema.fields import write_record
from unbroken.spec.times import time_seconds

from .errors import limit_exceeded, not_found

ARN = re.compile(r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]*):([0-9]{12}):cluster/([a-z0-9]{12})")
TRIES = 10
"""Attempts at an update that loses to concurrent writers."""
ENDED = (RepairState.DONE, RepairState.FAILED)


@dataclass(frozen=True, slots=True)
class Stored:
    """A Cluster object as it was read."""

    content: Object
    spec: ClusterSpec
    status: ClusterStatus
    state: ClusterState

    @property
    def metadata(self) -> Object:
        """Metadata of the object."""
        result: Object = self.content["metadata"]
        return result

    @property
    def object_name(self) -> str:
        """The cluster's name in lower case."""
        name: str = self.metadata["name"]
        return name

    @property
    def arn(self) -> str:
        """As it was given at its creation."""
        arn: str = (self.metadata.get("annotations") or {}).get(CLUSTER_ARN, "")
        return arn

    @property
    def created_at(self) -> float:
        """Seconds since the epoch."""
        return time_seconds(self.metadata["creationTimestamp"])

    @property
    def is_deleting(self) -> bool:
        """Its deletion was asked for."""
        return bool(self.metadata.get("deletionTimestamp"))

    @property
    def phase(self) -> str:
        """ClusterStatus, without waiting for the controller to say it."""
        return "Deleting" if self.is_deleting else self.status.phase


@dataclass(frozen=True, slots=True)
class StoredMachine:
    """A Machine object."""

    content: Object
    spec: MachineSpec
    status: MachineStatus

    @property
    def name(self) -> str:
        """Name of the machine and of its node."""
        name: str = self.content["metadata"]["name"]
        return name

    @property
    def created_at(self) -> float:
        """Seconds since the epoch."""
        return time_seconds(self.content["metadata"]["creationTimestamp"])


class ClusterStore:
    """Requests about clusters; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def create(self, content: Object) -> None:
        """Create a Cluster; AlreadyExists if the name is taken."""
        await self._client.raw("POST", CLUSTER.path, body=content)

    async def clusters(self, cluster_id: str = "") -> list[Stored]:
        """All clusters, or the one with this id."""
        query = {"labelSelector": f"{CLUSTER_ID}={cluster_id}"} if cluster_id else {}
        return [_stored(item) for item in await self._list(CLUSTER.path, query)]

    async def find(self, name_or_arn: str) -> Stored:
        """A cluster, by its name in any case or its ARN; ResourceNotFound."""
        match = ARN.fullmatch(name_or_arn)
        if match is not None:
            for cluster in await self.clusters(match[3]):
                if cluster.arn == name_or_arn:
                    return cluster
            raise not_found(f"Cluster with ARN {name_or_arn} not found")
        content = await self._client.get_or_none(
            f"{CLUSTER.path}/{quote(name_or_arn.lower())}", Object
        )
        if content is None:
            raise not_found(f"Cluster with name {name_or_arn} not found")
        return _stored(content)

    async def change(
        self, name_or_arn: str, change: Callable[[Stored], tuple[ClusterSpec, Object]]
    ) -> Stored:
        """Write what `change` makes of the cluster: its spec, and annotations to set."""
        for _ in range(TRIES):
            stored = await self.find(name_or_arn)
            spec, annotations = change(stored)
            metadata = {
                **stored.metadata,
                "annotations": {**(stored.metadata.get("annotations") or {}), **annotations},
            }
            body = {**stored.content, "metadata": metadata, "spec": write_record(spec)}
            path = f"{CLUSTER.path}/{stored.object_name}"
            if await self._put(path, body):
                return replace(stored, spec=spec)
        raise _too_busy(name_or_arn)

    async def change_state(
        self, name_or_arn: str, change: Callable[[Stored], ClusterState]
    ) -> Stored:
        """Write what `change` makes of the cluster's state."""
        for _ in range(TRIES):
            stored = await self.find(name_or_arn)
            state = change(stored)
            status = replace(stored.status, state=write_state(state))
            body = {**stored.content, "status": write_record(status)}
            if await self._put(f"{CLUSTER.path}/{stored.object_name}/status", body):
                return replace(stored, state=state)
        raise _too_busy(name_or_arn)

    async def delete(self, stored: Stored) -> None:
        """Have this very cluster deleted, with its machines."""
        path = f"{CLUSTER.path}/{stored.object_name}"
        await self._client.delete_if_present(path, stored.metadata["uid"])

    async def machines(self, stored: Stored) -> list[StoredMachine]:
        """The machines of a cluster."""
        # Not by label: whoever replaces a machine need copy its spec only.
        result = await self._list(MACHINE.path, {})
        machines = [
            StoredMachine(item, MACHINE.spec_of(item)[0], MACHINE.status_of(item)[0])
            for item in result
        ]
        return [machine for machine in machines if machine.spec.cluster == stored.object_name]

    async def node(self, name: str) -> Object | None:
        """A Node."""
        return await self._client.get_or_none(f"api/v1/nodes/{quote(name)}", Object)

    async def repair_of(self, node: str) -> RepairRecord | None:
        """The repair of a node that is under way."""
        content = await self._client.get_or_none(f"{NODE_RECORD.path}/{quote(node)}", Object)
        if content is None:
            return None
        repair = NODE_RECORD.spec_of(content)[0].repair
        return repair if repair is not None and repair.state not in ENDED else None

    async def annotate(self, node: Object, annotations: Mapping[str, str]) -> bool:
        """Set annotations of a Node as it was read; False: it has changed since."""
        metadata = node["metadata"]
        path, version = f"api/v1/nodes/{quote(metadata['name'])}", metadata["resourceVersion"]
        body = {"metadata": {"annotations": dict(annotations)}}
        try:
            return await self._client.merge_if_present(path, body, version=version)
        except Conflict:
            return False

    async def delete_machine(self, machine: StoredMachine) -> None:
        """Have a machine deleted; another takes its place."""
        await self._client.delete_if_present(f"{MACHINE.path}/{quote(machine.name)}")

    async def _list(self, path: str, query: Mapping[str, str]) -> list[Object]:
        result: Object = msgspec.json.decode(await self._client.raw("GET", path, parameters=query))
        items: list[Object] = result.get("items") or []
        return items

    async def _put(self, path: str, body: Object) -> bool:
        """True if it was written; False: somebody was faster."""
        try:
            await self._client.raw("PUT", path, body=body)
        except Conflict:
            return False
        return True


def _stored(content: Object) -> Stored:
    status = CLUSTER.status_of(content)[0]
    return Stored(content, CLUSTER.spec_of(content)[0], status, read_state(status.state))


def _too_busy(name: str) -> WorldError:
    return WorldError(f"cluster {name} is being changed by others; try again", 1.0)


@dataclass(frozen=True, slots=True)
class CallContext:
    """Values that are the same for every call."""

    store: ClusterStore
    now: Callable[[], float]
    """Seconds since the epoch."""
    new_hex: Callable[[int], str]
    """Make this number of random hexadecimal digits."""
    region: str
    account: str
    """Account in the ARNs of clusters whose creation was not signed."""
    makes_machines: bool
    """The same as in `ClusterApiOptions`."""
    keeps_checkpoints: bool
    """The same as in `ClusterApiOptions`."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, of the right shape."""

    context: CallContext
    body: Mapping[str, Any]
    region: str

    @property
    def store(self) -> ClusterStore:
        """The store of clusters."""
        return self.context.store

    def require_machines(self, count: int) -> None:
        """ResourceLimitExceeded if `count` new machines are needed and nothing makes machines."""
        if count and not self.context.makes_machines:
            raise limit_exceeded(
                f"New instances needed: {count}, but nothing in this Kubernetes cluster "
                "makes machines. Add nodes with the tools of your cloud: jobs on them need no "
                "CreateCluster. If a controller of yours makes Machine objects, install "
                "unbroken with nodes.provider=machines (--node-provider machines)."
            )

    def text(self, name: str) -> str:
        """A member; empty where it was not given."""
        return str(self.body.get(name) or "")


Handler = Callable[[ApiCall], Awaitable[Object]]
