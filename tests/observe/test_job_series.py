"""Metrics of jobs: what is, what has ended, and what goes with the job."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from unbroken.observe.job_metrics import DELETED_MAX, KEPT_SECONDS, JobMetrics, JobName, ObservedJob
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.ledger import NAMES_MAX, OTHERS, Ledger
from unbroken.spec.job.types import Condition, JobStatus

SINCE = 1000.0
NAME = JobName("team", "lm")
OURS = {"namespace": "team", "job": "lm"}
THEIRS = {"namespace": "team", "jobName": "lm"}
TRAINING = {"namespace": "team", "job_name": "lm"}
OPERATOR = "hyperpod_training_operator_jobs_"
KILLED = Symptom(1010.0, "Signal", "killed by SIGKILL", pod="lm-pods-0", rank=0, exit_code=137)
ENDED = Incident(
    *(1, 0, KILLED, (KILLED,), Remedy.PROCESS, "first fault"),
    detected_at=1010.2,
    stopped_at=1010.3,
    ready_at=1010.4,
    started_at=1011.0,
    progress_at=1014.0,
    ended_at=1014.0,
    outcome="recovered",
    progress_before=1009.0,
    step=30,
    resumed_step=29,
)


class Told:
    """Metrics of a program that began at SINCE, and its clock."""

    def __init__(self) -> None:
        self.now = 1100.0
        self.registry = CollectorRegistry()
        self.metrics = JobMetrics(self.registry, SINCE, lambda: self.now)

    def value(self, name: str, labels: dict[str, str], **more: str) -> float | None:
        return self.registry.get_sample_value(name, labels | more)


def job(standing: str = "Running", uid: str = "1", restarts: int = 1) -> ObservedJob:
    conditions = (Condition(standing, "True", "x", "", 1000.0),)
    status = JobStatus(start_time=1000.0, conditions=conditions, restart_count=restarts)
    return ObservedJob(uid, 1000.0, status, Ledger())


def test_an_incident_is_counted_once_when_it_has_ended() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    for one in (replace(ENDED, outcome="", ended_at=None), ENDED, ENDED):
        told.metrics.incident(NAME, "1", one)
    by_class = {"fault": "Signal", "remedy": "process"}
    assert told.value("unbroken_job_incidents_total", OURS, **by_class) == 1
    assert told.value(OPERATOR + "restarted_total", THEIRS, reason="Signal") == 1
    assert told.value("unbroken_incident_lost_seconds_sum", {"remedy": "process"}) == 5
    assert told.value("unbroken_incident_lost_steps_sum", {"remedy": "process"}) == 2
    stages = {"detect": 0.2, "stop": 0.1, "ready": 0.1, "start": 0.6, "progress": 3.0}
    for stage, seconds in stages.items():
        labels = {"stage": stage, "remedy": "process"}
        name = "unbroken_recovery_stage_seconds_sum"
        assert told.value(name, labels) == pytest.approx(seconds)
    told.metrics.incident(NAME, "1", replace(ENDED, number=2, examined_at=1010.25))
    for stage, seconds in {"examine": 0.05, "stop": 0.1 + 0.05}.items():
        labels = {"stage": stage, "remedy": "process"}
        assert told.value(name, labels) == pytest.approx(seconds)


def test_an_incident_told_before_its_job_counts_when_the_job_is_known() -> None:
    told = Told()
    told.metrics.incident(NAME, "1", ENDED)
    assert told.value(OPERATOR + "created_total", THEIRS) is None
    told.metrics.job(NAME, job())
    assert told.value(OPERATOR + "restarted_total", THEIRS, reason="Signal") == 1


def test_what_ended_before_the_operator_led_is_in_the_gauges_only() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    told.metrics.incident(NAME, "1", replace(ENDED, ended_at=999.0))
    assert told.value(OPERATOR + "restarted_total", THEIRS, reason="Signal") is None
    assert told.value("training_fault_count", TRAINING) == 1


def test_latencies_have_their_bucket_under_the_plain_name() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    assert told.value(OPERATOR + "restart_latency", THEIRS, le="+Inf") is None
    told.metrics.incident(NAME, "1", ENDED)
    found = {le: told.value(OPERATOR + "restart_latency", THEIRS, le=le) for le in ("0.5", "1.0")}
    assert found == {"0.5": 0, "1.0": 1}
    assert told.value(OPERATOR + "restart_latency", THEIRS, le="+Inf") == 1
    assert told.value(OPERATOR + "fault_detection_latency", THEIRS, le="0.25") == 1


def test_time_is_accounted_for() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    told.metrics.incident(NAME, "1", ENDED)
    asked = replace(KILLED, at=1050.0, fault="RestartRequested", text="asked for")
    second = replace(
        ENDED, number=2, culprit=asked, signals=(asked,), detected_at=1050.0,
        progress_before=1050.0, progress_at=1052.0, ended_at=1052.0, step=None, resumed_step=None,
    )  # fmt: skip
    told.metrics.incident(NAME, "1", second)
    parts = {p: told.value("unbroken_job_time_seconds", OURS, part=p) for p in ("lost", "startup")}
    assert parts["lost"] == pytest.approx(7.0)
    assert told.value("unbroken_job_lost_seconds", OURS, fault="Signal") == pytest.approx(5.0)
    assert told.value("unbroken_job_lost_steps", OURS) == 2
    assert told.value("training_uptime_percentage", TRAINING) == pytest.approx(93.0)
    assert told.value("training_fault_count", TRAINING) == 1
    assert told.value("training_fault_type_count", TRAINING, fault_type="Signal") == 1
    assert told.value("training_manual_restart_count", TRAINING) == 1
    assert told.value("training_manual_downtime_ms", TRAINING) == pytest.approx(2000)
    assert told.value("training_auto_restart_downtime_ms", TRAINING) == pytest.approx(5000)
    goodput = told.value("unbroken_job_goodput_ratio", OURS)
    assert goodput is not None
    assert 0.8 < goodput < 0.93


def test_an_open_incident_shows() -> None:
    told = Told()
    told.metrics.job(NAME, job("Faulted"))
    told.metrics.incident(NAME, "1", replace(ENDED, outcome="", ended_at=None))
    assert told.value("unbroken_job_incident_open", OURS) == 1
    assert told.value("unbroken_jobs", {"state": "Faulted"}) == 1
    told.metrics.job(NAME, job("Running"))
    told.metrics.incident(NAME, "1", ENDED)
    assert told.value("unbroken_job_incident_open", OURS) == 0
    assert told.value("unbroken_jobs", {"state": "Faulted"}) == 0


def test_a_deleted_jobs_gauges_go_at_once_and_its_counters_later() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    told.metrics.job(NAME, job("Completed"))
    told.metrics.job_gone(NAME)
    assert told.value("unbroken_job_restarts", OURS) is None
    assert told.value("training_fault_count", TRAINING) is None
    for what in ("created", "successful", "deleted"):
        assert told.value(f"{OPERATOR}{what}_total", THEIRS) == 1
    told.now += KEPT_SECONDS + 1
    assert told.value(OPERATOR + "created_total", THEIRS) is None


def test_a_job_made_anew_counts_on() -> None:
    told = Told()
    told.metrics.job(NAME, job("Failed"))
    told.metrics.job_gone(NAME)
    told.metrics.job(NAME, job("Created", uid="2"))
    told.metrics.job(NAME, job("Completed", uid="2"))
    counts = {"created": 2, "failed": 1, "successful": 1, "deleted": 1}
    for what, count in counts.items():
        assert told.value(f"{OPERATOR}{what}_total", THEIRS) == count
    told.metrics.incident(NAME, "1", ENDED)
    assert told.value(OPERATOR + "restarted_total", THEIRS, reason="Signal") is None


def test_there_is_an_end_to_classes_and_to_deleted_jobs() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    for number in range(1, 100):
        culprit = replace(KILLED, fault=f"LogFault_rule{number}")
        told.metrics.incident(NAME, "1", replace(ENDED, number=number, culprit=culprit))
    lines = generate_latest(told.registry).decode().splitlines()
    classes = [one for one in lines if one.startswith("unbroken_job_incidents_total{")]
    assert len(classes) == NAMES_MAX
    assert told.value(OPERATOR + "restarted_total", THEIRS, reason=OTHERS) == 100 - NAMES_MAX
    for number in range(DELETED_MAX + 10):
        name = JobName("team", f"job-{number}")
        told.metrics.job(name, job(uid=f"uid-{number}"))
        told.metrics.job_gone(name)
    text = generate_latest(told.registry).decode()
    assert text.count(OPERATOR + "deleted_total{") == DELETED_MAX + 1


SERIES_MAX = 250
"""Series of a job at most, as docs/guide/metrics.md says."""


def series_of(ranks: int, faults: int) -> int:
    """Return the number of series of a job whose ranks failed in all ways, of so many classes."""
    told = Told()
    told.metrics.job(NAME, job())
    chosen = range(0, ranks, max(1, ranks // 1000))
    for number, ((index, rank), remedy) in enumerate(product(enumerate(chosen), Remedy), 1):
        fault = f"Fault{index % faults}"
        culprit = replace(KILLED, rank=rank, pod=f"lm-pods-{rank // 8}", fault=fault)
        one = replace(ENDED, number=number, culprit=culprit, signals=(culprit,), remedy=remedy)
        told.metrics.incident(NAME, "1", one)
    lines = generate_latest(told.registry).decode().splitlines()
    return sum("lm" in line for line in lines if not line.startswith("#"))


def test_a_job_has_as_many_series_whatever_its_ranks() -> None:
    assert series_of(16_384, 4) == series_of(4, 4) < 100
    assert series_of(16_384, 1000) < SERIES_MAX


def test_prometheus_can_read_all_of_it() -> None:
    told = Told()
    told.metrics.job(NAME, job())
    told.metrics.incident(NAME, "1", ENDED)
    found = list(text_string_to_metric_families(generate_latest(told.registry).decode()))
    samples = [
        (one.name, *sorted(one.labels.items())) for family in found for one in family.samples
    ]
    assert len(samples) == len(set(samples))
    assert all(
        family.documentation.endswith(".") for family in found if "_created" not in family.name
    )
