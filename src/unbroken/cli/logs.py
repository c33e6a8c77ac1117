"""`unbroken logs`: what the workers have written, of all ranks or of one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Annotated, Any

import typer

from unbroken.errors import SpecError, UnbrokenError

from .cluster import PODS, Cluster, Object, on_cluster
from .complete import JobName
from .place import Context, Embedded, Form, Namespace, Output, find
from .show import note, print_json

PREFIX = re.compile(r"\[[^\]\s]*?(\d+)\]:")
"""Of every line of a worker, with its local rank; what has none is the agent's own."""


def command(
    job: JobName,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Lines of this rank only.", show_default="all")
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the pods end.")
    ] = False,
    previous: Annotated[
        bool, typer.Option("--previous", help="Of the containers before the last restart.")
    ] = False,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """Print what the job's workers have written, each line with its rank."""
    lines: list[dict[str, Any]] = []

    def show(pod: str, line: str) -> None:
        found, text = split(line)
        if rank is not None and found != rank:
            return
        if output is Output.JSON:
            lines.append({"pod": pod, "rank": found, "text": text})
        else:
            print(line if rank is None else text, flush=follow)

    async def act(cluster: Cluster) -> None:
        await cluster.job(job)
        pods = await cluster.pods(job)
        if not pods:
            raise SpecError(f"job {job} has no pods now, and their logs went with them")
        await read_all(cluster, pods, show, {"follow": follow, "previous": previous})

    on_cluster(find(directory, context), namespace, act)
    if output is Output.JSON:
        print_json({"job": job, "lines": lines})


def split(line: str) -> tuple[int | None, str]:
    """The rank that wrote a line, and the line without it; None: the agent wrote it."""
    found = PREFIX.match(line)
    return (int(found[1]), line[found.end() :]) if found else (None, line)


async def read_all(
    cluster: Cluster, pods: Iterable[Object], show: Callable[[str, str], None], how: dict[str, bool]
) -> None:
    """Read the logs of pods: one after the other, or together where they are followed."""

    async def read(pod: Object) -> None:
        name = pod["metadata"]["name"]
        try:
            async for line in pod_lines(cluster, pod, **how):
                show(name, line)
        except UnbrokenError as error:
            note(f"{name}: {error}")

    if how.get("follow"):
        async with asyncio.TaskGroup() as tasks:
            for pod in pods:
                tasks.create_task(read(pod))
    else:
        for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
            await read(pod)


def pod_lines(
    cluster: Cluster, pod: Object, *, follow: bool = False, previous: bool = False
) -> AsyncIterator[str]:
    """The log of a pod's training container."""
    from unbroken.controller.pods import training_container

    query = {"container": training_container(pod["spec"])}
    query |= {key: "true" for key, on in (("follow", follow), ("previous", previous)) if on}
    return cluster.client.text_lines(f"{cluster.path(PODS, pod['metadata']['name'])}/log", query)
