"""Feeds the metrics of jobs from the API."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from unbroken.kube.cache import changed, key_of
from unbroken.kube.clock import wall
from unbroken.observe.job_metrics import JobMetrics
from unbroken.observe.job_records import JobName, JobState
from unbroken.operator.jobs.operator import Watches
from unbroken.operator.kinds import IncidentObject, JobObject
from unbroken.spec.job.codec import incident_from, job_status_from
from unbroken.spec.job.ledger import read_ledger
from unbroken.spec.keys import LEDGER
from unbroken.spec.times import time_seconds


def watch_jobs(watches: Watches, registry: CollectorRegistry, since: float) -> None:
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
            metrics.job(name, _state(new))

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


def _state(job: JobObject) -> JobState:
    metadata = job["metadata"]
    annotations = metadata.get("annotations") or {}
    return JobState(
        metadata["uid"],
        time_seconds(metadata["creationTimestamp"]),
        job_status_from(job.get("status"))[0],
        read_ledger(str(annotations.get(LEDGER) or "")),
    )
