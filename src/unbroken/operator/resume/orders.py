"""Orders that auto-resume of every kind of job carries out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, assert_never
from urllib.parse import quote

from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import (
    AskForFence,
    DeleteResumedPod,
    PodNode,
    ResumeEffect,
    Say,
    WriteResumeRecord,
)
from unbroken.kube.cache import Key, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informer
from unbroken.log_lines import Log
from unbroken.operator.fences import Fences
from unbroken.spec.job_kinds import JobKind

from .record import write_record
from .views import node_state, uid_of

log = Log(__name__)


def path_of(kind: JobKind, key: Key) -> str:
    """Return the path of a job at the API server."""
    return f"{kind.path}/namespaces/{quote(key.namespace)}/{kind.plural}/{quote(key.name)}"


class Orders:
    """Looks at the nodes of pods, and carries out orders on jobs, pods and nodes."""

    def __init__(
        self,
        client: KubeClient,
        recorder: EventRecorder,
        nodes: Informer[Node],
        dead_seconds: float,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._nodes = nodes
        self._fences = Fences(client, recorder, dead_seconds)

    async def carry_out(self, kind: JobKind, job: Job, order: ResumeEffect) -> None:
        """Carry out an order.  A record that is not written, since the job has changed meanwhile,
        raises Conflict: the orders that follow it are dropped."""
        match order:
            case WriteResumeRecord():
                await self._write(kind, job, order)
            case DeleteResumedPod():
                await self._delete(key_of(job).namespace, order)
            case AskForFence(node, pod, reason):
                await self._fences.ask(node, pod, reason, reference_to(job))
            case Say():
                type = "Warning" if order.is_warning else "Normal"
                # A user's object, which causes too many events, must not fill the log with them.
                if self._recorder.record(reference_to(job), type, order.reason, order.message):
                    log.warning(
                        "event recorded",
                        kind=kind.name,
                        job=key_of(job),
                        event=order.reason,
                        message=order.message,
                    )
            case _:
                assert_never(order)

    async def _write(self, kind: JobKind, job: Job, order: WriteResumeRecord) -> None:
        body: dict[str, Any] = {"metadata": {"annotations": write_record(order.record)}}
        if order.suspends is not None:
            body |= kind.suspension(order.suspends)
        path = path_of(kind, key_of(job))
        await self._client.merge(path, body, uid=uid_of(job), version=order.version)

    async def nodes_of(self, pods: Iterable[Pod]) -> dict[str, PodNode]:
        """Return the pods' nodes by name; a missing one is gone, as the API itself was asked."""
        names = {pod.spec.nodeName for pod in pods if pod.spec and pod.spec.nodeName}
        found = {}
        for name in sorted(names):
            node = self._nodes.get(name) or await self._node(name)
            if node is not None:
                state = node_state(node)
                is_fenced = state.is_fenced or self._fences.is_dead(node)
                found[name] = replace(state, is_fenced=is_fenced)
        return found

    async def _delete(self, namespace: str, order: DeleteResumedPod) -> None:
        """Delete a pod of a namespace."""
        if order.force and not await self._is_dead(order.node):
            return
        path = f"api/v1/namespaces/{quote(namespace)}/pods/{quote(order.name)}"
        grace = 0 if order.force else None
        if await self._client.delete_if_present(path, order.uid, grace_seconds=grace):
            log.info("pod deleted", pod=f"{namespace}/{order.name}", force=order.force)

    async def _node(self, name: str) -> Node | None:
        """Read the node from the API."""
        return await self._client.get_or_none(f"api/v1/nodes/{quote(name)}", Node)

    async def _is_dead(self, name: str | None) -> bool:
        """True if the node is gone, fenced or dead right now: informers may be late."""
        if name is None:
            return False
        node = await self._node(name)
        return node is None or node_state(node).is_fenced or self._fences.is_dead(node)
