"""`unbroken jobs`: the jobs of a namespace, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from unbroken.cli.connection import JOBS, Cluster, Object
from unbroken.cli.listing import OTHER_SECONDS, Listing, require_table, show_list, watch_list
from unbroken.cli.options import ClusterTarget, ListForm, ListOutput, Namespace, Watching
from unbroken.kube.clock import wall

from .resumed import listing as resumed_listing
from .resumed import resumed_jobs
from .views import age, goodput_of, goodput_value, job_summary, largest, share_text


def command(
    every: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="List jobs of all namespaces.")
    ] = False,
    namespace: Namespace = "",
    output: ListForm = ListOutput.TEXT,
    watch: Watching = False,
    *,
    target: ClusterTarget,
) -> None:
    """List jobs: state, pods, restarts, class of the last fault, goodput.

    Goodput is the share of time in which a job made progress; -o wide adds the largest loss.
    A second table lists jobs of other kinds that auto-resume restarts; -o wide adds the culprit of
    the last loss and the remedy.

    Example: `unbroken jobs -A -o wide`

    Example: `unbroken jobs --watch`
    """
    if watch:
        require_table(output)

    async def read(cluster: Cluster) -> tuple[Listing, Listing]:
        now, inside = wall(), "" if every else cluster.namespace
        found = [value for _, value in await job_values(cluster, inside, now)]
        others = await resumed_jobs(cluster, inside)
        is_wide = output is ListOutput.WIDE
        second = resumed_listing(others, now, every=every, is_wide=is_wide)
        return _listing(found, second, output, now, every=every), second

    async def follow(cluster: Cluster) -> None:
        from unbroken.cli.watch import follow_jobs  # slow to load

        inside = None if every else cluster.namespace
        await watch_list(cluster, follow_jobs(inside), lambda: read(cluster), OTHER_SECONDS)

    if watch:
        target.run(follow, namespace=namespace)
        return
    _show(*target.run(read, namespace=namespace), output)


async def job_values(
    cluster: Cluster, namespace: str, now: float
) -> list[tuple[Object, dict[str, Any]]]:
    """The jobs of a namespace (empty: of all), each with its values."""
    jobs = await cluster.select(JOBS, namespace=namespace)
    broken = await cluster.incidents_of(jobs, namespace)
    found = []
    for job in jobs:
        good = goodput_of(job, broken[job["metadata"]["uid"]], now)
        found.append((job, {**job_summary(job), "goodput": goodput_value(good)}))
    return found


def _show(jobs: Listing, others: Listing, output: ListOutput) -> None:
    """Print the jobs and those of other kinds."""
    if output not in (ListOutput.TEXT, ListOutput.WIDE):
        show_list(replace(jobs, names=[*jobs.names, *others.names]), output)
        return
    if jobs.rows or not others.rows:
        show_list(jobs, output)
    if jobs.rows and others.rows:
        print()
    if others.rows:
        show_list(others, output)


def _listing(
    found: Sequence[Mapping[str, Any]],
    others: Listing,
    output: ListOutput,
    now: float,
    *,
    every: bool,
) -> Listing:
    titles = ["NAME", "STATE", "READY", "SPARES", "RESTARTS", "LAST FAULT", "GOODPUT", "AGE"]
    rows = [_row(one, now) for one in found]
    names = [str(one["name"]) for one in found]
    if output is ListOutput.WIDE:
        titles += ["LOST MOST TO", "LOST STEPS"]
        for one, row in zip(found, rows, strict=True):
            row += [largest(one["goodput"]), one["goodput"]["lostSteps"]]
    if every:
        titles = ["NAMESPACE", *titles]
        rows = [[one["namespace"], *row] for one, row in zip(found, rows, strict=True)]
        names = [f"{one['namespace']}/{one['name']}" for one in found]
    empty = "no jobs; start one with: unbroken run train.py"
    value = {"jobs": found, "resumed": others.value}
    return Listing(value, names, titles, rows, empty=empty)


def _row(one: Mapping[str, Any], now: float) -> list[object]:
    ready = f"{one['ready']}/{one['replicas']}"
    good = share_text(one["goodput"]["share"])
    return [
        *(one["name"], one["state"], ready, one["spares"], one["restarts"]),
        *(one["lastFault"], good, age(one["created"], now)),
    ]
