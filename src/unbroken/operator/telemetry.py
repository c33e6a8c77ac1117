"""All metrics of the operator, and a trace of each ended incident.

Its own metrics are served always, those of jobs and nodes, which are fed from the API, while it
leads.

A trace is sent once. Nothing is stored: incidents that had ended before this operator led were sent
by the earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from lightkube.resources.core_v1 import Node
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from unbroken.core.job.record.spans import IncidentName, Trace, trace_of
from unbroken.errors import WorldError
from unbroken.kube.cache import changed, key_of
from unbroken.kube.clock import monotonic, wall
from unbroken.kube.informer import Informer, Informers
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.observe.job_metrics import JobMetrics, JobName, ObservedJob
from unbroken.observe.node_metrics import NodeMetrics, NodeState
from unbroken.observe.program_metrics import ProgramHealth, ProgramMetrics, QueueHealth, WatchHealth
from unbroken.observe.server import PORT, serving_metrics
from unbroken.operator.jobs.operator import JobRunners, OperatorInformers
from unbroken.operator.jobs.views import node_view
from unbroken.operator.kinds import IncidentObject, JobObject, NodeCheckObject, NodeRecordObject
from unbroken.spec.job.codec import incident_from, job_status_from
from unbroken.spec.job.ledger import read_ledger
from unbroken.spec.keys import CLUSTER_NAME, INSTANCE_GROUP, LEDGER
from unbroken.spec.nodes.kinds import NODE_CHECK, NODE_RECORD
from unbroken.spec.nodes.values import health_of
from unbroken.spec.times import time_seconds


def watch_jobs(watches: OperatorInformers, registry: CollectorRegistry, since: float) -> None:
    """Keep the metrics of jobs in `registry`.

    Incidents count if they end from `since` on, in seconds since the epoch.
    """
    metrics = JobMetrics(registry, since, wall)

    def on_job(old: JobObject | None, new: JobObject | None) -> None:
        key = key_of(changed(old, new))
        name = JobName(key.namespace, key.name)
        if new is None:
            metrics.job_gone(name)
        else:
            metrics.job(name, _job_state(new))

    def on_incident(old: IncidentObject | None, new: IncidentObject | None) -> None:
        item = changed(old, new)
        owners = item["metadata"].get("ownerReferences") or ()
        if not owners:
            return
        name = JobName(key_of(item).namespace, owners[0]["name"])
        incident, _ = incident_from(item)
        if new is None:
            metrics.incident_gone(name, owners[0]["uid"], incident.number)
        else:
            metrics.incident(name, owners[0]["uid"], incident)

    watches.jobs.subscribe(on_job)
    watches.incidents.subscribe(on_incident)


def _job_state(job: JobObject) -> ObservedJob:
    metadata = job["metadata"]
    annotations = metadata.get("annotations") or {}
    return ObservedJob(
        metadata["uid"],
        time_seconds(metadata["creationTimestamp"]),
        job_status_from(job.get("status"))[0],
        read_ledger(str(annotations.get(LEDGER) or "")),
    )


def watch_nodes(informers: Informers, registry: CollectorRegistry, since: float) -> None:
    """Keep the metrics of nodes, their records and checks in `registry`.

    Ended repairs and checks count from `since`, in seconds since the epoch.
    """
    metrics = NodeMetrics(registry, since)

    def on_node(old: Node | None, new: Node | None) -> None:
        metrics.node(key_of(changed(old, new)).name, None if new is None else _node_state(new))

    def on_record(old: NodeRecordObject | None, new: NodeRecordObject | None) -> None:
        item = changed(old, new)
        record = None if new is None else NODE_RECORD.spec_of(new)[0]
        metrics.record(key_of(item).name, record)

    def on_check(old: NodeCheckObject | None, new: NodeCheckObject | None) -> None:
        item = changed(old, new)
        status = None if new is None else NODE_CHECK.status_of(new)[0]
        metrics.check(key_of(item).name, NODE_CHECK.spec_of(item)[0], status)

    informers.of(Node).subscribe(on_node)
    informers.of(NodeRecordObject).subscribe(on_record)
    informers.of(NodeCheckObject).subscribe(on_check)


def _node_state(node: Node) -> NodeState:
    labels = (node.metadata and node.metadata.labels) or {}
    return NodeState(
        node_view(node).is_ready,
        health_of(labels),
        labels.get(CLUSTER_NAME, ""),
        labels.get(INSTANCE_GROUP, ""),
    )


log = Log(__name__)


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Address at which metrics are served."""

    host: str = "127.0.0.1"
    port: int = PORT
    is_needed: bool = True
    """False: a port that is taken costs the metrics and affects nothing else."""


