"""`unbroken restart`, `suspend`, `resume` and `delete`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import JOBS, Cluster
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
    now = time_text(wall(), has_microseconds=True)
    patch = {"metadata": {"annotations": {RESTART: now}}}
    _change(options, job, patch, "restart requested")


def suspend(job: JobName, wait: Wait = True, *, options: CommonOptions) -> None:
    """Stop the job and delete its pods; `unbroken resume` continues it.

    Example: `unbroken suspend train --no-wait`
    """
    patch = HYPERPOD_JOB.suspension(True)
    _change(options, job, patch, "suspended", wait=wait, by_owner="set its spec.suspend to true")


def resume(job: JobName, options: CommonOptions) -> None:
    """Continue a suspended job.

    Example: `unbroken resume train`
    """
    patch = HYPERPOD_JOB.suspension(False)
    _change(options, job, patch, "resumed", by_owner="set its spec.suspend to false")


def check_owner(job: Mapping[str, Any], advice: str) -> None:
    """Raise SpecError if another job made this one: the operator would undo the change.

    `advice` says what to do with the other job.
    """
    owner = controller_of(job)
    if owner is not None:
        kind, name = owner
        text = f"job {job['metadata']['name']} belongs to {kind.name} {name}"
        raise SpecError(f"{text}, which would change it back: change the {kind.name}, {advice}")


def _change(
    options: CommonOptions,
    name: str,
    patch: dict[str, Any],
    done: str,
    *,
    wait: bool = False,
    by_owner: str = "",
) -> None:
    """Change a job.  `by_owner`: what to do with the job that made it instead; empty: it follows
    no other in this."""

    async def act(cluster: Cluster) -> None:
        job = await cluster.job(name)
        now = state(job)
        if by_owner:
            check_owner(job, by_owner)
        if now in ENDED:
            raise SpecError(f"job {name} has ended ({now}); delete it and run it again")
        await cluster.patch(JOBS, name, patch)
        if wait:
            await _until_suspended(cluster, name)

    options.run(act, Use.CHANGE)
    _print_done(name, done, options)


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
