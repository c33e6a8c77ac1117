"""Jobs of other kinds that auto-resume restarts, as `unbroken jobs` lists them."""

from __future__ import annotations

from typing import Any

from unbroken.cli.connection import Cluster, Collection
from unbroken.cli.show import print_table
from unbroken.core.auto_resume import FAULT_LENGTH
from unbroken.kube.errors import Forbidden
from unbroken.operator.parts import PARTS
from unbroken.spec.auto_resume import resume_of
from unbroken.spec.job_kinds import JobKind, controller_of

from .views import age

Object = dict[str, Any]
RESUMED = tuple(part.resumes for part in PARTS.values() if part.resumes is not None)
"""Kinds of jobs that the operator resumes."""
TITLES = ("KIND", "NAME", "STATE", "RESTARTS", "LAST FAULT", "AGE")


async def resumed_jobs(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """List the jobs that ask to be resumed; `namespace` empty: in all namespaces.

    A kind that the cluster does not know, or that the user may not list, is left out.
    """
    found = []
    for kind in RESUMED:
        collection = Collection(kind.path, kind.plural, kind.name)
        try:
            jobs = await cluster.select(collection, namespace=namespace)
        except Forbidden:
            continue
        for job in jobs:
            annotations = job["metadata"].get("annotations") or {}
            if controller_of(job) is None and resume_of(annotations).is_wanted:
                found.append(summary(kind, job, annotations))
    return found


def summary(kind: JobKind, job: Object, annotations: dict[str, str]) -> dict[str, Any]:
    """The values of a job for `unbroken jobs`."""
    from unbroken.operator.resume.views import read_record  # slow to load

    record, metadata = read_record(annotations), job["metadata"]
    state = kind.end_of(job)
    if not state and record.is_suspended:
        state = "Restarting"
    elif not state:
        state = "Suspended" if kind.is_suspended(job) else "Active"
    return {
        "kind": kind.name,
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "state": state,
        "restarts": record.count,
        "restartsMax": resume_of(annotations).retries_max,
        "lastFault": " ".join((record.exhausted or record.fault).split())[:FAULT_LENGTH],
        "created": metadata["creationTimestamp"],
    }


def print_resumed(jobs: list[dict[str, Any]], every: bool, now: float) -> None:
    """Print the jobs as a table, with their namespaces if `every`; nothing if there are none."""
    titles, rows = list(TITLES), [_row(one, now) for one in jobs]
    if every:
        titles = ["NAMESPACE", *titles]
        rows = [[one["namespace"], *row] for one, row in zip(jobs, rows, strict=True)]
    if jobs:
        print_table(titles, rows)


def _row(one: dict[str, Any], now: float) -> list[object]:
    restarts = f"{one['restarts']} of {one['restartsMax']}"
    return [
        *(one["kind"], one["name"], one["state"], restarts),
        *(one["lastFault"], age(one["created"], now)),
    ]
