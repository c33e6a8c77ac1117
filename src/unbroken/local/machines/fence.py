"""Sets the known taint that says that nothing of a node runs, and removes its pods.

The taint is `node.kubernetes.io/out-of-service`, as the repairer of a real cluster's nodes sets it.
The pods of such a node are removed, as Kubernetes' own collector does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from lightkube.resources.core_v1 import Node, Pod

from unbroken.kube.cache import key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.informer import Informer
from unbroken.local.machines.decisions.machine import Power
from unbroken.log_lines import Log
from unbroken.spec.keys import FENCE, OUT_OF_SERVICE, POWER

log = Log(__name__)


def power_of(node: Node | None) -> Power:
    """Return the power state that a Node requests; a missing Node requests none."""
    is_off, is_fenced, _ = asked_of(node)
    if is_fenced:
        # Proven just as well without power; such a node only does not come back.
        return Power.FENCED
    return Power.OFF if is_off else Power.ON


def asked_of(node: Node | None) -> tuple[bool, bool, bool]:
    """Return whether the power is to be off, whether a fence is wanted, whether one is proven."""
    asked = annotations_of(node)
    return asked.get(POWER) == "off", bool(asked.get(FENCE)), is_out_of_service(node)


def annotations_of(node: Node | None) -> Mapping[str, str]:
    """Annotations of a Node."""
    return (node.metadata.annotations if node is not None and node.metadata else None) or {}


def is_out_of_service(node: Node | None) -> bool:
    """True if it has the taint."""
    taints = (node.spec.taints if node is not None and node.spec else None) or ()
    return any(taint.key == OUT_OF_SERVICE for taint in taints)


def _is_kept(pod: Pod) -> bool:
    """True if a pod was deleted without grace: only a finalizer of its owner keeps its object."""
    metadata = pod.metadata
    is_leaving = metadata is not None and metadata.deletionTimestamp is not None
    return is_leaving and metadata is not None and metadata.deletionGracePeriodSeconds == 0


class Fence:
    """Writes the proof and takes it back."""

    def __init__(self, client: KubeClient, pods: Informer[Pod]) -> None:
        self._client = client
        self._pods = pods

    async def prove(self, node: Node) -> None:
        """Continue the fence of a node of which nothing runs; asked again when pods have gone.

        With the last pod goes what asked for the fence, unless the node has no power anyway.
        """
        name = key_of(node).name
        if not is_out_of_service(node):
            await self._write(node, taint=True)
            log.info("node fenced", node=name, reason=annotations_of(node).get(FENCE))
            return
        pods = list(self._unfinished(name))
        for pod in pods:
            await self._delete(pod)
        if not pods and annotations_of(node).get(POWER) != "off":
            # Both at once, and before the node starts: one with the taint runs nothing.
            await self._write(node, taint=False)

    async def lift(self, node: Node) -> None:
        """Take the taint away, and what asked for it."""
        await self._write(node, taint=False)

    def _unfinished(self, name: str) -> Iterator[Pod]:
        for pod in self._pods.items():
            if pod.spec is None or pod.spec.nodeName != name:
                continue
            has_ended = pod.status is not None and pod.status.phase in ("Succeeded", "Failed")
            if not has_ended and not _is_kept(pod):
                yield pod

    async def _delete(self, pod: Pod) -> None:
        key = key_of(pod)
        uid = pod.metadata.uid if pod.metadata else None
        path = f"api/v1/namespaces/{quote(key.namespace)}/pods/{quote(key.name)}"
        if await self._client.delete_if_present(path, uid, grace_seconds=0):
            log.info("pod of a fenced node removed", pod=key)

    async def _write(self, node: Node, *, taint: bool) -> None:
        """Set the taint, or remove it and what asked for it."""
        metadata = node.metadata
        kept: list[Object] = [
            one.to_dict()
            for one in (node.spec and node.spec.taints) or ()
            if one.key != OUT_OF_SERVICE
        ]
        if taint:
            kept.append({"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"})
        version = metadata.resourceVersion if metadata else None
        # The whole list, so with its version: others taint nodes too.
        body: Object = {"spec": {"taints": kept or None}}
        if not taint:
            body["metadata"] = {"annotations": {FENCE: None}}
        path = f"api/v1/nodes/{quote(key_of(node).name)}"
        await self._client.merge_if_present(path, body, version=version)
