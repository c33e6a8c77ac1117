"""`unbroken jobs`: the jobs of a namespace, one line each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unbroken.cli.connection import JOBS, Cluster
from unbroken.cli.options import ListForm, ListOutput, Namespace, Target
from unbroken.cli.show import note, print_json, print_table
from unbroken.kube.clock import wall

from .goodput import goodput_of, goodput_value, largest, share_text
from .resumed import print_resumed, resumed_jobs
from .views import age, job_summary


def command(
    every: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="List jobs of all namespaces.")
    ] = False,
    namespace: Namespace = "",
    output: ListForm = ListOutput.TEXT,
    *,
    target: Target,
) -> None:
    """List jobs: state, pods, restarts, class of the last fault, goodput.

    Goodput is the share of time in which a job made progress; -o wide adds the largest loss.
    A second table lists jobs of other kinds that auto-resume restarts.

    Example: `unbroken jobs -A -o wide`
    """
    now = wall()

    async def read(cluster: Cluster) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        inside = "" if every else cluster.namespace
        jobs = await cluster.select(JOBS, namespace=inside)
        broken = await cluster.incidents_of(jobs, inside)
        found = []
        for job in jobs:
            good = goodput_of(job, broken[job["metadata"]["uid"]], now)
            found.append({**job_summary(job), "goodput": goodput_value(good)})
        return found, await resumed_jobs(cluster, inside)

    found, others = target.run(read, namespace=namespace)
    if output is ListOutput.JSON:
        print_json({"jobs": found, "resumed": others})
    elif not found and not others:
        note("no jobs; start one with: unbroken run train.py")
    elif found:
        titles = ["NAME", "STATE", "READY", "SPARES", "RESTARTS", "LAST FAULT", "GOODPUT", "AGE"]
        rows = [_row(one, now) for one in found]
        if output is ListOutput.WIDE:
            titles += ["LOST MOST TO", "LOST STEPS"]
            for one, row in zip(found, rows, strict=True):
                row += [largest(one["goodput"]), one["goodput"]["lostSteps"]]
        if every:
            titles = ["NAMESPACE", *titles]
            rows = [[one["namespace"], *row] for one, row in zip(found, rows, strict=True)]
        print_table(titles, rows)
    if output is not ListOutput.JSON:
        print_resumed(others, every, now)


def _row(one: dict[str, Any], now: float) -> list[object]:
    ready = f"{one['ready']}/{one['replicas']}"
    good = share_text(one["goodput"]["share"])
    return [
        *(one["name"], one["state"], ready, one["spares"], one["restarts"]),
        *(one["lastFault"], good, age(one["created"], now)),
    ]
