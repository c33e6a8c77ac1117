"""Job metrics under the documented names of HyperPod's training operator and of its dashboards.

The names and labels are those of the public documentation of the training operator and of the
Training dashboard (reference, section 7.1). `namespace` is added, because jobs of two namespaces
may have one name. The documentation leaves two things open, which are decided here. Latencies are
in seconds. The counts of `training_*` cover what the API keeps of a job. `cluster_id` is left to
the scraper.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unbroken.core.job.record.timeline import TWICE
from unbroken.core.job.recovery.incidents import RESTART_REQUESTED, UNCHARGED
from unbroken.spec.job.codec import seconds_known_lost
from unbroken.spec.keys import ConditionType

from .job_records import JobRecord, Latencies

PREFIX = "hyperpod_training_operator_jobs"
JOB = ("namespace", "jobName")
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
    created = CounterMetricFamily(f"{PREFIX}_created", "Jobs that were created.", labels=JOB)
    successful = CounterMetricFamily(f"{PREFIX}_successful", "Jobs that completed.", labels=JOB)
    failed = CounterMetricFamily(f"{PREFIX}_failed", "Jobs that failed.", labels=JOB)
    deleted = CounterMetricFamily(f"{PREFIX}_deleted", "Jobs that were deleted.", labels=JOB)
    restarted = CounterMetricFamily(
        f"{PREFIX}_restarted",
        "Restarts after which all workers ran again, by class of the fault, since this operator "
        "began to lead.",
        labels=(*JOB, "reason"),
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
            labels = dict(zip(JOB, record.name, strict=True))
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
        for fault, count in _faults(record).items():
            by_fault["training_fault_type_count"][(*record.name, fault)] = count
        for fault, seconds in _seconds(record).items():
            if fault not in UNCHARGED:
                key = (*record.name, fault)
                by_fault["training_fault_recovery_time_ms"][key] = 1000 * seconds
    for name, text in _TEXTS.items():
        yield _gauge(name, text, TRAINING, values[name])
    for name, text in _TEXTS_BY_FAULT.items():
        yield _gauge(name, text, (*TRAINING, "fault_type"), by_fault[name])


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
