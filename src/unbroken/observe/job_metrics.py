"""Metrics of jobs: their data, and their form under this project's names and HyperPod's.

Counters belong to a job's name: a job that is deleted and created again continues them. They stay
for a while after a deletion, so that their last values are still scraped, and then go.

Series of a job go with the job; histograms, which stay, have no label that a user chooses.

HyperPod's names and labels are those of the public documentation of the training operator and of
the Training dashboard (reference, section 7.1). `namespace` is added, because jobs of two
namespaces may have one name. The documentation leaves two things open, which are decided here.
Latencies are in seconds. The counts of `training_*` cover what the API keeps of a job. `cluster_id`
is left to the scraper.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.core.job.record.conditions import current_condition
from unbroken.core.job.record.timeline import (
    TWICE,
    Goodput,
    goodput,
    lost_seconds,
    lost_steps,
    stages,
)
from unbroken.core.job.recovery.incidents import RESTART_REQUESTED, UNCHARGED
from unbroken.spec.job.codec import seconds_known_lost
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import NAMES_MAX, OTHERS, Ledger
from unbroken.spec.job.types import JobStatus
from unbroken.spec.keys import ConditionType

BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Buckets in seconds: from a restart in place to the replacement of a node.

HyperPod's published recoveries took 94 to 149 s in all (reference, section 13).
"""
KEPT_SECONDS = 900.0
"""Seconds that counters of a deleted job are served: sixty scrapes of the documented 15 s."""
DELETED_MAX = 1000
"""Deleted jobs whose counters are kept; the oldest go first."""


