"""The operator's own health: leadership, watches, queues, and reachable agents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .job_metrics import JobName


@dataclass(frozen=True, slots=True)
class WatchHealth:
    """One watch of a collection; there may be several of the same."""

    resource: str
    is_synced: bool
    objects: int
    lists: int
    failures: int
    refused: Mapping[str, int]
    """Objects by the step that refused them."""
    silent_seconds: float
    """Seconds since the server's last message."""


@dataclass(frozen=True, slots=True)
class QueueHealth:
    """One queue of work."""

    name: str
    waiting: int
    handled: int
    failed: int


@dataclass(frozen=True, slots=True)
class JobHealth:
    """The operator's service of one job."""

    job: JobName
    reachable: int
    """Agents that can be reached."""
    wanted: int
    """Running pods whose agents are to be reached."""
    waiting: int
    """Events that the job has yet to take."""


@dataclass(frozen=True, slots=True)
class ProgramHealth:
    """The complete health at one time."""

    is_leading: bool
    watches: Sequence[WatchHealth] = ()
    queues: Sequence[QueueHealth] = ()
    jobs: Sequence[JobHealth] = ()


class ProgramMetrics(Collector):
    """Calls `look` at every scrape."""

    def __init__(self, registry: CollectorRegistry, look: Callable[[], ProgramHealth]) -> None:
        self._look = look
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return the same families as `collect`, which the registry needs for their names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Return the present state."""
        health = self._look()
        text = "1 in the one operator that acts, 0 in those that wait."
        yield GaugeMetricFamily("unbroken_operator_leading", text, value=health.is_leading)
        yield from _watches(health.watches)
        yield from _queues(health.queues)
        yield from _jobs(health.jobs)


def _watches(watch_healths: Iterable[WatchHealth]) -> Iterator[Metric]:
    labels = ("resource",)
    by_resource: dict[str, list[WatchHealth]] = defaultdict(list)
    for watch_health in watch_healths:
        by_resource[watch_health.resource].append(watch_health)
    synced = GaugeMetricFamily(
        "unbroken_watch_synced", "1 once the collection was read completely.", labels=labels
    )
    objects = GaugeMetricFamily(
        "unbroken_watch_objects", "Objects that are kept of the collection.", labels=labels
    )
    silence = GaugeMetricFamily(
        "unbroken_watch_silence_seconds",
        "Time since the API server said something of the collection; its bookmarks come about "
        "every minute.",
        labels=labels,
    )
    lists = CounterMetricFamily(
        "unbroken_watch_lists", "How often the collection was read completely.", labels=labels
    )
    failures = CounterMetricFamily(
        "unbroken_watch_failures", "How often a list or a watch has failed.", labels=labels
    )
    odd = CounterMetricFamily(
        "unbroken_objects_refused",
        "Objects that could not be read (unreadable), or whose change a part of the program could "
        "not take (unhandled).",
        labels=(*labels, "step"),
    )
    for resource, same in sorted(by_resource.items()):
        key = (resource,)
        synced.add_metric(key, all(watch_health.is_synced for watch_health in same))
        objects.add_metric(key, sum(watch_health.objects for watch_health in same))
        silence.add_metric(key, max(watch_health.silent_seconds for watch_health in same))
        lists.add_metric(key, sum(watch_health.lists for watch_health in same))
        failures.add_metric(key, sum(watch_health.failures for watch_health in same))
        for step in sorted({step for watch_health in same for step in watch_health.refused}):
            odd.add_metric(
                (*key, step), sum(watch_health.refused.get(step, 0) for watch_health in same)
            )
    yield from (synced, objects, silence, lists, failures, odd)


def _queues(queue_healths: Iterable[QueueHealth]) -> Iterator[Metric]:
    labels = ("queue",)
    waiting = GaugeMetricFamily(
        "unbroken_queue_waiting",
        "Keys that wait to be worked on, those that are due later included.",
        labels=labels,
    )
    handled = CounterMetricFamily(
        "unbroken_queue_handled", "How often work on a key has succeeded.", labels=labels
    )
    failed = CounterMetricFamily(
        "unbroken_queue_failed", "How often work on a key has failed.", labels=labels
    )
    for queue_health in sorted(queue_healths, key=lambda queue: queue.name):
        waiting.add_metric((queue_health.name,), queue_health.waiting)
        handled.add_metric((queue_health.name,), queue_health.handled)
        failed.add_metric((queue_health.name,), queue_health.failed)
    yield from (waiting, handled, failed)


def _jobs(job_healths: Iterable[JobHealth]) -> Iterator[Metric]:
    labels = ("namespace", "job")
    connected = GaugeMetricFamily(
        "unbroken_job_agents_connected", "Agents of the job that can be reached.", labels=labels
    )
    wanted = GaugeMetricFamily(
        "unbroken_job_agents_wanted",
        "Running pods of the job, whose agents are to be reached.",
        labels=labels,
    )
    waiting = GaugeMetricFamily(
        "unbroken_job_events_waiting",
        "Events of the job that the operator has yet to look at.",
        labels=labels,
    )
    for job_health in sorted(job_healths, key=lambda job: job.job):
        connected.add_metric(job_health.job, job_health.reachable)
        wanted.add_metric(job_health.job, job_health.wanted)
        waiting.add_metric(job_health.job, job_health.waiting)
    yield from (connected, wanted, waiting)
