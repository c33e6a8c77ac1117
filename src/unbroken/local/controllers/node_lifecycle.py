"""Notices nodes that fall silent, taints them, and moves their pods off.

A node lives as long as its lease, or its status, changes: by this program's own clock, so that
clocks of machines need not agree.

Conditions and taints of a silent node, and the time when its pods must go, are pure functions,
after kube-controller-manager v1.33, pkg/controller/nodelifecycle and pkg/controller/tainteviction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from lightkube.models.core_v1 import NodeCondition, Taint, Toleration
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node, Pod
from msgspec import structs

from unbroken.errors import WorldError
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import STRATEGIC, KubeClient, Object
from unbroken.kube.clock import monotonic, rfc3339, wall
from unbroken.kube.conditions import is_ready, ready_status
from unbroken.kube.errors import NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.lease import NODE_LEASES
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.scheduler.model import tolerates
from unbroken.log_lines import Log
from unbroken.spec.keys import NOT_READY, UNREACHABLE, UNSCHEDULABLE

WATCHED = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
"""Conditions that a node must keep fresh."""

PRESSURES = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
    "NetworkUnavailable": "node.kubernetes.io/network-unavailable",
}

DEFAULT_TOLERATION_SECONDS = 300
"""Admission gives it to every pod for the two taints of a lost node (DefaultTolerationSeconds)."""


def _conditions(node: Node) -> Sequence[NodeCondition]:
    return (node.status and node.status.conditions) or ()


def heartbeat(node: Node) -> str:
    """Return the node's own last write into its status; it changes when the node writes again.

    Empty for Unknown, which only this program writes.
    """
    ready = ready_status(node)
    if ready == "Unknown":
        return ""
    times = [
        condition.lastHeartbeatTime
        for condition in _conditions(node)
        if condition.lastHeartbeatTime
    ]
    return f"{ready} {max(times).isoformat() if times else ''}"


def silence(node: Node, now: float) -> list[Object]:
    """Return the conditions to write for a silent node; empty if they are set already."""
    by_type = {condition.type: condition for condition in _conditions(node)}
    written: list[Object] = []
    for kind in WATCHED:
        known = by_type.get(kind)
        if known is not None and known.status == "Unknown":
            continue
        reason, message = "NodeStatusUnknown", "Kubelet stopped posting node status."
        if known is None:
            reason, message = "NodeStatusNeverUpdated", "Kubelet never posted node status."
        written.append(
            {
                "type": kind,
                "status": "Unknown",
                "reason": reason,
                "message": message,
                "lastTransitionTime": rfc3339(now),
            }
        )
    return written


def wanted_taints(node: Node, now: float) -> list[Taint] | None:
    """The taints that the node's state calls for; None if it has just those.

    Taints of others stay, and so does the time at which one of these was added.
    """
    present = list((node.spec and node.spec.taints) or ())
    calls = _called_for(node)
    ours = {NOT_READY, UNREACHABLE, UNSCHEDULABLE, *PRESSURES.values()}
    kept = [
        taint for taint in present if taint.key not in ours or (taint.key, taint.effect) in calls
    ]
    have = {(taint.key, taint.effect) for taint in kept}
    added = [
        Taint(key=key, effect=effect, timeAdded=datetime.fromtimestamp(int(now), UTC))
        for key, effect in calls
        if (key, effect) not in have
    ]
    return [*kept, *added] if added or len(kept) != len(present) else None


def _called_for(node: Node) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    match ready_status(node):
        case "False":
            calls += [(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]
        case "Unknown":
            calls += [(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")]
        case "":
            # A node without a report so far takes no pods, but has lost none either.
            calls.append((NOT_READY, "NoSchedule"))
        case _:
            pass
    if node.spec and node.spec.unschedulable:
        calls.append((UNSCHEDULABLE, "NoSchedule"))
    for condition in _conditions(node):
        if condition.type in PRESSURES and condition.status == "True":
            calls.append((PRESSURES[condition.type], "NoSchedule"))
    return calls


@dataclass(frozen=True, slots=True)
class Stay:
    """Time that a pod may stay on a node. `until` None: any time."""

    until: float | None
    """Wall time."""


def stay(pod: Pod, taints: Sequence[Taint], now: float) -> Stay:
    """Return when the node's NoExecute taints evict the pod; a time in the past: now."""
    tolerations = list((pod.spec and pod.spec.tolerations) or ())
    tolerations += _defaults(tolerations)
    until: float | None = None
    for taint in taints:
        if taint.effect != "NoExecute":
            continue
        matching = [toleration for toleration in tolerations if tolerates(toleration, taint)]
        if not matching:
            return Stay(now)
        limits = [
            toleration.tolerationSeconds
            for toleration in matching
            if toleration.tolerationSeconds is not None
        ]
        if limits:
            since = taint.timeAdded.timestamp() if taint.timeAdded else now
            end = since + max(0, min(limits))
            until = end if until is None else min(until, end)
    return Stay(until)


