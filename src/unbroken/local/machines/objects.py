"""What the pool asks of the API about Machines and their Nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient
from unbroken.kube.errors import ApiRefusal
from unbroken.local.machines.decisions.places import Changes, Listed, changes
from unbroken.spec.nodes.kinds import MACHINE
from unbroken.spec.nodes.machine import MachineSpec, MachineStatus
from unbroken.spec.schema.fields import fields_of
from unbroken.spec.schema.write import write_record

log = logging.getLogger(__name__)

Object = dict[str, Any]
MERGE = {"Content-Type": "application/merge-patch+json"}
FINALIZER = "unbroken.dev/machine"
"""On every machine of the pool: the object goes when nothing of it runs any more."""
NOT_FOUND, CONFLICT = 404, 409


class MachineRequests:
    """Requests of the pool; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(self, count: int) -> Changes:
        """See to the places `node-0` to `node-<count - 1>`, and to no more of that kind.

        What it gives back has been done, but for those that are `blocked`.
        """
        found = msgspec.json.decode(await self._client.raw("GET", MACHINE.path), type=Object)
        wanted = changes([_listed(item) for item in found["items"]], count)
        for name in wanted.create:
            # Its place is kept when it is replaced by one of another name.
            spec = MachineSpec(logical_id=name)
            body = MACHINE.new(name, spec, {"finalizers": [FINALIZER]})
            await self._client.raw("POST", MACHINE.path, body=body)
        for name in wanted.delete:
            log.info("machine=%s deleted=yes reason=fewer-nodes", name)
            await self._gone(self._client.raw("DELETE", _path(name)))
        return wanted

    async def adopt(self, name: str, uid: str) -> None:
        """Add the finalizer to this very machine."""
        await self._finalizers(name, uid, lambda held: [*held, FINALIZER])

    async def let_go(self, name: str, uid: str) -> None:
        """Take the finalizer away."""
        await self._finalizers(name, uid, lambda held: [one for one in held if one != FINALIZER])

    async def _finalizers(
        self, name: str, uid: str, change: Callable[[list[str]], list[str]]
    ) -> None:
        try:
            found: Object = msgspec.json.decode(await self._client.raw("GET", _path(name)))
            metadata = found["metadata"]
            if metadata["uid"] != uid:
                return
            kept = change(metadata.get("finalizers") or [])
            # The whole list, so with its version: others have finalizers too.
            version = metadata["resourceVersion"]
            body = {"metadata": {"finalizers": kept, "resourceVersion": version}}
            await self._client.raw("PATCH", _path(name), body=body, headers=MERGE)
        except ApiRefusal as error:
            if error.code == CONFLICT:
                raise WorldError(str(error), 0.0) from error
            if error.code != NOT_FOUND:
                raise

    async def write_status(self, name: str, uid: str, status: MachineStatus) -> None:
        """Write the status of this very machine; nothing where it is gone.

        What is empty is taken away, never written as an empty string: a kube-apiserver 1.20 that
        Go 1.19 compiled takes that for null in a custom resource, and refuses it ("must be of type
        string").  Its validation (go-openapi/validate, type.go) compares a value with its type's
        zero by `reflect.DeepEqual` of two `reflect.Value`, which are the same since.
        """
        written = write_record(status)
        patch = {field.key: written.get(field.key) for field in fields_of(MachineStatus)}
        body = {"metadata": {"uid": uid}, "status": patch}
        path = f"{_path(name)}/status"
        try:
            await self._client.raw("PATCH", path, body=body, headers=MERGE)
        except ApiRefusal as error:
            if error.code not in (NOT_FOUND, CONFLICT):
                raise

    async def delete_node(self, name: str) -> None:
        """Delete the Node of a machine of which nothing runs."""
        await self._gone(self._client.raw("DELETE", f"api/v1/nodes/{quote(name)}"))

    async def _gone(self, request: Awaitable[bytes]) -> None:
        try:
            await request
        except ApiRefusal as error:
            if error.code != NOT_FOUND:
                raise


def _path(name: str) -> str:
    return f"{MACHINE.path}/{quote(name)}"


def _listed(item: Object) -> Listed:
    metadata = item["metadata"]
    spec, _ = MACHINE.spec_of(item)
    return Listed(metadata["name"], spec, "deletionTimestamp" in metadata)