class JobName(NamedTuple):
    """Name of the job that series belong to."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """The state of a job in the API."""

    uid: str
    created_at: float
    status: JobStatus
    ledger: Ledger


@dataclass(slots=True)
class Latencies:
    """Durations, counted by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Return (upper bound as Prometheus writes it, number of durations not above it)."""
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            yield bound, total


@dataclass(slots=True)
class JobRecord:
    """The record of one job's name: its present state, and its counters."""

    name: JobName
    now: ObservedJob | None = None
    """The present state; None: deleted."""
    deleted_at: float | None = None
    incidents: dict[int, Incident] = field(default_factory=dict)
    """Incidents of the job that exists now, as kept by the API."""
    created: int = 0
    deleted: int = 0
    ends: Counter[ConditionType] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Incidents that have ended, by class of the fault and remedy."""
    restarted: Counter[str] = field(default_factory=Counter)
    """Restarts after which all workers ran again, by class of the fault."""
    detection: Latencies = field(default_factory=Latencies)
    restart: Latencies = field(default_factory=Latencies)
    counted: set[int] = field(default_factory=set)
    """Numbers of incidents that are in the counters."""
    has_ended: bool = False

    def goodput(self, now: float) -> Goodput:
        """Return the time account of the existing job."""
        assert self.now is not None
        job = self.now
        return goodput(job.status, self.incidents.values(), job.ledger, now, job.created_at)

    def class_of(self, fault: str) -> str:
        """Return the class, or `others` if there have been too many different ones."""
        known = {name for name, _ in self.ended} | {OTHERS}
        return fault if fault in known or len(known) < NAMES_MAX else OTHERS


class JobRecords:
    """The records of all jobs; `on_ended` is called once for each incident that ends from `since`
    on."""

    def __init__(
        self, since: float, clock: Callable[[], float], on_ended: Callable[[Incident], None]
    ) -> None:
        self._since = since
        self._clock = clock
        self._on_ended = on_ended
        self._records: dict[JobName, JobRecord] = {}
        self._early: dict[str, dict[int, Incident]] = {}
        """Incidents that came before their job, by its uid."""

    def job(self, name: JobName, job: ObservedJob) -> None:
        """Take the present state of a job."""
        record = self._records.setdefault(name, JobRecord(name))
        if record.now is None or record.now.uid != job.uid:
            self._begin(record, job)
        record.now = job
        stands = current_condition(job.status.conditions)
        is_end = stands in (ConditionType.COMPLETED, ConditionType.FAILED)
        if is_end and not record.has_ended:
            assert stands is not None
            record.ends[stands] += 1
        record.has_ended = is_end

    def job_gone(self, name: JobName) -> None:
        """Note that a job was deleted."""
        record = self._records.get(name)
        if record is None or record.now is None:
            return
        record.now, record.deleted_at = None, self._clock()
        record.deleted += 1
        record.incidents = {}
        self._forget_deleted()

    def incident(self, name: JobName, uid: str, incident: Incident) -> None:
        """Take the present state of an incident, of the job with this uid."""
        record = self._records.get(name)
        if record is None or record.now is None or record.now.uid != uid:
            self._early.setdefault(uid, {})[incident.number] = incident
            return
        record.incidents[incident.number] = incident
        is_over = bool(incident.outcome) and (incident.ended_at or 0.0) >= self._since
        if is_over and incident.number not in record.counted:
            record.counted.add(incident.number)
            _count(record, incident)
            self._on_ended(incident)

    def incident_gone(self, name: JobName, uid: str, number: int) -> None:
        """Note that an incident was deleted: there were too many, or its job is gone."""
        early = self._early.get(uid)
        if early is not None:
            early.pop(number, None)
            if not early:
                del self._early[uid]
        record = self._records.get(name)
        if record is not None and record.now is not None and record.now.uid == uid:
            record.incidents.pop(number, None)

    def all(self) -> list[JobRecord]:
        """Return every job, and those deleted recently, by name."""
        self._forget_deleted()
        return [self._records[name] for name in sorted(self._records)]

    def _begin(self, record: JobRecord, job: ObservedJob) -> None:
        if record.now is not None:
            record.deleted += 1
        record.now, record.deleted_at = job, None
        record.created += 1
        record.has_ended = False
        record.incidents, record.counted = {}, set()
        for incident in self._early.pop(job.uid, {}).values():
            self.incident(record.name, job.uid, incident)

    def _forget_deleted(self) -> None:
        until = self._clock() - KEPT_SECONDS
        deleted = sorted(
            (record.deleted_at, name)
            for name, record in self._records.items()
            if record.deleted_at is not None
        )
        surplus = max(len(deleted) - DELETED_MAX, 0)
        for number, (at, name) in enumerate(deleted):
            if number < surplus or at < until:
                del self._records[name]


def _count(record: JobRecord, incident: Incident) -> None:
    fault = record.class_of(incident.culprit.fault)
    record.ended[fault, incident.remedy.value] += 1
    record.detection.add(max(incident.detected_at - incident.culprit.at, 0.0))
    if incident.started_at is not None:
        record.restarted[fault] += 1
        record.restart.add(max(incident.started_at - incident.detected_at, 0.0))


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

    def job(self, name: JobName, job: ObservedJob) -> None:
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
        for fault, value in _bounded(goodput.lost).items():
            lost.add_metric((*record.name, fault), value)
        steps.add_metric(record.name, goodput.steps)
    yield from (restarts, is_open, share, seconds, lost, steps)


PREFIX = "hyperpod_training_operator_jobs"
HYPERPOD_JOB = ("namespace", "jobName")
TRAINING = ("namespace", "job_name")


def documented(records: Sequence[JobRecord], now: float) -> Iterator[Metric]:
    """Return all of the metrics; `now` in seconds since the epoch."""
    yield from _counters(records)
    yield _latency(
        "restart_latency",
        "Restarts by their length in seconds, from the detection of the fault until every agent "
        "runs the next attempt; cumulative, `le` is the bucket's upper bound.",
        [(record, record.restart) for record in records],
    )
    yield _latency(
        "fault_detection_latency",
        "Faults by the seconds from their first sign until the operator acted on it; cumulative, "
        "`le` is the bucket's upper bound.",
        [(record, record.detection) for record in records],
    )
    yield from _training([record for record in records if record.now is not None], now)


def _counters(records: Iterable[JobRecord]) -> Iterator[Metric]:
    created = CounterMetricFamily(
        f"{PREFIX}_created", "Jobs that were created.", labels=HYPERPOD_JOB
    )
    successful = CounterMetricFamily(
        f"{PREFIX}_successful", "Jobs that completed.", labels=HYPERPOD_JOB
    )
    failed = CounterMetricFamily(f"{PREFIX}_failed", "Jobs that failed.", labels=HYPERPOD_JOB)
    deleted = CounterMetricFamily(
        f"{PREFIX}_deleted", "Jobs that were deleted.", labels=HYPERPOD_JOB
    )
    restarted = CounterMetricFamily(
        f"{PREFIX}_restarted",
        "Restarts after which all workers ran again, by class of the fault, since this operator "
        "began to lead.",
        labels=(*HYPERPOD_JOB, "reason"),
    )
    for record in records:
        created.add_metric(record.name, record.created)
        successful.add_metric(record.name, record.ends[ConditionType.COMPLETED])
        failed.add_metric(record.name, record.ends[ConditionType.FAILED])
        deleted.add_metric(record.name, record.deleted)
        for reason, count in sorted(record.restarted.items()):
            restarted.add_metric((*record.name, reason), count)
    yield from (created, successful, failed, deleted, restarted)


def _latency(name: str, text: str, found: Iterable[tuple[JobRecord, Latencies]]) -> Metric:
    """Return buckets under the plain name: the dashboards query them so, without `_bucket`."""
    family = Metric(f"{PREFIX}_{name}", text, "unknown")
    for record, latencies in found:
        if any(latencies.counts):
            labels = dict(zip(HYPERPOD_JOB, record.name, strict=True))
            for bound, count in latencies.cumulative():
                family.add_sample(family.name, {**labels, "le": bound}, count)
    return family


def _training(records: Sequence[JobRecord], now: float) -> Iterator[Metric]:
    """Return the dashboard's figures of each job, under its names and the documentation's."""
    values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    by_fault: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for record in records:
        for name, value in _figures(record, now).items():
            values[name][record.name] = value
        for fault, count in _bounded(_faults(record)).items():
            by_fault["training_fault_type_count"][(*record.name, fault)] = count
        charged = {one: value for one, value in _seconds(record).items() if one not in UNCHARGED}
        for fault, seconds in _bounded(charged).items():
            key = (*record.name, fault)
            by_fault["training_fault_recovery_time_ms"][key] = 1000 * seconds
    for name, text in _TEXTS.items():
        yield _gauge(name, text, TRAINING, values[name])
    for name, text in _TEXTS_BY_FAULT.items():
        yield _gauge(name, text, (*TRAINING, "fault_type"), by_fault[name])


def _bounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return the classes of faults with the greatest values, and the sum of too many as others."""
    if len(values) <= NAMES_MAX:
        return dict(values)
    rest = dict(values)
    greatest = sorted(rest.keys() - {OTHERS}, key=lambda one: (-rest[one], one))[: NAMES_MAX - 1]
    kept = {name: rest.pop(name) for name in greatest}
    return {**kept, OTHERS: sum(rest.values())}