def _defaults(tolerations: Sequence[Toleration]) -> list[Toleration]:
    """Return the tolerations that admission adds, for an API server without it."""
    return [
        Toleration(
            key=key,
            operator="Exists",
            effect="NoExecute",
            tolerationSeconds=DEFAULT_TOLERATION_SECONDS,
        )
        for key in (NOT_READY, UNREACHABLE)
        if not any(
            tolerates(toleration, Taint(key=key, effect="NoExecute")) for toleration in tolerations
        )
    ]


log = Log(__name__)


STALLED_SECONDS = 1.0
"""Seconds by which a late check shows that this program was paused, not the nodes: their messages
are still to be read."""


@dataclass(slots=True)
class _Life:
    """The last sign of life of a node."""

    sign: str
    seen: float
    """Time of the last change, by the monotonic clock."""


class NodeLifecycle:
    """Keeps conditions, taints and pods of nodes in line with whether the nodes live."""

    def __init__(
        self,
        client: KubeClient,
        informers: Informers,
        recorder: EventRecorder,
        grace_seconds: float,
        orphan_seconds: float,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._grace = grace_seconds
        self._orphan_seconds = orphan_seconds
        self._nodes = informers.of(Node)
        self._pods = informers.of(Pod)
        self._leases = informers.of(Lease)
        self._lives: dict[str, _Life] = {}
        self._since: dict[str, dict[str, float]] = {}
        """Node -> taint -> wall time at which it was first seen; not every taint has a time."""
        self._by_node: dict[str, set[Key]] = {}
        self._node_of: dict[Key, str] = {}
        self._checks: WorkQueue[str] = WorkQueue("node", self._check, workers=4)
        self._evictions: WorkQueue[Key] = WorkQueue("eviction", self._evict, workers=4)
        self._orphans: WorkQueue[str] = WorkQueue("orphans", self._remove_orphans)

    async def run(self) -> None:
        """Follow the nodes until cancelled."""
        await all_synced(self._nodes, self._pods, self._leases)
        self._leases.subscribe(self._on_lease)
        self._nodes.subscribe(self._on_node)
        self._pods.subscribe(self._on_pod)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checks.run())
            tasks.create_task(self._evictions.run())
            tasks.create_task(self._orphans.run())

    def _on_lease(self, old: Lease | None, new: Lease | None) -> None:
        if new is None or key_of(new).namespace != NODE_LEASES:
            return
        renewed = new.spec.renewTime if new.spec else None
        self._sign(key_of(new).name, "lease", renewed.isoformat() if renewed else "")

    def _sign(self, name: str, source: str, sign: str) -> None:
        life = self._lives.get(name)
        text = f"{source} {sign}"
        if life is None:
            self._lives[name] = _Life(text, monotonic())
        elif life.sign != text:
            life.sign, life.seen = text, monotonic()

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        name = key_of(changed(old, new)).name
        if new is None:
            self._lives.pop(name, None)
            self._since.pop(name, None)
            if self._by_node.get(name):
                self._orphans.add_after(name, self._orphan_seconds)
            return
        written = heartbeat(new)
        if old is None or written not in ("", heartbeat(old)):
            self._sign(name, "status", written)
        if old is None or _matters(old) != _matters(new):
            self._checks.add(name)
            for key in self._by_node.get(name, ()):
                self._evictions.add(key)

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        key = key_of(changed(old, new))
        name = (new.spec.nodeName if new is not None and new.spec else None) or ""
        before = self._node_of.pop(key, "")
        if before:
            self._by_node[before].discard(key)
            if not self._by_node[before]:
                del self._by_node[before]
        if not name:
            return
        self._node_of[key] = name
        self._by_node.setdefault(name, set()).add(key)
        if before == name:
            return
        node = self._nodes.get(name)
        if node is None:
            self._orphans.add_after(name, self._orphan_seconds)
        elif node.spec and node.spec.taints:
            self._evictions.add(key)

    async def _check(self, name: str) -> float | None:
        node = self._nodes.get(name)
        if node is None:
            return None
        life = self._lives.setdefault(name, _Life("", monotonic()))
        left = life.seen + self._grace - monotonic()
        conditions = silence(node, wall()) if left <= 0 else []
        if conditions and left < -STALLED_SECONDS:
            life.seen = monotonic() - self._grace / 2
            log.warning("controller was paused: node is given more time", node=name, seconds=-left)
            return self._grace / 2
        if conditions:
            log.warning("node is silent", node=name, seconds=self._grace - left)
            body: Object = {"status": {"conditions": conditions}}
            await self._write(f"api/v1/nodes/{name}/status", body)
            self._recorder.record(
                node, "Normal", "NodeNotReady", f"Node {name} status is now: NodeNotReady"
            )
            # The rest follows when the change comes back.
            return self._grace
        await self._taint(node)
        if ready_status(node) in ("False", "Unknown"):
            await self._mark_pods(name)
        return left if left > 0 else self._grace

    async def _taint(self, node: Node) -> None:
        taints = wanted_taints(node, wall())
        if taints is None:
            return
        name = key_of(node).name
        log.info(
            "node tainted", node=name, taints=[f"{taint.key}:{taint.effect}" for taint in taints]
        )
        version = node.metadata.resourceVersion if node.metadata else None
        written = [
            {
                **{"key": taint.key, "effect": taint.effect},
                **({"value": taint.value} if taint.value else {}),
                **({"timeAdded": rfc3339(taint.timeAdded.timestamp())} if taint.timeAdded else {}),
            }
            for taint in taints
        ]
        # The whole list, so with its version: others taint nodes too.
        body = {"spec": {"taints": written or None}}
        await self._client.merge_if_present(f"api/v1/nodes/{name}", body, version=version)

    async def _mark_pods(self, name: str) -> None:
        for key in sorted(self._by_node.get(name, ())):
            pod = self._pods.get(key.name, key.namespace)
            if pod is None or not is_ready(pod):
                continue
            condition: Object = {
                "type": "Ready",
                "status": "False",
                "lastTransitionTime": rfc3339(wall()),
            }
            await self._write(
                f"api/v1/namespaces/{key.namespace}/pods/{key.name}/status",
                {"status": {"conditions": [condition]}},
            )
            self._recorder.record(pod, "Warning", "NodeNotReady", "Node is not ready")

    async def _evict(self, key: Key) -> float | None:
        pod = self._pods.get(key.name, key.namespace)
        node = self._nodes.get(self._node_of.get(key, ""))
        if pod is None or node is None or pod.metadata is None or pod.metadata.deletionTimestamp:
            return None
        now = wall()
        until = stay(pod, self._dated(node, now), now).until
        if until is None:
            return None
        if until > now:
            return until - now
        log.info("pod evicted by a taint", pod=key, node=key_of(node).name)
        message = f"Taint manager: deleting due to NoExecute taint on {key_of(node).name}"
        await self._disrupt(pod, "DeletionByTaintManager", message)
        self._recorder.record(
            pod, "Normal", "TaintManagerEviction", f"Marking for deletion Pod {key}"
        )
        await self._delete(pod, None)
        return None

    def _dated(self, node: Node, now: float) -> list[Taint]:
        """The node's taints, each with the time from which it counts."""
        taints = (node.spec and node.spec.taints) or []
        known = self._since.get(key_of(node).name, {})
        named = {f"{taint.key}={taint.value}:{taint.effect}": taint for taint in taints}
        since = {name: known.get(name, now) for name in named}
        self._since[key_of(node).name] = since
        return [
            taint
            if taint.timeAdded
            else structs.replace(taint, timeAdded=datetime.fromtimestamp(since[name], UTC))
            for name, taint in named.items()
        ]

    async def _remove_orphans(self, name: str) -> None:
        if self._nodes.get(name) is not None or not self._by_node.get(name):
            return
        if await self._client.get_or_none(f"api/v1/nodes/{name}", Object) is not None:
            raise WorldError(f"node {name} is there, but not seen yet", 1.0)
        for key in sorted(self._by_node.get(name, ())):
            pod = self._pods.get(key.name, key.namespace)
            if pod is None:
                continue
            log.info("pod of a deleted node removed", pod=key, node=name)
            is_done = pod.status is not None and pod.status.phase in ("Succeeded", "Failed")
            await self._disrupt(
                pod,
                "DeletionByPodGC",
                "PodGC: node no longer exists",
                None if is_done else "Failed",
            )
            await self._delete(pod, 0)

    async def _disrupt(self, pod: Pod, reason: str, message: str, phase: str | None = None) -> None:
        condition: Object = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": rfc3339(wall()),
        }
        status: Object = {"conditions": [condition], **({"phase": phase} if phase else {})}
        await self._write(f"{_path(pod)}/status", {"status": status})

    async def _delete(self, pod: Pod, grace_seconds: int | None) -> None:
        uid = pod.metadata.uid if pod.metadata else None
        await self._client.delete_if_present(_path(pod), uid, grace_seconds=grace_seconds)

    async def _write(self, path: str, body: Object) -> None:
        with suppress(NotFound):
            await self._client.raw("PATCH", path, body=body, headers=STRATEGIC)


def _matters(node: Node) -> object:
    """Return the parts of a node that decide about taints and pods; heartbeats do not."""
    conditions = (node.status and node.status.conditions) or ()
    spec = node.spec
    return (
        [(condition.type, condition.status) for condition in conditions],
        (spec and spec.taints) or [],
        bool(spec and spec.unschedulable),
    )


def _path(pod: Pod) -> str:
    key = key_of(pod)
    return f"api/v1/namespaces/{key.namespace}/pods/{key.name}"
