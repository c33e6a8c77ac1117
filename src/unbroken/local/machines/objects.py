"""The pool's requests to the API about Machines and their Nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

import msgspec

from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import Conflict
from unbroken.local.machines.decisions.places import Changes, Listed, changes
from unbroken.log_lines import Log
from unbroken.spec.keys import MACHINE_FINALIZER
from unbroken.spec.nodes.kinds import MACHINE, MachineSpec, MachineStatus
from unbroken.spec.schema.fields import fields_of, write_record

log = Log(__name__)


class MachineRequests:
    """Requests of the pool; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(self, count: int) -> Changes:
        """Ensure that the places `node-0` to `node-<count - 1>` exist, and no more of that kind.

        The returned changes have been made, except for those that are `blocked`.
        """
        result = msgspec.json.decode(await self._client.raw("GET", MACHINE.path), type=Object)
        wanted = changes([_listed(item) for item in result["items"]], count)
        for name in wanted.create:
            # Its place is kept when a machine with another name replaces it.
            spec = MachineSpec(logical_id=name)
            body = MACHINE.new(name, spec, {"finalizers": [MACHINE_FINALIZER]})
            await self._client.raw("POST", MACHINE.path, body=body)
        for name in wanted.delete:
            log.info("machine deleted: fewer are wanted", machine=name)
            await self._client.delete_if_present(_path(name))
        return wanted

    async def adopt(self, name: str, uid: str) -> None:
        """Add the finalizer to this very machine."""
        await self._finalizers(name, uid, lambda held: [*held, MACHINE_FINALIZER])

    async def let_go(self, name: str, uid: str) -> None:
        """Take the finalizer away."""
        await self._finalizers(
            name, uid, lambda held: [one for one in held if one != MACHINE_FINALIZER]
        )

    async def _finalizers(
        self, name: str, uid: str, change: Callable[[list[str]], list[str]]
    ) -> None:
        result = await self._client.get_or_none(_path(name), Object)
        if result is None or result["metadata"]["uid"] != uid:
            return
        metadata = result["metadata"]
        body = {"metadata": {"finalizers": change(metadata.get("finalizers") or [])}}
        # The whole list, so with its version: others have finalizers too.
        version = metadata["resourceVersion"]
        await self._client.merge_if_present(_path(name), body, version=version)

    async def write_status(self, name: str, uid: str, status: MachineStatus) -> None:
        """Write the status of this very machine; do nothing if it is gone.

        Empty values are removed, never written as empty strings. A kube-apiserver 1.20 that Go 1.19
        compiled takes an empty string for null in a custom resource, and refuses it ("must be of
        type string"). Its validation (go-openapi/validate, type.go) compares a value with its
        type's zero by `reflect.DeepEqual` of two `reflect.Value`, which are the same since.
        """
        written = write_record(status)
        patch = {field.key: written.get(field.key) for field in fields_of(MachineStatus)}
        with suppress(Conflict):
            await self._client.merge_if_present(f"{_path(name)}/status", {"status": patch}, uid=uid)

    async def delete_node(self, name: str) -> None:
        """Delete the Node of a machine of which nothing runs."""
        await self._client.delete_if_present(f"api/v1/nodes/{quote(name)}")


def _path(name: str) -> str:
    return f"{MACHINE.path}/{quote(name)}"


def _listed(item: Object) -> Listed:
    metadata = item["metadata"]
    spec, _ = MACHINE.spec_of(item)
    return Listed(metadata["name"], spec, "deletionTimestamp" in metadata)
