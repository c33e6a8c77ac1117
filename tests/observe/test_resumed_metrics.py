"""Jobs of other kinds with auto-resume as metrics."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from unbroken.core.losses import Loss, ResumedJob
from unbroken.observe.job_metrics import JobName
from unbroken.observe.resumed_metrics import ResumedMetrics

NAME = JobName("ml", "lm")
LOSS = Loss(100.0, 102.0, "node n1", "node n1 is gone", "deletes all 2 pods", 1, 2)
JOB = ResumedJob("RayJob", "lm", "ml", "u1", "2026-01-01T00:00:00Z", "Active", 1, 3, "", ())


def fed(*states: ResumedJob | None) -> CollectorRegistry:
    """The registry after these states of one job."""
    registry = CollectorRegistry()
    metrics = ResumedMetrics(registry, 90.0)
    for one in states:
        metrics.job("RayJob", NAME, one)
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """The value of a series of this job; None: there is none."""
    more = labels or {"namespace": "ml", "job": "lm"}
    return registry.get_sample_value(f"unbroken_resumed_{name}", {"kind": "RayJob", **more})


def test_a_job_has_its_state_and_restarts() -> None:
    waits = replace(JOB, state="Restarting", losses=(LOSS,))
    registry = fed(JOB, waits)
    assert value(registry, "jobs", state="Restarting") == 1
    assert value(registry, "jobs", state="Active") is None
    assert value(registry, "job_restarts") == 1
    assert value(registry, "job_restarts_max") == 3
    assert value(registry, "job_loss_open") == 1
    assert value(fed(JOB), "job_loss_open") == 0
    assert value(fed(waits, None), "job_restarts") is None


def test_a_restart_is_measured_once_when_the_job_runs_again() -> None:
    def count(registry: CollectorRegistry) -> tuple[float | None, float | None]:
        names = ("restart_seconds_count", "restart_seconds_sum")
        found = [
            registry.get_sample_value(f"unbroken_resumed_job_{name}", {"kind": "RayJob"})
            for name in names
        ]
        return found[0], found[1]

    waits, runs = replace(JOB, losses=(LOSS,)), replace(JOB, losses=(replace(LOSS, ran=124.5),))
    assert count(fed(waits)) == (None, None)
    assert count(fed(waits, runs, runs, replace(runs, restarts=2))) == (1, 24.5)
    twice = replace(runs, losses=(*runs.losses, replace(LOSS, decided=202.0, at=200.0, ran=210.0)))
    assert count(fed(runs, twice)) == (2, 34.5)
    assert count(fed(replace(runs, losses=(replace(LOSS, at=1.0, ran=80.0),)))) == (None, None)


def test_series_go_with_their_kind() -> None:
    registry = CollectorRegistry()
    metrics = ResumedMetrics(registry, 0.0)
    metrics.job("RayJob", NAME, JOB)
    metrics.job("TrainJob", NAME, replace(JOB, kind="TrainJob"))
    metrics.kind_gone("RayJob")
    assert value(registry, "job_restarts") is None
    assert value(registry, "jobs", kind="TrainJob", state="Active") == 1