class OperatorMetrics(Collector):
    """Metrics in `registry`, for Prometheus.  `found`: parts of this program (kube/observed)."""

    def __init__(self, found: set[Any]) -> None:
        self.registry = CollectorRegistry()
        self._found = found
        self._leading: CollectorRegistry | None = None
        self._operator: JobRunners | None = None
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        ProgramMetrics(self.registry, self._look)
        self.registry.register(self)

    @contextmanager
    def leading(self) -> Iterator[CollectorRegistry]:
        """Yield the registry for the leader's metrics, for the time of the block."""
        self._leading = CollectorRegistry()
        try:
            yield self._leading
        finally:
            self._leading = self._operator = None

    def count(self, operator: JobRunners) -> None:
        """Count the agents and events of this operator's jobs, while it leads."""
        self._operator = operator

    @asynccontextmanager
    async def serving(self, place: MetricsPlace | None) -> AsyncIterator[None]:
        """Serve for the time of the block; None: not at all. Raises WorldError if a required port
        is taken."""
        async with AsyncExitStack() as stack:
            if place is not None:
                server = serving_metrics(self.registry, place.host, place.port)
                try:
                    log.info("metrics are served", address=await stack.enter_async_context(server))
                except WorldError as error:
                    if place.is_needed:
                        raise
                    log.warning("metrics are off", error=error)
            yield

    def describe(self) -> Iterable[Metric]:
        """Return none: the leader's families are not known beforehand."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics of the leader."""
        return () if self._leading is None else self._leading.collect()

    def _look(self) -> ProgramHealth:
        now = monotonic()
        result = list(self._found)
        return ProgramHealth(
            is_leading=self._leading is not None,
            watches=[_watch(item, now) for item in result if isinstance(item, Informer)],
            queues=[_queue(item) for item in result if isinstance(item, WorkQueue)],
            jobs=() if self._operator is None else tuple(self._operator.health()),
        )


def _watch(informer: Informer[Any], now: float) -> WatchHealth:
    silent = 0.0 if informer.received_at is None else now - informer.received_at
    return WatchHealth(
        informer.resource,
        informer.synced.is_set(),
        len(informer),
        informer.lists,
        informer.failures,
        informer.refusals.counts,
        silent,
    )


def _queue(work_queue: WorkQueue[Any]) -> QueueHealth:
    return QueueHealth(work_queue.name, work_queue.waiting, work_queue.handled, work_queue.failed)


SETTLE_SECONDS = 5.0
"""Seconds after an incident's end: its restored steps may be known only after the first step."""


class IncidentTraces:
    """Sends the traces of incidents that end while `run` runs."""

    def __init__(
        self,
        incidents: Informer[IncidentObject],
        send: Callable[[Trace], None],
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._incidents = incidents
        self._send = send
        self._settle_seconds = settle_seconds
        self._told: set[str] = set()
        """Uids of incidents that have ended."""
        self._waiting: dict[str, IncidentObject] = {}
        """The newest versions of incidents that are not sent yet, by uid."""
        self._is_over = False

    async def run(self) -> None:
        """Send until cancelled, and then the rest."""
        await self._incidents.synced.wait()
        self._told = {
            incident["metadata"]["uid"]
            for incident in self._incidents.items()
            if _has_ended(incident)
        }
        self._incidents.subscribe(self._on_incident)
        try:
            await asyncio.Event().wait()
        finally:
            self._is_over = True
            for uid in list(self._waiting):
                self._tell(uid)

    def _on_incident(self, old: IncidentObject | None, new: IncidentObject | None) -> None:
        if self._is_over:
            return
        if new is None:
            assert old is not None
            self._told.discard(old["metadata"]["uid"])
            return
        uid = new["metadata"]["uid"]
        if uid in self._waiting:
            self._waiting[uid] = new
        elif _has_ended(new) and uid not in self._told:
            self._told.add(uid)
            self._waiting[uid] = new
            asyncio.get_running_loop().call_later(self._settle_seconds, self._tell, uid)

    def _tell(self, uid: str) -> None:
        item = self._waiting.pop(uid, None)
        owners = (item and item["metadata"].get("ownerReferences")) or ()
        if item is None or not owners:
            return
        key = key_of(item)
        named = IncidentName(uid, key.name, key.namespace, owners[0]["name"])
        self._send(trace_of(incident_from(item)[0], named))


def _has_ended(item: IncidentObject) -> bool:
    spec = item.get("spec")
    return isinstance(spec, Mapping) and bool(spec.get("outcome"))
