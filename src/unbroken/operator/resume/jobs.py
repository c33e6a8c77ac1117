"""Jobs of auto-resume: how they are read, the changes that concern them, and the orders carried out
on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, assert_never
from urllib.parse import quote

from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.models.core_v1 import NodeCondition, PodStatus
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import (
    AskForFence,
    DeleteResumedPod,
    Picture,
    PodNode,
    PodState,
    Readiness,
    ResumeEffect,
    Say,
    WriteResumeRecord,
)
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.events import EventRecorder, reference_to
from unbroken.kube.informer import Informer, Informers
from unbroken.log_lines import Log
from unbroken.observe.job_metrics import JobName
from unbroken.observe.resumed_metrics import ResumedMetrics
from unbroken.operator.fences import Fences
from unbroken.operator.job_pods import JobPods
from unbroken.operator.jobs.views import FAULTS, node_view
from unbroken.spec import keys
from unbroken.spec.auto_resume import Resume, has_annotations, resume_of, resume_problems
from unbroken.spec.job_kinds import JobKind, controller_of, names_our_runtime

from .record import read_record, resumed_job, write_record


def annotations_of(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of an object that is a dict."""
    return dict(job["metadata"].get("annotations") or {})


def uid_of(job: Mapping[str, Any]) -> str:
    """Return the uid of an object that is a dict."""
    return str(job["metadata"].get("uid") or "")


def concerns(job: Mapping[str, Any], default: int = 0) -> bool:
    """True if a job has an annotation of auto-resume, valid or not, or the cluster has a default.

    A TrainJob of unbroken's runtime does not concern auto-resume: it restarts by itself.
    """
    if names_our_runtime(job):
        return False
    found = annotations_of(job)
    by_operator = (keys.RESUME_SUSPENDED, keys.RESUME_DEFAULT)
    return default > 0 or has_annotations(found) or any(key in found for key in by_operator)


def picture(
    kind: JobKind,
    job: Mapping[str, Any],
    pods: Iterable[Pod],
    nodes: Mapping[str, PodNode],
    default: int = 0,
) -> Picture:
    """Return all that auto-resume needs of a job; `default` as in `resume_of`."""
    metadata, annotations = job["metadata"], annotations_of(job)
    obstacle = _obstacle(kind, job)
    is_leaving, is_suspended = bool(metadata.get("deletionTimestamp")), kind.is_suspended(job)
    ended_as = kind.end_of(job)
    problems = (obstacle,) if obstacle else resume_problems(annotations)
    return Picture(
        kind=kind.name,
        name=metadata["name"],
        version=metadata.get("resourceVersion") or "",
        resume=Resume() if obstacle else resume_of(annotations, default),
        record=read_record(annotations),
        problems=problems if has_annotations(annotations) else (),
        is_over=is_leaving or is_suspended or bool(ended_as),
        by_suspension=kind.restarts_by_suspension,
        is_suspended=is_suspended,
        is_leaving=is_leaving,
        ended_as=ended_as,
        pods=tuple(pod_state(pod) for pod in pods),
        nodes=nodes,
    )


def _obstacle(kind: JobKind, job: Mapping[str, Any]) -> str:
    """Say why a job is not resumed whatever its annotations say; empty: nothing is in the way."""
    title = f"{kind.name} {job['metadata']['name']}"
    controller = controller_of(job)
    if controller is not None:
        above, name = controller
        return (
            f"{title} is resumed with {above.name} {name}, which controls it: "
            f"only the annotations of that {above.name} count"
        )
    queue = (job["metadata"].get("labels") or {}).get(keys.QUEUE)
    if kind.restarts_by_suspension and queue:
        return (
            f"{title} is not resumed while it has the label {keys.QUEUE}: a restart would suspend "
            "it, and Kueue lets an admitted job run again at once"
        )
    return ""


