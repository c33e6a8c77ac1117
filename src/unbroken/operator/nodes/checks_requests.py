"""Requests of the checker to the API server."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import msgspec
from lightkube.resources.core_v1 import Node, Pod

from unbroken.errors import WorldError
from unbroken.kube.cache import key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import ApiRefusal, NotFound
from unbroken.log_lines import Log
from unbroken.spec.keys import CHECK_LABEL
from unbroken.spec.nodes.check import NodeCheckStatus
from unbroken.spec.nodes.kinds import NODE_CHECK
from unbroken.spec.schema.write import write_record

from .checks_pods import NAMESPACE

log = Log(__name__)

PODS = f"api/v1/namespaces/{NAMESPACE}/pods"


class _Pods(msgspec.Struct):
    items: list[Pod]


class CheckRequests:
    """Requests about one check; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def start(self, body: Object) -> None:
        """Create a pod and its namespace, if they do not exist."""
        try:
            await self._client.create_if_absent(PODS, body)
        except NotFound:
            await self._make_namespace()
            await self._client.create_if_absent(PODS, body)

    async def _make_namespace(self) -> None:
        # The tests access the host's devices, which stricter levels do not allow.
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}
        body = {"metadata": {"name": NAMESPACE, "labels": labels}}
        await self._client.create_if_absent("api/v1/namespaces", body)

    async def node(self, name: str) -> Node | None:
        """Return the present node."""
        return await self._client.get_or_none(f"api/v1/nodes/{quote(name)}", Node)

    async def patch_node(self, node: Node, patch: Object) -> None:
        """Merge into a node. Raises Conflict if it has changed meanwhile."""
        await self._client.merge(f"api/v1/nodes/{quote(key_of(node).name)}", patch)

    async def write(self, check: Object, status: NodeCheckStatus) -> None:
        """Write the status of this very check, if it is not written yet."""
        if status == NODE_CHECK.status_of(check)[0]:
            return
        path = f"{NODE_CHECK.path}/{quote(check['metadata']['name'])}/status"
        uid = check["metadata"]["uid"]
        await self._client.merge(path, {"status": write_record(status)}, uid=uid)

    async def check(self, name: str) -> Object | None:
        """Return the present NodeCheck."""
        return await self._client.get_or_none(f"{NODE_CHECK.path}/{quote(name)}", Object)

    async def delete_check(self, name: str) -> None:
        """Delete a NodeCheck; its pods go with it."""
        await self._client.delete_if_present(f"{NODE_CHECK.path}/{quote(name)}")

    async def pods_of(self, check: str) -> list[Pod]:
        """Return the pods of a check."""
        return await self._pods(PODS, {"labelSelector": f"{CHECK_LABEL}={check}"})

    async def pods_on(self, node: str) -> list[Pod]:
        """Return all pods of a node."""
        return await self._pods("api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"})

    async def _pods(self, path: str, selector: Mapping[str, str]) -> list[Pod]:
        result = await self._client.raw("GET", path, parameters=selector)
        return msgspec.json.decode(result, type=_Pods).items

    async def log_of(self, pod: Pod, *, is_needed: bool = False) -> str:
        """Read the log of a pod; empty if it cannot be read.

        `is_needed`: raise WorldError if its node does not answer now, but may later.
        """
        assert pod.metadata is not None
        result = b""
        try:
            result = await self._client.raw("GET", f"{PODS}/{pod.metadata.name}/log")
        except (ApiRefusal, WorldError) as error:
            if is_needed and isinstance(error, WorldError):
                raise
            # It has not started yet, or its node does not answer.
            log.debug("log of a pod not read", pod=pod.metadata.name, error=error)
        return result.decode(errors="replace")

    async def delete_pod(self, pod: Pod) -> None:
        """Delete a pod, if it exists."""
        assert pod.metadata is not None
        await self._client.delete_if_present(f"{PODS}/{pod.metadata.name}")
