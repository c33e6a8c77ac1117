"""The node's requests to the Kubernetes API, as plain objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.kube.client import STRATEGIC, KubeClient
from unbroken.local.node.pods.events import Object


class NodeApi:
    """Reads and writes of one node; raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self.client = client

    async def _call(self, method: str, path: str, **arguments: Any) -> Object:
        answer = await self.client.raw(method, path, **arguments)
        decoded: Object = msgspec.json.decode(answer)
        return decoded

    async def get(self, path: str) -> Object | None:
        """The object at a path below the root; None if there is none."""
        return await self.client.get_or_none(path, Object)

    async def named(self, plural: str, namespace: str | None, name: str) -> Object | None:
        """An object of the core group."""
        inner = f"namespaces/{quote(namespace)}/" if namespace is not None else ""
        return await self.get(f"api/v1/{inner}{plural}/{quote(name)}")

    async def create(self, path: str, body: Object) -> Object:
        """Create an object in a collection."""
        return await self._call("POST", path, body=body)

    async def replace(self, path: str, body: Object) -> Object:
        """Write an object over the version that it was read at."""
        return await self._call("PUT", path, body=body)

    async def patch(self, path: str, body: Object) -> Object:
        """Strategic merge patch."""
        return await self._call("PATCH", path, body=body, headers=STRATEGIC)

    async def patch_pod_status(self, pod: Object, status: Mapping[str, Any]) -> Object:
        """Write changed parts of a pod's status, of this very pod."""
        metadata = pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        return await self.patch(f"{pod_path(metadata)}/status", body)

    async def delete_pod(self, pod: Object) -> None:
        """Remove a pod whose containers are gone, unless it is another one by now."""
        metadata = pod["metadata"]
        await self.client.delete_if_present(pod_path(metadata), metadata["uid"], grace_seconds=0)


def pod_path(metadata: Object) -> str:
    """Return the path of a pod below the root."""
    return f"api/v1/namespaces/{quote(metadata['namespace'])}/pods/{quote(metadata['name'])}"
