"""Changes of pods and nodes, as work on the jobs that they belong to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightkube.generic_resource import GenericNamespacedResource as Job
from lightkube.resources.core_v1 import Node, Pod

from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.informer import Informer, Informers
from unbroken.observe.job_metrics import JobName
from unbroken.observe.resumed_metrics import ResumedMetrics
from unbroken.operator.job_pods import JobPods
from unbroken.spec.job_kinds import JobKind

from .record import resumed_job
from .views import node_state


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
