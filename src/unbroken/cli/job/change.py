"""`unbroken restart`, `suspend`, `resume` and `delete`: what is asked of a job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unbroken.cli.connection import JOBS, Cluster, on_cluster
from unbroken.cli.place import (
    Context,
    Embedded,
    Form,
    Kubeconfig,
    Namespace,
    Output,
    Place,
    Use,
    find,
)
from unbroken.cli.show import print_json
from unbroken.errors import SpecError
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.spec.keys import RESTART

from .complete import JobName
from .views import ENDED, state


def restart(
    job: JobName,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop the job's processes and start them again in their pods."""
    from unbroken.kube.clock import wall
    from unbroken.spec.times import time_text

    now = time_text(wall(), has_microseconds=True)
    patch = {"metadata": {"annotations": {RESTART: now}}}
    _change(
        find(directory, context, kubeconfig, Use.CHANGE),
        namespace,
        job,
        patch,
        "restart asked for",
        output,
    )


def suspend(
    job: JobName,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when its pods are gone.")
    ] = True,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop the job and give its pods up; `unbroken resume` lets it go on."""
    patch = HYPERPOD_JOB.suspension(True)
    place = find(directory, context, kubeconfig, Use.CHANGE)
    _change(place, namespace, job, patch, "suspended", output, wait=wait)


def resume(
    job: JobName,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a suspended job go on."""
    patch = HYPERPOD_JOB.suspension(False)
    _change(
        find(directory, context, kubeconfig, Use.CHANGE), namespace, job, patch, "resumed", output
    )


def _change(
    place: Place,
    namespace: str,
    name: str,
    patch: dict[str, Any],
    done: str,
    output: Output,
    *,
    wait: bool = False,
) -> None:
    async def act(cluster: Cluster) -> None:
        now = state(await cluster.job(name))
        if now in ENDED:
            raise SpecError(f"job {name} has ended ({now}); delete it and run it anew")
        await cluster.patch(JOBS, name, patch)
        if wait:
            await _until_suspended(cluster, name)

    on_cluster(place, namespace, act)
    _tell(name, done, output)


async def _until_suspended(cluster: Cluster, name: str) -> None:
    from .watching import Watched  # slow to load

    async with Watched(cluster, name) as watched:

        def is_suspended() -> bool:
            job = watched.job()
            is_idle = job is None or state(job) in ("Suspended", *ENDED)
            return is_idle and not watched.pods()

        await watched.until(is_suspended)


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
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete a job with its pods, logs and incidents."""

    async def act(cluster: Cluster) -> None:
        await delete_job(cluster, job, wait=wait)

    on_cluster(find(directory, context, kubeconfig, Use.CHANGE), namespace, act)
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
