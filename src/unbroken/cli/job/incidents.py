"""`unbroken incidents`: the incidents of all jobs, one line each."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from unbroken.cli.connection import JOBS, Cluster
from unbroken.cli.listing import OTHER_SECONDS, Listing, require_table, show_list, watch_list
from unbroken.cli.options import ClusterTarget, ListForm, ListOutput, Namespace, Watching
from unbroken.core.job.recovery.words import culprit_text
from unbroken.core.losses import Loss
from unbroken.operator.resume.record import one_line
from unbroken.spec.job.codec import seconds_lost
from unbroken.spec.job.incident import Incident

from .resumed import Resumed, moment, resumed_jobs, seconds_of
from .views import span

TITLES = ("TIME", "JOB", "NUMBER", "CULPRIT", "FAULT", "REMEDY", "COST")


def command(
    every: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="List incidents of all namespaces.")
    ] = False,
    namespace: Namespace = "",
    output: ListForm = ListOutput.TEXT,
    watch: Watching = False,
    *,
    target: ClusterTarget,
) -> None:
    """List incidents of all jobs, oldest first: time, job, culprit, fault, remedy, cost.

    Jobs of other kinds with auto-resume are KIND/NAME, with their latest 10 losses. Their cost is
    the time from the first sign until the job ran again. -o wide adds the outcome.

    Example: `unbroken incidents -A -o wide`

    Example: `unbroken incidents --watch`
    """
    if watch:
        require_table(output)

    async def read(cluster: Cluster) -> tuple[Listing]:
        inside = "" if every else cluster.namespace
        jobs = {job["metadata"]["uid"]: job for job in await cluster.select(JOBS, namespace=inside)}
        broken = await cluster.incidents_of(jobs.values(), inside)
        found = [
            incident_value(jobs[uid]["metadata"], one) for uid in broken for one in broken[uid]
        ]
        for other in await resumed_jobs(cluster, inside):
            found += [loss_value(other, loss) for loss in other.job.losses]
        found.sort(key=lambda one: str(one["detectedAt"]))
        return (_listing(found, every=every, is_wide=output is ListOutput.WIDE),)

    async def follow(cluster: Cluster) -> None:
        from unbroken.cli.watch import follow_jobs  # slow to load

        inside = None if every else cluster.namespace
        await watch_list(cluster, follow_jobs(inside), lambda: read(cluster), OTHER_SECONDS)

    if watch:
        target.run(follow, namespace=namespace)
    else:
        show_list(*target.run(read, namespace=namespace), output)


def incident_value(metadata: dict[str, Any], incident: Incident) -> dict[str, Any]:
    """An incident of a HyperPodPyTorchJob as JSON."""
    return {
        "namespace": metadata["namespace"],
        "job": metadata["name"],
        "number": incident.number,
        "detectedAt": moment(incident.detected_at),
        "culprit": culprit_text(incident.culprit),
        "fault": incident.fault or incident.culprit.fault,
        "remedy": incident.remedy.value,
        "seconds": seconds_lost(incident),
        "outcome": incident.outcome,
    }


def loss_value(other: Resumed, loss: Loss) -> dict[str, Any]:
    """A loss of a job with auto-resume as JSON; `number` 0: the job was not restarted."""
    recovered = "recovered" if loss.ran is not None else ""
    return {
        "namespace": other.job.namespace,
        "job": other.word,
        "number": loss.restart,
        "detectedAt": moment(loss.at),
        "culprit": one_line(loss.culprit),
        "fault": one_line(loss.fault),
        "remedy": one_line(loss.remedy),
        "seconds": seconds_of(loss),
        "outcome": recovered if loss.restart else "not restarted",
    }


def _listing(found: list[dict[str, Any]], *, every: bool, is_wide: bool) -> Listing:
    titles, rows = list(TITLES), [_row(one) for one in found]
    if is_wide:
        titles.append("OUTCOME")
        rows = [[*row, one["outcome"] or "-"] for one, row in zip(found, rows, strict=True)]
    if every:
        titles = ["NAMESPACE", *titles]
        rows = [[one["namespace"], *row] for one, row in zip(found, rows, strict=True)]
    place = "{namespace}/{job}" if every else "{job}"
    names = [f"{place.format(**one)} {one['number']}" for one in found]
    return Listing({"incidents": found}, names, titles, rows, empty="no incidents so far")


def _row(one: dict[str, Any]) -> list[object]:
    at = datetime.fromisoformat(one["detectedAt"]).astimezone()
    cost = "-" if one["seconds"] is None else span(one["seconds"])
    return [
        *(f"{at:%m-%d %H:%M:%S}", one["job"], one["number"], one["culprit"], one["fault"]),
        *(one["remedy"], cost),
    ]