def _gauge(
    name: str, text: str, labels: Sequence[str], values: dict[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _figures(record: JobRecord, now: float) -> dict[str, float]:
    assert record.now is not None
    goodput = record.goodput(now)
    seconds = _seconds(record)
    down = sum(value for cause, value in goodput.lost.items() if cause != TWICE)
    manual = seconds.get(RESTART_REQUESTED, 0.0)
    auto = sum(seconds.values()) - manual
    faults = Counter(incident.culprit.fault for incident in record.incidents.values())
    requests = faults[RESTART_REQUESTED]
    others = sum(faults.values()) - requests + record.now.ledger.incidents
    return {
        "training_uptime_percentage": 100 * (1 - down / goodput.total) if goodput.total else 100.0,
        "training_time_ms": 1000 * goodput.total,
        "training_fault_count": sum(_faults(record).values()) + record.now.ledger.incidents,
        "training_manual_restart_count": requests,
        "training_manual_recovery_count": requests,
        "training_manual_downtime_ms": 1000 * manual,
        "training_auto_recovery_count": others,
        "training_auto_restart_downtime_ms": 1000 * auto,
        "training_auto_recovery_downtime": 1000 * auto,
    }


def _faults(record: JobRecord) -> Counter[str]:
    """Return incidents by class of the fault, without those that have no culprit."""
    result = [incident.culprit.fault for incident in record.incidents.values()]
    return Counter(fault for fault in result if fault not in UNCHARGED)


def _seconds(record: JobRecord) -> dict[str, float]:
    """Return seconds lost by class, in kept incidents and in the ledger."""
    assert record.now is not None
    seconds: dict[str, float] = defaultdict(float)
    for cause, value in record.now.ledger.seconds.items():
        if cause != TWICE:
            seconds[cause] += value
    for incident in record.incidents.values():
        seconds[incident.culprit.fault] += seconds_known_lost(incident) or 0.0
    return seconds


_MANUAL = "Restarts that somebody asked for, of the job's incidents that are kept (the newest 50)."
_AUTO = "Milliseconds lost to faults and restarts that nobody asked for."
_TEXTS = {
    "training_uptime_percentage": "Share of the job's active time without what its incidents cost.",
    "training_time_ms": "The job's active time in milliseconds: without suspensions.",
    "training_fault_count": "Faults of the job.",
    "training_manual_restart_count": _MANUAL,
    "training_manual_recovery_count": _MANUAL,
    "training_manual_downtime_ms": "Milliseconds lost to restarts that somebody asked for.",
    "training_auto_recovery_count": "Incidents of the job that nobody asked for.",
    "training_auto_restart_downtime_ms": _AUTO,
    "training_auto_recovery_downtime": _AUTO,
}
_TEXTS_BY_FAULT = {
    "training_fault_type_count": "Faults by class, of the incidents that are kept (the newest 50).",
    "training_fault_recovery_time_ms": "Milliseconds lost to faults, by class.",
}
