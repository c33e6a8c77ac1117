"""`unbroken logs`: the output of the workers, of all ranks or of one rank."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import Cluster, Object
from unbroken.cli.options import CommonOptions
from unbroken.cli.show import note
from unbroken.cli.terminal import worker_line
from unbroken.errors import SpecError, UnbrokenError

from .agents import reports
from .pod_logs import LogReaders, Ranks, pod_lines, split
from .views import ENDED, state, world_size

OnLine = Callable[[Object, str], Awaitable[None]]


def command(
    job: JobName,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Print only lines of this rank.", show_default="all")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Follow the logs until the job ends or is suspended."),
    ] = False,
    previous: Annotated[
        bool,
        typer.Option("--previous", help="Print logs of the containers before their last restart."),
    ] = False,
    *,
    options: CommonOptions,
) -> None:
    """Print the output of the job's workers, each line with its rank.

    Lines of an agent have the name of its pod instead; --rank leaves them out.

    Example: `unbroken logs train --rank 3 -f`
    """
    lines: list[dict[str, Any]] = []

    async def act(cluster: Cluster) -> None:
        found_job = await cluster.job(job)
        if rank is not None:
            await _require_rank(cluster, found_job, rank)
        ranks = Ranks(cluster, found_job)

        async def show(pod: Object, line: str) -> None:
            local_rank, text = split(line)
            found = None if local_rank is None else await ranks.of(pod, local_rank)
            if rank is not None and found != rank:
                return
            name = pod["metadata"]["name"]
            if options.output.is_data:
                lines.append({"pod": name, "rank": found, "text": text})
            elif rank is not None:
                print(worker_line(text, sys.stdout), flush=follow)
            else:
                known = local_rank is None or found is None
                shown = worker_line(text, sys.stdout)
                print(f"[{name if known else found}]: {shown}", flush=follow)

        await (_follow(cluster, job, show) if follow else _print(cluster, job, show, previous))

    options.run(act)
    if options.output.is_data:
        options.output.print({"job": job, "lines": lines})


async def _require_rank(cluster: Cluster, job: Object, rank: int) -> None:
    name = job["metadata"]["name"]
    answers = await reports(cluster, await cluster.pods(name))
    world = world_size(job, (one.nproc for one in answers.values()))
    if world is not None and rank >= world:
        raise SpecError(f"job {name} has " + (f"ranks 0..{world - 1}" if world > 1 else "rank 0"))


async def _print(cluster: Cluster, job: str, show: OnLine, previous: bool) -> None:
    pods = await cluster.pods(job)
    if not pods:
        raise SpecError(f"job {job} has no pods now; logs are deleted with the pods")
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        try:
            async for line in pod_lines(cluster, pod, previous=previous):
                await show(pod, line)
        except UnbrokenError as error:
            note(f"{pod['metadata']['name']}: {error}")


async def _follow(cluster: Cluster, name: str, show: OnLine) -> None:
    """Follow all pods, including pods that start later."""
    from .watching import Watched  # slow to load

    async with Watched(cluster, name) as watched, asyncio.TaskGroup() as tasks:
        readers = LogReaders(cluster, tasks, show)

        def has_ended() -> bool:
            readers.read(watched.pods())
            job = watched.job()
            return job is None or state(job) in (*ENDED, "Suspended")

        await watched.until(has_ended)
        await readers.finish()
