"""Completion of names in the shell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from unbroken.errors import UnbrokenError

from .connection import JOBS, Cluster, Object, ObjectKind, on_cluster
from .place import choose


def names_of(collection: ObjectKind) -> Callable[[typer.Context, str], list[str]]:
    """Complete names of the objects of a collection; no names if no cluster answers."""

    async def read(cluster: Cluster) -> list[Object]:
        return await cluster.select(collection)

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        given = ctx.params
        directory = Path(given["directory"]) if given.get("directory") else None
        try:
            place, _ = choose(directory, given.get("context"), given.get("kubeconfig"))
            result = on_cluster(place, given.get("namespace") or "", read)
        except UnbrokenError:
            return []  # the shell shows no errors while a person types
        names = [str(item["metadata"]["name"]) for item in result]
        return [name for name in names if name.startswith(incomplete)]

    return complete


JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=names_of(JOBS)),
]