def pod_state(pod: Pod) -> PodState:
    """Return what auto-resume needs of a pod."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status or PodStatus()
    assert metadata is not None
    leaves = metadata.deletionTimestamp
    return PodState(
        name=metadata.name or "",
        uid=metadata.uid or "",
        node=(spec and spec.nodeName) or None,
        phase=status.phase or "Pending",
        reason=status.reason or "",
        restarts_containers=(spec and spec.restartPolicy) != "Never",
        ends_by=leaves.timestamp() if leaves is not None else None,
    )


def node_state(node: Node) -> PodNode:
    """Return what auto-resume needs of a node."""
    view = node_view(node)
    ready = _condition(node, "Ready")
    status = ready.status if ready is not None else "Unknown"
    since = ready.lastTransitionTime if ready is not None else None
    is_ordered = view.notice is not None and view.notice.is_order
    return PodNode(
        name=view.name,
        readiness=Readiness(status) if status in ("True", "False") else Readiness.SILENT,
        not_ready_since=since.timestamp() if since is not None else 0.0,
        trouble="" if view.is_healthy and not is_ordered else _trouble(node),
        is_fenced=view.is_fenced,
    )


def _condition(node: Node, type: str) -> NodeCondition | None:
    listed = (node.status and node.status.conditions) or ()
    return next((one for one in listed if one.type == type), None)


def _trouble(node: Node) -> str:
    """Why a node counts as unhealthy."""
    for type in sorted(FAULTS):
        found = _condition(node, type)
        if found is not None and found.status == "True":
            return f"{type}: {found.reason}" if found.reason else type
    labels = (node.metadata and node.metadata.labels) or {}
    return f"{keys.HEALTH.rpartition('/')[2]} {labels.get(keys.HEALTH, '')}"


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Options of auto-resume."""

    namespace: str | None = None
    """None: all namespaces."""
    retries: int = 0
    """Restarts of a job without annotations."""
    dead_seconds: float = 0.0
    """Seconds of silence after which the machine of a node is known to be off; 0: it never is."""


class JobChanges(ABC):
    """Adds the jobs of a kind to the work of a subclass when a pod or a node of theirs changes."""

    def __init__(self, kind: JobKind) -> None:
        self._pods = JobPods(kind)
        self._is_stopped = False

    @abstractmethod
    def _add(self, key: Key) -> None:
        """Have the job of this key looked at."""

    def stop(self) -> None:
        """Forget all pods and ignore the shared informers, which continue to call."""
        self._is_stopped = True
        self._pods.clear()

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        if self._is_stopped:
            return
        key = self._pods.changed(old, new)
        if key is not None:
            self._add(key)

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if self._is_stopped or (old and new and node_state(old) == node_state(new)):
            return
        for key in self._pods.jobs_on(key_of(changed(old, new)).name):
            self._add(key)


def pods_and_nodes(
    client: KubeClient, informers: Informers | None, kind: JobKind, namespace: str | None
) -> tuple[Informer[Pod], Informer[Node], list[Informer[Any]]]:
    """Return the informers of pods and nodes, and those of them that the caller must run.

    `informers`: shared ones, which run already; None: there are none.
    """
    if informers is not None:
        return informers.of(Pod), informers.of(Node), []
    pods = Informer(client, Pod, namespace=namespace, labels=kind.pod_label)
    nodes = Informer(client, Node)
    return pods, nodes, [pods, nodes]


@contextmanager
def counting(metrics: ResumedMetrics | None, kind: JobKind, jobs: Informer[Job]) -> Iterator[None]:
    """Keep the jobs of a kind in the metrics for the time of the block."""

    def on_job(old: Job | None, new: Job | None) -> None:
        key = key_of(changed(old, new))
        if metrics is not None:
            found = resumed_job(kind, new) if new is not None else None
            metrics.job(kind.name, JobName(key.namespace, key.name), found)

    jobs.subscribe(on_job)
    try:
        yield
    finally:
        if metrics is not None:
            metrics.kind_gone(kind.name)


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
