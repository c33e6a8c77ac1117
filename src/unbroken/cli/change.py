"""`unbroken restart`, `suspend`, `resume` and `delete`: what is asked of a job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unbroken.errors import SpecError

from .cluster import JOBS, Cluster, on_cluster
from .complete import JobName
from .place import Context, Embedded, Form, Namespace, Output, Place, find
from .show import print_json
from .views import ENDED, state

RESTART = "unbroken.dev/restart"


def restart(
    job: JobName,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """Stop the job's processes and start them again in their pods."""
    from unbroken.kube.clock import wall
    from unbroken.spec.times import time_text

    now = time_text(wall(), has_microseconds=True)
    patch = {"metadata": {"annotations": {RESTART: now}}}
    _change(find(directory, context), namespace, job, patch, "restart asked for", output)


def suspend(
    job: JobName,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """Stop the job and give its pods up; `unbroken resume` lets it go on."""
    patch = {"spec": {"runPolicy": {"suspend": True}}}
    _change(find(directory, context), namespace, job, patch, "suspended", output)


def resume(
    job: JobName,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """Let a suspended job go on."""
    patch = {"spec": {"runPolicy": {"suspend": False}}}
    _change(find(directory, context), namespace, job, patch, "resumed", output)


def _change(
    place: Place, namespace: str, name: str, patch: dict[str, Any], done: str, output: Output
) -> None:
    async def act(cluster: Cluster) -> None:
        now = state(await cluster.job(name))
        if now in ENDED:
            raise SpecError(f"job {name} has ended ({now}); delete it and run it anew")
        await cluster.patch(JOBS, name, patch)

    on_cluster(place, namespace, act)
    _tell(name, done, output)


def _tell(name: str, done: str, output: Output) -> None:
    if output is Output.JSON:
        print_json({"job": name, "done": done})
    else:
        print(f"{name}: {done}")


def delete(
    job: JobName,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when its pods are gone.")
    ] = True,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """Delete a job with its pods, logs and incidents."""

    async def act(cluster: Cluster) -> None:
        await delete_job(cluster, job, wait=wait)

    on_cluster(find(directory, context), namespace, act)
    _tell(job, "deleted", output)


async def delete_job(cluster: Cluster, name: str, *, wait: bool) -> None:
    """Delete a job; with `wait`, return when it and its pods are gone."""
    from .watching import Watched  # slow to load

    found = await cluster.job(name)
    async with Watched(cluster, name) as watched:
        await cluster.delete(JOBS, name)
        if wait:
            uid = found["metadata"]["uid"]
            await watched.until(lambda: not watched.has_job(uid) and not watched.pods())
