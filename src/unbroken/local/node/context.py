"""State that all pods of one node share, and the node's requests to the Kubernetes API."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from unbroken.kube.client import STRATEGIC, KubeClient
from unbroken.local.networks import PodAddresses
from unbroken.local.node.pods.events import Note, Object
from unbroken.local.node.processes.limits import Limits
from unbroken.local.node.processes.process import Launcher


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


PASSED_ON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
)  # fmt: skip
"""Variables of the host that stand in for those of an image."""
STAND_INS = Path(__file__).parent / "bin"
"""Commands that pods find before others of their names: `hyperpodrun`, which starts the pod's own
or `unbrokenrun`."""


@dataclass(slots=True)
class NodeContext:
    """Shared by the workers of one node; made by the driver."""

    name: str
    address: str
    directory: Path
    allocatable: Mapping[str, str]
    api: NodeApi
    launcher: Launcher
    limits: Limits
    addresses: PodAddresses
    session: aiohttp.ClientSession
    clock: Callable[[], float]
    """Seconds since the epoch that never go back."""
    record: Callable[[Object, Note], None]
    """Publish an event about a pod."""
    api_host: str = ""
    api_port: str = ""
    gpus: dict[int, str] = field(default_factory=dict)
    """UID of the pod that has each GPU."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Python environments by the name of the image that each replaces."""


def base_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that every container starts from; our own commands are on its PATH."""
    result = {name: environ[name] for name in PASSED_ON if name in environ}
    result["PATH"] = with_own_commands(result.get("PATH", os.defpath))
    return result


def with_image(
    variables: Mapping[str, str], image: str, environments: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with the Python environment that replaces an image, if one does.

    An environment is given for a name with its tag, or for all tags of a name.
    """
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    untagged = head if colon and "/" not in tag else name
    for known in (image, name, untagged):
        if directory := environments.get(known):
            path = os.pathsep.join([f"{directory}/bin", variables.get("PATH", os.defpath)])
            return {**variables, "PATH": path, "VIRTUAL_ENV": directory}
    return dict(variables)


def with_own_commands(path: str) -> str:
    """Return a PATH with our stand-ins first and our own commands last."""
    places = [place for place in path.split(os.pathsep) if place != str(STAND_INS)]
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([str(STAND_INS), *places, *([own] if own not in places else [])])
