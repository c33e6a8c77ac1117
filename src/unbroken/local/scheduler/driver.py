"""The scheduler as a program: it follows the cluster, decides, binds, and reports why it cannot.

Decisions are made one after the other on the picture in memory; writes run concurrently. A pod
counts on its node as soon as the decision is made.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, replace

from lightkube.models.core_v1 import ObjectReference
from lightkube.resources.core_v1 import Namespace, Node, PersistentVolumeClaim, Pod

from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import STRATEGIC, KubeClient, Object
from unbroken.kube.clock import pause, rfc3339, wall
from unbroken.kube.errors import ApiRefusal, Conflict, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log

from .model import SCHEDULER, Claim, Cluster, PodInfo, node_info, pod_info
from .place import place, preempt, waits_for_room

log = Log(__name__)

WRITERS = 16
"""Requests under way at a time."""

RETRY_SECONDS = 0.5
"""Seconds after a binding that the API refused."""

BREATH = 20
"""Decisions made in a row before others in the process have a turn."""

GATED = ("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")


async def run_scheduler(
    client: KubeClient, informers: Informers | None = None, *, name: str = SCHEDULER
) -> None:
    """Schedule pods whose schedulerName is `name` until cancelled.

    `informers`: shared ones, which the caller runs; None: of its own.
    """
    async with asyncio.TaskGroup() as tasks:
        if informers is None:
            informers = Informers(client)
            tasks.create_task(informers.run())
        recorder = EventRecorder(client, name)
        scheduler = Scheduler(client, informers, recorder, name)
        tasks.create_task(recorder.run())
        tasks.create_task(scheduler.run())


@dataclass(frozen=True, slots=True)
class Report:
    """Report about a pod that stays without a node, and the preemption for it."""

    pod: PodInfo
    reason: str
    message: str
    node: str = ""
    """Node on which room is made for it."""
    victims: tuple[PodInfo, ...] = ()


class Scheduler:
    """One scheduler; `run` it once."""

    def __init__(
        self, client: KubeClient, informers: Informers, recorder: EventRecorder, name: str
    ) -> None:
        self._client = client
        self._informers = informers
        self._recorder = recorder
        self._name = name
        self._cluster = Cluster()
        self._waiting: dict[Key, PodInfo] = {}
        self._queue: list[tuple[int, float, Key]] = []
        """Heap of waiting pods to be tried: highest priority, then oldest first."""
        self._queued: set[Key] = set()
        self._wake = asyncio.Event()
        self._bindings: dict[Key, PodInfo] = {}
        """Pods that count on the node that they are being bound to."""
        self._reports: dict[Key, Report] = {}
        self._binder = WorkQueue("bind", self._bind, workers=WRITERS)
        self._reporter = WorkQueue("unschedulable", self._report, workers=WRITERS)

    async def run(self) -> None:
        """Schedule until cancelled."""
        informers = self._informers
        for informer in (
            informers.of(Node),
            informers.of(Pod),
            informers.of(PersistentVolumeClaim),
            informers.of(Namespace),
        ):
            await informer.synced.wait()
        informers.of(Namespace).subscribe(self._on_namespace)
        informers.of(PersistentVolumeClaim).subscribe(self._on_claim)
        informers.of(Node).subscribe(self._on_node)
        informers.of(Pod).subscribe(self._on_pod)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._binder.run())
            tasks.create_task(self._reporter.run())
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._decide_all()

    def _on_namespace(self, old: Namespace | None, new: Namespace | None) -> None:
        item = changed(old, new)
        assert item.metadata is not None
        name = item.metadata.name or ""
        if new is None:
            self._cluster.namespaces.pop(name, None)
        elif self._cluster.namespaces.get(name) != (item.metadata.labels or {}):
            self._cluster.namespaces[name] = item.metadata.labels or {}
            self._stir()

    def _on_claim(
        self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None
    ) -> None:
        item = changed(old, new)
        if new is None:
            self._cluster.claims.pop(key_of(item), None)
            return
        claim = Claim(
            is_bound=bool(new.status and new.status.phase == "Bound"),
            is_deleting=bool(new.metadata and new.metadata.deletionTimestamp),
        )
        if self._cluster.claims.get(key_of(new)) != claim:
            self._cluster.claims[key_of(new)] = claim
            self._stir()

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if new is None:
            assert old is not None
            self._cluster.remove_node(key_of(old).name)
            self._stir()
            return
        info = node_info(new)
        place_held = self._cluster.places.get(info.name)
        # Heartbeats change nothing that matters here.
        if place_held is None or place_held.node != info:
            self._cluster.set_node(info)
            self._stir()

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        if new is None:
            assert old is not None
            self._forget(key_of(old))
            return
        info = pod_info(new)
        bound = self._bindings.get(info.key)
        if bound is not None and bound.uid == info.uid and info.is_waiting:
            return  # the event is older than the decision
        self._bindings.pop(info.key, None)
        self._count(info)
        if info.is_waiting and info.scheduler == self._name:
            self._await(info)
        else:
            self._waiting.pop(info.key, None)
            self._cluster.nominated.pop(info.key, None)

    def _forget(self, key: Key) -> None:
        had_place = self._cluster.pod(key) is not None
        self._bindings.pop(key, None)
        self._waiting.pop(key, None)
        self._reports.pop(key, None)
        nominated = self._cluster.nominated.pop(key, None)
        self._cluster.remove_pod(key)
        if had_place or nominated:
            self._stir()

    def _count(self, info: PodInfo) -> None:
        """Count the pod on the node that the API shows."""
        known = self._cluster.pod(info.key)
        if info.node and not info.is_finished:
            if known is None or _plain(known) != _plain(info):
                self._cluster.put_pod(info)
                self._stir()
        elif known is not None:
            self._cluster.remove_pod(info.key)
            self._stir()

    def _await(self, info: PodInfo) -> None:
        known = self._waiting.get(info.key)
        self._waiting[info.key] = info
        if info.nominated:
            self._cluster.nominated[info.key] = info
        if info.gates:
            if info.told != GATED:
                self._tell(Report(info, *GATED))
        elif known is None or _plain(known) != _plain(info):
            self._enqueue(info)

    def _stir(self) -> None:
        """Something changed that may help: every waiting pod is tried again."""
        for pod in self._waiting.values():
            if not pod.gates:
                self._enqueue(pod)

    def _enqueue(self, pod: PodInfo) -> None:
        if pod.key not in self._queued:
            self._queued.add(pod.key)
            heapq.heappush(self._queue, (-pod.priority, pod.created, pod.key))
        self._wake.set()

    async def _decide_all(self) -> None:
        made = 0
        while self._queue:
            key = heapq.heappop(self._queue)[2]
            self._queued.discard(key)
            pod = self._waiting.get(key)
            if pod is None or pod.gates:
                continue
            try:
                self._decide(pod)
            except Exception:
                # The next change of this pod tries it again; the others do not wait for that.
                log.exception("no decision about a pod", pod=key)
                self._waiting.pop(key, None)
            made += 1
            if made % BREATH == 0:
                await pause(0)

    def _decide(self, pod: PodInfo) -> None:
        decision = place(pod, self._cluster)
        if decision.node is not None:
            del self._waiting[pod.key]
            self._cluster.nominated.pop(pod.key, None)
            bound = replace(pod, node=decision.node)
            self._bindings[pod.key] = bound
            self._cluster.put_pod(bound)
            self._binder.add(pod.key)
            return
        if waits_for_room(pod, self._cluster):
            # It was reported already; another event for every victim that ends would not help.
            return
        sentence = decision.sentence()
        preemption = preempt(pod, self._cluster, decision)
        if preemption.node is None:
            self._cluster.nominated.pop(pod.key, None)
            if decision.refusals:
                sentence += f" preemption: {preemption.explanation}"
            self._tell(Report(pod, "Unschedulable", sentence))
            return
        nominated = replace(pod, nominated=preemption.node)
        self._waiting[pod.key] = self._cluster.nominated[pod.key] = nominated
        self._tell(Report(pod, "Unschedulable", sentence, preemption.node, preemption.victims))

    def _tell(self, report: Report) -> None:
        pod = report.pod
        if pod.told != (report.reason, report.message) or report.node != pod.nominated:
            self._reports[pod.key] = report
            self._reporter.add(pod.key)

    async def _bind(self, key: Key) -> None:
        pod = self._bindings.get(key)
        if pod is None:
            return
        body: Object = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": pod.uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": pod.node},
        }
        try:
            await self._client.raw("POST", f"{_path(pod)}/binding", body=body)
        except ApiRefusal as error:
            # Gone, bound already, or changed: the informer will show which.
            log.info("pod not bound", pod=key, node=pod.node, error=error)
            await pause(RETRY_SECONDS)
            self._reconsider(pod)
            return
        log.info("pod bound", pod=key, node=pod.node)
        message = f"Successfully assigned {key} to {pod.node}"
        self._recorder.record(_reference(pod), "Normal", "Scheduled", message)

    def _reconsider(self, pod: PodInfo) -> None:
        if self._bindings.get(pod.key) is not pod:
            return
        current = self._informers.of(Pod).get(pod.key.name, pod.key.namespace)
        self._forget(pod.key)
        if current is not None:
            self._on_pod(None, current)

    async def _report(self, key: Key) -> None:
        report = self._reports.get(key)
        if report is None or key not in self._waiting:
            return
        pod = report.pod
        for victim in report.victims:
            await self._evict(victim, pod, report.node)
        condition: Object = {
            "type": "PodScheduled",
            "status": "False",
            "reason": report.reason,
            "message": report.message,
            "lastProbeTime": None,
            "lastTransitionTime": rfc3339(wall()),
        }
        status: Object = {"conditions": [condition]}
        if report.node or pod.nominated:
            status["nominatedNodeName"] = report.node or None
        if await self._ignoring_absence("PATCH", f"{_path(pod)}/status", {"status": status}):
            log.info("no node for a pod", pod=key, reason=report.message)
            if report.reason == "Unschedulable":
                about = _reference(pod)
                self._recorder.record(about, "Warning", "FailedScheduling", report.message)
        if self._reports.get(key) is report:
            del self._reports[key]

    async def _evict(self, victim: PodInfo, pod: PodInfo, node: str) -> None:
        condition: Object = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": f"{self._name}: preempting to accommodate a higher priority pod",
            "lastTransitionTime": rfc3339(wall()),
        }
        status: Object = {"status": {"conditions": [condition]}}
        await self._ignoring_absence("PATCH", f"{_path(victim)}/status", status)
        precondition: Object = {"preconditions": {"uid": victim.uid}}
        if await self._ignoring_absence("DELETE", _path(victim), precondition):
            log.info("pod preempted", pod=victim.key, by=pod.key, node=node)
            message = f"Preempted by pod {pod.uid} on node {node}"
            self._recorder.record(_reference(victim), "Normal", "Preempted", message)

    async def _ignoring_absence(self, method: str, path: str, body: Object) -> bool:
        headers = STRATEGIC if method == "PATCH" else None
        try:
            await self._client.raw(method, path, body=body, headers=headers)
        except (NotFound, Conflict):
            return False  # The pod is gone, or another pod has its name.
        return True


def _plain(info: PodInfo) -> PodInfo:
    """Without what the scheduler itself writes."""
    return replace(info, told=None, nominated="")


def _path(pod: PodInfo) -> str:
    return f"api/v1/namespaces/{pod.key.namespace}/pods/{pod.key.name}"


def _reference(pod: PodInfo) -> ObjectReference:
    return ObjectReference(
        apiVersion="v1",
        kind="Pod",
        name=pod.key.name,
        namespace=pod.key.namespace,
        uid=pod.uid,
    )
