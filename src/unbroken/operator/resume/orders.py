"""Orders about pods and nodes that auto-resume of every kind carries out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from urllib.parse import quote

from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import AskForFence, DeleteResumedPod, PodNode
from unbroken.kube.client import KubeClient
from unbroken.kube.informer import Informer
from unbroken.spec.keys import FENCE

from .views import node_state

log = logging.getLogger(__name__)


class PodOrders:
    """Looks at the nodes of pods, deletes pods and asks for fences."""

    def __init__(self, client: KubeClient, nodes: Informer[Node]) -> None:
        self._client = client
        self._nodes = nodes

    async def nodes_of(self, pods: Iterable[Pod]) -> dict[str, PodNode]:
        """Return the pods' nodes by name; a missing one is gone, as the API itself was asked."""
        names = {pod.spec.nodeName for pod in pods if pod.spec and pod.spec.nodeName}
        found = {}
        for name in sorted(names):
            node = self._nodes.get(name) or await self._node(name)
            if node is not None:
                found[name] = node_state(node)
        return found

    async def delete(self, namespace: str, order: DeleteResumedPod) -> None:
        """Delete a pod of a namespace."""
        if order.force and not await self._is_dead(order.node):
            return
        path = f"api/v1/namespaces/{quote(namespace)}/pods/{quote(order.name)}"
        grace = 0 if order.force else None
        if await self._client.delete_if_present(path, order.uid, grace_seconds=grace):
            log.info("pod=%s/%s deleted=yes force=%s", namespace, order.name, order.force)

    async def fence(self, order: AskForFence) -> None:
        """Ask for proof that nothing runs on a node."""
        body = {"metadata": {"annotations": {FENCE: order.reason}}}
        path = f"api/v1/nodes/{quote(order.node)}"
        if await self._client.merge_if_present(path, body):
            log.warning('node=%s fence=asked reason="%s"', order.node, order.reason)

    async def _node(self, name: str) -> Node | None:
        """Read the node from the API."""
        return await self._client.get_or_none(f"api/v1/nodes/{quote(name)}", Node)

    async def _is_dead(self, name: str | None) -> bool:
        """True if the node is gone or fenced right now: informers may be late."""
        if name is None:
            return False
        node = await self._node(name)
        return node is None or node_state(node).is_fenced
