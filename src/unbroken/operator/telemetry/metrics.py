"""All metrics of the operator: its own always, those of jobs and nodes while it leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from unbroken.errors import WorldError
from unbroken.kube.clock import monotonic
from unbroken.kube.informer import Informer
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.observe.program_metrics import (
    Health,
    ProgramMetrics,
    QueueHealth,
    WatchHealth,
)
from unbroken.observe.server import PORT, serving_metrics
from unbroken.operator.jobs.operator import Operator

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
        self._operator: Operator | None = None
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

    def count(self, operator: Operator) -> None:
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

    def _look(self) -> Health:
        now = monotonic()
        result = list(self._found)
        return Health(
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
