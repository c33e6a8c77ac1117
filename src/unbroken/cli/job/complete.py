"""The JOB argument, and its completion in the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unbroken.cli.connection import Cluster, on_cluster
from unbroken.cli.place import choose
from unbroken.errors import UnbrokenError


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs that start so; nothing where no cluster answers."""

    async def read(cluster: Cluster) -> list[dict[str, Any]]:
        return await cluster.jobs()

    given = ctx.params
    directory = Path(given["directory"]) if given.get("directory") else None
    try:
        place, _ = choose(directory, given.get("context"), given.get("kubeconfig"))
        jobs = on_cluster(place, given.get("namespace") or "", read)
    except UnbrokenError:
        return []  # the shell shows no errors while a person types
    names = [str(job["metadata"]["name"]) for job in jobs]
    return [name for name in names if name.startswith(incomplete)]


JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=job_names),
]
