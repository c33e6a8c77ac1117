"""Plain requests to an API server, by path."""

from __future__ import annotations

from typing import Any

import msgspec

from unbroken.kube.client import MERGE, KubeClient
from unbroken.kube.errors import ApiRefusal

Object = dict[str, Any]


class PlainRequests:
    """One at a time; each gives what the server answers."""

    def __init__(self, client: KubeClient) -> None:
        self.client = client

    async def call(self, method: str, path: str, **given: Any) -> Object:
        """One request; its answer."""
        found: Object = msgspec.json.decode(await self.client.raw(method, path, **given))
        return found

    async def merge(self, path: str, body: Object) -> Object:
        """Merge patch."""
        return await self.call("PATCH", path, body=body, headers=MERGE)

    async def get(self, path: str) -> Object | None:
        """Return the object; None if it does not exist."""
        try:
            return await self.call("GET", path)
        except ApiRefusal as error:
            assert error.code == 404
            return None
