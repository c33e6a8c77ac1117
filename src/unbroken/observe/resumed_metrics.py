"""Jobs of other kinds with auto-resume as metrics: states, restarts, time until they ran again.

Series of a job go with the job; the histogram, which stays, has no label that a user chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.core.losses import KEPT, ResumedJob

from .job_metrics import JobName

SECONDS = (1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
"""Buckets of restarts: pods on nodes that do not answer wait for the node's fence."""
JOB = ("kind", "namespace", "job")


class ResumedMetrics(Collector):
    """Jobs with auto-resume, and their restarts that have ended since `since`."""

    def __init__(self, registry: CollectorRegistry, since: float) -> None:
        self._since = since
        self._jobs: dict[tuple[str, JobName], ResumedJob] = {}
        self._seconds = Histogram(
            "unbroken_resumed_job_restart_seconds",
            "Length of restarts of jobs of other kinds that have ended: from the first sign of the "
            "loss until the job ran again.",
            ("kind",),
            buckets=SECONDS,
            registry=registry,
        )
        registry.register(self)

    # --- input

    def job(self, kind: str, name: JobName, job: ResumedJob | None) -> None:
        """Take the present state of a job; None: it is gone, or has no auto-resume."""
        before = self._jobs.pop((kind, name), None)
        if job is None:
            return
        self._jobs[kind, name] = job
        known = before.losses if before is not None and before.uid == job.uid else ()
        counted = {loss.decided for loss in known if loss.ran is not None}
        for loss in job.losses:
            is_new = loss.ran is not None and loss.ran >= self._since
            if is_new and loss.decided not in counted:
                self._seconds.labels(kind).observe(loss.seconds or 0.0)

    def kind_gone(self, kind: str) -> None:
        """Note that the API does not serve a kind any more."""
        self._jobs = {key: job for key, job in self._jobs.items() if key[0] != kind}

    # --- output

    def describe(self) -> Iterable[Metric]:
        """Return the same families as `collect`, which the registry needs for their names."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Return the present state."""
        found = sorted(self._jobs.items())
        jobs = GaugeMetricFamily(
            "unbroken_resumed_jobs",
            "Jobs of other kinds with auto-resume by state: Active, Restarting, Suspended, or how "
            "the job has ended.",
            labels=("kind", "state"),
        )
        for key, number in sorted(Counter((one.kind, one.state) for _, one in found).items()):
            jobs.add_metric(key, number)
        restarts = GaugeMetricFamily(
            "unbroken_resumed_job_restarts", "Restarts of the job by auto-resume.", labels=JOB
        )
        most = GaugeMetricFamily(
            "unbroken_resumed_job_restarts_max", "Restarts that the job may have.", labels=JOB
        )
        is_open = GaugeMetricFamily(
            "unbroken_resumed_job_loss_open",
            "1 while the job does not run again after its newest loss, also if no restart was "
            "left, else 0.",
            labels=JOB,
        )
        lost = GaugeMetricFamily(
            "unbroken_resumed_job_lost_seconds",
            "Time from the first sign of a loss until the job ran again, of the losses that are "
            f"kept (the newest {KEPT}).",
            labels=JOB,
        )
        for (kind, name), one in found:
            labels, last = (kind, *name), one.last
            lost.add_metric(labels, sum(loss.seconds or 0.0 for loss in one.losses))
            restarts.add_metric(labels, one.restarts)
            most.add_metric(labels, one.restarts_max)
            is_open.add_metric(labels, last is not None and last.ran is None)
        yield from (jobs, restarts, most, is_open, lost)
