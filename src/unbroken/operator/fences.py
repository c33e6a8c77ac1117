"""Asks for fences of nodes, for every part of the operator: proof that nothing runs there.

`core.fencing` decides, by the Node as it is now.  The Node remembers its fences in an annotation,
so a new operator knows them.
"""

from __future__ import annotations

from urllib.parse import quote

from lightkube.models.core_v1 import ObjectReference
from lightkube.resources.core_v1 import Node

from unbroken.core.fencing import (
    FENCES_KEPT,
    Fence,
    FenceVerdict,
    advice,
    awaited,
    counts_as_dead,
    fence_verdict,
    is_overdue,
)
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.conditions import is_ready, silent_since
from unbroken.kube.events import EventRecorder
from unbroken.log_lines import Log
from unbroken.spec.keys import FENCE, FENCES
from unbroken.spec.times import time_seconds, time_text

log = Log(__name__)

REFUSED = "FenceRefused"
"""Reason of the event on a node that is not fenced though a job waits for it."""
AWAITED = "FenceAwaited"
"""Reason of the event on a node, and on the job, whose fence is asked for and not given."""
TOLD_MAX = 1024


class Fences:
    """Requests of one part of the operator; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(
        self, client: KubeClient, recorder: EventRecorder, dead_seconds: float = 0.0
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._dead_seconds = dead_seconds
        """Seconds of silence after which a machine is known to be off; 0: it never is."""
        self._told: set[tuple[str, str, FenceVerdict]] = set()

    def is_dead(self, node: Node) -> bool:
        """True if the node is silent for so long that its machine is known to be off."""
        since = silent_since(node)
        silent_seconds = None if since is None else wall() - since
        return counts_as_dead(silent_seconds, self._dead_seconds)

    async def ask(self, name: str, pod: str, reason: str, job: ObjectReference) -> bool:
        """Ask for the fence of a node because of a pod (its uid) of a job, if the node is unwell.

        Return True if nothing runs on the node: it is gone, or counts as dead.
        """
        path = f"api/v1/nodes/{quote(name)}"
        node = await self._client.get_or_none(path, Node)
        if node is None or node.metadata is None or self.is_dead(node):
            return True
        annotations, now = node.metadata.annotations or {}, wall()
        fences = read_fences(annotations.get(FENCES, ""))
        is_asked_for = bool(annotations.get(FENCE))
        verdict = fence_verdict(is_ready(node), is_asked_for, fences, pod, now)
        if verdict is not FenceVerdict.ASK:
            text = advice(verdict, name, reason)
            if verdict is FenceVerdict.STANDS and is_overdue(fences, now):
                text = awaited(name, reason)
            self._tell(node, pod, verdict, text, job)
            return False
        kept = write_fences((*fences, Fence(pod, now)))
        body = {"metadata": {"annotations": {FENCE: reason, FENCES: kept}}}
        version = node.metadata.resourceVersion
        if await self._client.merge_if_present(path, body, version=version):
            log.warning("fence asked for", node=name, reason=reason)
        return False

    def _tell(
        self, node: Node, pod: str, verdict: FenceVerdict, text: str, job: ObjectReference
    ) -> None:
        """Say once why a node is not fenced for a pod; on Node and job if a person must act."""
        name = (node.metadata and node.metadata.name) or ""
        is_new = bool(text) or verdict is FenceVerdict.READY
        if not is_new or (name, pod, verdict) in self._told:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told.add((name, pod, verdict))
        log.info("fence not given", node=name, status=verdict.value, message=text)
        for about in (node, job) if text else ():
            reason = AWAITED if verdict is FenceVerdict.STANDS else REFUSED
            self._recorder.record(about, "Warning", reason, text)


def read_fences(text: str) -> tuple[Fence, ...]:
    """Read the fences of a node from its annotation; malformed ones count as missing."""
    found = []
    for item in text.split(",")[-FENCES_KEPT:]:
        time, _, pod = item.partition(" ")
        try:
            found.append(Fence(pod, time_seconds(time)))
        except (ValueError, OverflowError):
            continue
    return tuple(found)


def write_fences(fences: tuple[Fence, ...]) -> str:
    """Return the annotation of the newest fences."""
    return ",".join(f"{time_text(one.at)} {one.pod}" for one in fences[-FENCES_KEPT:])
