"""Jobs as metrics of this project: their state, their faults, and the cost of these.

Series of a job go with the job; histograms, which stay, have no label that a user chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.core.job.record.conditions import current_condition
from unbroken.core.job.record.timeline import lost_seconds, lost_steps, stages
from unbroken.spec.job.incident import Incident
from unbroken.spec.keys import ConditionType

from .hyperpod_metrics import documented
from .job_records import BUCKETS, JobName, JobRecord, JobRecords, JobState

JOB = ("namespace", "job")
STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
"""Buckets of the steps lost in an incident: none from a snapshot in memory, many from a checkpoint
on disk."""


class JobMetrics(Collector):
    """Jobs, and their incidents that have ended since `since`.

    `clock`: seconds since the epoch.
    """

    def __init__(
        self, registry: CollectorRegistry, since: float, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._records = JobRecords(since, clock, self._ended)
        self._stages = Histogram(
            "unbroken_recovery_stage_seconds",
            "Length of the stages of incidents that have ended: detect (from the first sign), "
            "examine (until every rank was examined, if a hang was suspected), stop (until no "
            "worker of the attempt lives), ready (until every agent can start), start (until "
            "every agent runs the next attempt), progress (until training resumed).",
            ("stage", "remedy"),
            buckets=BUCKETS,
            registry=registry,
        )
        self._lost = Histogram(
            "unbroken_incident_lost_seconds",
            "Time that an incident has cost: from the last progress before the fault to the first "
            "after it, or to the end of the incident. Incidents after which it is not known when "
            "training resumed are left out.",
            ("remedy",),
            buckets=BUCKETS,
            registry=registry,
        )
        self._steps = Histogram(
            "unbroken_incident_lost_steps",
            "Steps repeated after an incident. Only for scripts that report their steps.",
            ("remedy",),
            buckets=STEPS,
            registry=registry,
        )
        registry.register(self)

    # --- input

    def job(self, name: JobName, job: JobState) -> None:
        """Take the present state of a job."""
        self._records.job(name, job)

    def job_gone(self, name: JobName) -> None:
        """Note that a job was deleted."""
        self._records.job_gone(name)

    def incident(self, name: JobName, uid: str, incident: Incident) -> None:
        """Take the present state of an incident of the job with this uid."""
        self._records.incident(name, uid, incident)

    def incident_gone(self, name: JobName, uid: str, number: int) -> None:
        """Note that an incident was deleted."""
        self._records.incident_gone(name, uid, number)

    def _ended(self, incident: Incident) -> None:
        remedy = incident.remedy.value
        for stage, start, end in stages(incident):
            self._stages.labels(stage, remedy).observe(end - start)
        if (seconds := lost_seconds(incident)) is not None:
            self._lost.labels(remedy).observe(seconds)
        steps = lost_steps(incident)
        if steps is not None:
            self._steps.labels(remedy).observe(steps)

    # --- output

    def describe(self) -> Iterable[Metric]:
        """Return the same families as `collect`, which the registry needs for their names."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Return counters, and the present state."""
        records, now = self._records.all(), self._clock()
        yield _conditions(records)
        yield _incidents(records)
        yield from _gauges([record for record in records if record.now is not None], now)
        yield from documented(records, now)


def _conditions(records: Iterable[JobRecord]) -> Metric:
    family = GaugeMetricFamily(
        "unbroken_jobs",
        "Jobs by state: the last condition of the job that is true.",
        labels=("state",),
    )
    result = Counter(
        current_condition(record.now.status.conditions)
        for record in records
        if record.now is not None
    )
    for stands in ConditionType:
        family.add_metric((stands.value,), result[stands])
    return family


def _incidents(records: Iterable[JobRecord]) -> Metric:
    family = CounterMetricFamily(
        "unbroken_job_incidents",
        "Incidents that have ended since this operator began to lead, by class of the fault and "
        "what was done about it.",
        labels=(*JOB, "fault", "remedy"),
    )
    for record in records:
        for (fault, remedy), count in sorted(record.ended.items()):
            family.add_metric((*record.name, fault, remedy), count)
    return family


def _gauges(records: Iterable[JobRecord], now: float) -> Iterator[Metric]:
    gauge = GaugeMetricFamily
    restarts = gauge(
        "unbroken_job_restarts", "Restarts of the job, which is its newest attempt.", labels=JOB
    )
    is_open = gauge(
        "unbroken_job_incident_open",
        "1 while an incident of the job is open, else 0.",
        labels=JOB,
    )
    share = gauge(
        "unbroken_job_goodput_ratio",
        "Productive share of the job's active time; absent before the first progress.",
        labels=JOB,
    )
    seconds = gauge(
        "unbroken_job_time_seconds",
        "The job's active time by what it went to: productive, startup, lost.",
        labels=(*JOB, "part"),
    )
    lost = gauge(
        "unbroken_job_lost_seconds",
        "Time lost by class of the fault; StepsMadeTwice: to making steps again.",
        labels=(*JOB, "fault"),
    )
    steps = gauge(
        "unbroken_job_lost_steps", "Steps that had to be repeated after faults.", labels=JOB
    )
    for record in records:
        assert record.now is not None
        goodput = record.goodput(now)
        restarts.add_metric(record.name, record.now.status.restart_count)
        is_open.add_metric(record.name, any(not i.outcome for i in record.incidents.values()))
        if goodput.share is not None:
            share.add_metric(record.name, goodput.share)
        parts = {"productive": goodput.productive, "startup": goodput.startup}
        for part, value in {**parts, "lost": sum(goodput.lost.values())}.items():
            seconds.add_metric((*record.name, part), value)
        for fault, value in goodput.lost.items():
            lost.add_metric((*record.name, fault), value)
        steps.add_metric(record.name, goodput.steps)
    yield from (restarts, is_open, share, seconds, lost, steps)
