"""`unbroken restart`, `suspend`, `resume` and `delete`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import JOBS, Cluster, Object
from unbroken.cli.options import CommonOptions
from unbroken.cli.place import Use
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.spec.job_kinds import HYPERPOD_JOB, controller_of
from unbroken.spec.keys import RESTART
from unbroken.spec.times import time_text

from .views import ENDED, state

Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when all pods of the job are gone.")
]


def restart(job: JobName, options: CommonOptions) -> None:
    """Restart the job's workers in their pods.

    Example: `unbroken restart train`
    """

    async def act(cluster: Cluster) -> None:
        await restart_job(cluster, await cluster.job(job))

    options.run(act, Use.CHANGE)
    _print_done(job, "restart requested", options)


def suspend(job: JobName, wait: Wait = True, *, options: CommonOptions) -> None:
    """Stop the job and delete its pods; `unbroken resume` continues it.

    Example: `unbroken suspend train --no-wait`
    """

    async def act(cluster: Cluster) -> None:
        await suspend_job(cluster, await cluster.job(job))
        if wait:
            await _until_suspended(cluster, job)

    options.run(act, Use.CHANGE)
    _print_done(job, "suspended", options)


def resume(job: JobName, options: CommonOptions) -> None:
    """Continue a suspended job.

    Example: `unbroken resume train`
    """

    async def act(cluster: Cluster) -> None:
        await resume_job(cluster, await cluster.job(job))

    options.run(act, Use.CHANGE)
    _print_done(job, "resumed", options)


async def restart_job(cluster: Cluster, job: Object) -> Object:
    """Order the restart of a job, and return the job.  Raises SpecError if it has ended."""
    now = time_text(wall(), has_microseconds=True)
    return await _change(cluster, job, {"metadata": {"annotations": {RESTART: now}}})


async def suspend_job(cluster: Cluster, job: Object) -> Object:
    """Suspend a job, and return it.

    Raises SpecError if the job has ended, or if another job made it.
    """
    by_owner = "set its spec.suspend to true"
    return await _change(cluster, job, HYPERPOD_JOB.suspension(True), by_owner)


async def resume_job(cluster: Cluster, job: Object) -> Object:
    """Let a suspended job run again, and return it.  Raises as `suspend_job`."""
    by_owner = "set its spec.suspend to false"
    return await _change(cluster, job, HYPERPOD_JOB.suspension(False), by_owner)


def check_owner(job: Mapping[str, Any], advice: str) -> None:
    """Raise SpecError if another job made this one: the operator would undo the change.

    `advice` says what to do with the other job.
    """
    owner = controller_of(job)
    if owner is not None:
        kind, name = owner
        text = f"job {job['metadata']['name']} belongs to {kind.name} {name}"
        raise SpecError(f"{text}, which would change it back: change the {kind.name}, {advice}")


async def _change(cluster: Cluster, job: Object, patch: Object, by_owner: str = "") -> Object:
    """Change a job.  `by_owner`: what to do with the job that made it instead; empty: it follows
    no other in this."""
    name, now = job["metadata"]["name"], state(job)
    if by_owner:
        check_owner(job, by_owner)
    if now in ENDED:
        raise SpecError(f"job {name} has ended ({now}); delete it and run it again")
    # Another job may have this name by now: Kubernetes refuses to change that one.
    metadata = {**patch.get("metadata", {}), "uid": job["metadata"]["uid"]}
    return await cluster.patch(JOBS, name, {**patch, "metadata": metadata})


async def _until_suspended(cluster: Cluster, name: str) -> None:
    from unbroken.cli.watch import WatchedJob  # slow to load

    async with WatchedJob(cluster, name) as watched:

        def is_suspended() -> bool:
            job = watched.job()
            is_idle = job is None or state(job) in ("Suspended", *ENDED)
            return is_idle and not watched.pods()

        await watched.until(is_suspended)


def _print_done(name: str, done: str, options: CommonOptions) -> None:
    if options.output.is_data:
        options.output.print({"job": name, "done": done})
    else:
        print(f"{name}: {done}")


def delete(job: JobName, wait: Wait = True, *, options: CommonOptions) -> None:
    """Delete a job with its pods, logs and incidents.

    Example: `unbroken delete train`
    """

    async def act(cluster: Cluster) -> None:
        await delete_job(cluster, job, wait=wait)

    options.run(act, Use.CHANGE)
    _print_done(job, "deleted", options)


async def delete_job(cluster: Cluster, name: str, *, wait: bool) -> None:
    """Delete a job; with `wait`, return when it and its pods are gone."""
    from unbroken.cli.watch import WatchedJob  # slow to load

    found = await cluster.job(name)
    check_owner(found, "or delete it")
    async with WatchedJob(cluster, name) as watched:
        await cluster.delete(JOBS, name)
        if wait:
            uid = found["metadata"]["uid"]
            await watched.until(lambda: not watched.has_job(uid) and not watched.pods())
