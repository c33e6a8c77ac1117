"""`unbroken jobs`: the jobs of a namespace, one line each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unbroken.kube.clock import wall

from .cluster import JOB_LABEL, PODS, Cluster, on_cluster
from .place import Context, Embedded, Form, Namespace, Output, find
from .show import note, print_json, print_table
from .views import age, job_summary


def command(
    every: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Jobs of every namespace.")
    ] = False,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """List jobs: state, pods, restarts, the class of the last fault."""

    async def read(cluster: Cluster) -> list[dict[str, Any]]:
        inside = "" if every else cluster.namespace
        jobs = await cluster.jobs(inside)
        pods: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for pod in await cluster.select(PODS, JOB_LABEL, inside):
            metadata = pod["metadata"]
            pods.setdefault((metadata["namespace"], metadata["labels"][JOB_LABEL]), []).append(pod)
        keys = [(job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs]
        return [job_summary(job, pods.get(key, ())) for job, key in zip(jobs, keys, strict=True)]

    found = on_cluster(find(directory, context), namespace, read)
    if output is Output.JSON:
        print_json({"jobs": found})
    elif not found:
        note("no jobs; start one with: unbroken run train.py")
    else:
        titles = ["NAME", "STATE", "READY", "SPARES", "RESTARTS", "LAST FAULT", "AGE"]
        rows = [_row(one, wall()) for one in found]
        if every:
            titles = ["NAMESPACE", *titles]
            rows = [[one["namespace"], *row] for one, row in zip(found, rows, strict=True)]
        print_table(titles, rows)


def _row(one: dict[str, Any], now: float) -> list[object]:
    ready = f"{one['ready']}/{one['replicas'] + one['spares']}"
    return [
        *(one["name"], one["state"], ready, one["spares"], one["restarts"]),
        *(one["lastFault"], age(one["created"], now)),
    ]
