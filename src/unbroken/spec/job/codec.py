"""Jobs, their status and incidents as objects of the API: exactly the keys that the kind has.

Reading is tolerant: malformed parts become a default and a problem. Values have the precision of
the wire: whole seconds in a job's status, microseconds in an incident.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.spec.keys import JOB_LABEL, JOB_NAME_LABEL
from unbroken.spec.problems import Problem, Report
from unbroken.spec.schema.fields import blank_record, read_record, write_record

from . import incident as incidents
from .incident import RECOVERED, Incident
from .types import JobStatus

OTHERS = (
    "managerPods",
    "podManagerStatuses",
    "podSetInfos",
    "podSets",
    "elasticScalingStatus",
    "elasticWorkloadRef",
)
"""Keys of the status that others write (sagemaker-hyperpod 3.12); these and ours are all."""
OTHER = "other"
"""Key under which reading and writing by fields meet `JobStatus.other`; no key of the wire."""
SECONDS = "seconds"
"""Key in an Incident object, for its column: the cost of the fault, if it is known; computed, never
read."""


def job_status_to(status: JobStatus) -> dict[str, Any]:
    """Return the `status` of a job."""
    written = write_record(status)
    others = written.pop(OTHER, {})
    return {**{key: others[key] for key in OTHERS if key in others}, **written}


def job_status_from(status: Any) -> tuple[JobStatus, tuple[Problem, ...]]:
    """Return the value of a job's `status`, and its problems; None: the job has none yet."""
    report = Report()
    if not isinstance(status, Mapping):
        if status is not None:
            report.invalid("status", status, "must be an object")
        return JobStatus(), tuple(report.problems)
    others = {key: status[key] for key in OTHERS if status.get(key) is not None}
    ours = {key: value for key, value in status.items() if key not in OTHERS}
    if OTHER in ours:
        report.forbidden("status.other", "unknown field")
    job_status = read_record(JobStatus, {**ours, OTHER: others}, "status", report)
    return job_status, tuple(report.problems)


def incident_to(incident: Incident, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Incident object; `job` is the metadata of the job that it belongs to."""
    name, cost = job["name"], seconds_lost(incident)
    return {
        "apiVersion": f"{incidents.GROUP}/{incidents.VERSION}",
        "kind": incidents.KIND,
        "metadata": {
            "name": f"{name}-{incident.number}",
            "namespace": job["namespace"],
            "labels": {JOB_LABEL: name, JOB_NAME_LABEL: name},
            "ownerReferences": [HYPERPOD_JOB.owner_reference(name, job["uid"])],
        },
        "spec": {**write_record(incident), **({} if cost is None else {SECONDS: cost})},
    }


def incident_from(content: Any) -> tuple[Incident, tuple[Problem, ...]]:
    """Return the incident in an Incident object, and its problems."""
    report = Report()
    spec = content.get("spec") if isinstance(content, Mapping) else None
    if not isinstance(spec, Mapping):
        report.required("spec")
        return blank_record(Incident), tuple(report.problems)
    known = {key: value for key, value in spec.items() if key != SECONDS}
    return read_record(Incident, known, "spec", report), tuple(report.problems)


def seconds_lost(incident: Incident) -> float | None:
    """Return the seconds that a fault has cost; None: the incident is open, or it is not known when
    training resumed."""
    return None if is_cost_unknown(incident) else seconds_known_lost(incident)


def seconds_known_lost(incident: Incident) -> float | None:
    """Return the seconds that a fault has cost at least; None: the incident is open."""
    end = lost_until(incident)
    return None if end is None else round(max(end - lost_since(incident), 0.0), 3)


def lost_until(incident: Incident) -> float | None:
    """Return when training resumed, or the end of an incident without a recovery.

    If it is not known when training resumed: the first output, else the start of the workers. None:
    the incident is open.
    """
    if incident.progress_at is not None:
        return incident.progress_at
    if is_cost_unknown(incident):
        return incident.first_output_at or incident.started_at
    return incident.ended_at


def is_cost_unknown(incident: Incident) -> bool:
    """True if the incident was closed as recovered because its workers ran, and nothing has shown
    when they trained again."""
    is_unseen = incident.progress_at is None and incident.started_at is not None
    return is_unseen and incident.outcome == RECOVERED


def lost_since(incident: Incident) -> float:
    """Return the last progress before the fault; if none is known, the time of detection."""
    before = incident.progress_before
    return incident.detected_at if before is None else min(before, incident.detected_at)
