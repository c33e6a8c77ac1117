"""`unbroken top`: jobs, ranks and nodes, live in a terminal."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from unbroken.cli.completion import names_of
from unbroken.cli.connection import JOBS, Cluster
from unbroken.cli.options import CommonOptions
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.kube.errors import Forbidden

from .views import OVERVIEW, Contents, Target, lines


def command(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Job to show first.",
            autocompletion=names_of(JOBS),
            show_default="all jobs and nodes",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Show jobs of all namespaces.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and end, also in a terminal.")
    ] = False,
    *,
    options: CommonOptions,
) -> None:
    """Show jobs, ranks, incidents and nodes, live in the terminal.

    Ranks that differ from the others come first, then groups of the others. Enter opens a job, an
    incident or a node; Backspace goes back; q ends. If the cluster stops, the last values stay
    until it runs again. Without a terminal, or with -o json, the values are printed once.

    Example: `unbroken top`

    Example: `unbroken top train --once`
    """
    reader = Reader(every=every)

    async def first(cluster: Cluster) -> tuple[Target, float, Contents]:
        target = OVERVIEW if job is None else ("jobs", cluster.namespace, job)
        now = wall()
        return target, now, await reader.read(cluster, target, now)

    target, now, contents = options.run(first)
    if options.output.is_data:
        options.output.print(contents)
    elif once or not sys.stdout.isatty() or os.environ.get("TERM") in ("", "dumb", None):
        for line in lines(target, contents, now, None):
            print(line.text)
    else:
        from .browsing import Browsing
        from .live import show  # slow to load

        place = options.target.place()
        raise typer.Exit(show(place, options.namespace, reader.read, Browsing(target)))


class Reader:
    """Reads the contents of screens, which are those of the live page."""

    def __init__(self, *, every: bool) -> None:
        self._every = every
        self._pasts: dict[str, Any] = {}

    async def read(self, cluster: Cluster, target: Target, now: float) -> Contents:
        """Read the contents of a screen.  Raises SpecError if the job or incident is gone."""
        from unbroken.cli.page import node_values, values  # slow to load

        match target:
            case ("jobs",):
                return await self._overview(cluster, now)
            case ("nodes", _):
                return await node_values.nodes_page(cluster, now)
            case ("jobs", namespace, name, "incidents", number):
                inside = Cluster(cluster.place, cluster.client, namespace)
                text = await values.incident_text(inside, name, int(number), now)
                return {"lines": text.splitlines()}
            case (_, namespace, name):
                inside = Cluster(cluster.place, cluster.client, namespace)
                return await values.job_page(inside, name, self._pasts, now)
            case _:
                raise SpecError("there is no such screen")

    async def _overview(self, cluster: Cluster, now: float) -> Contents:
        from unbroken.cli.page import node_values, values  # slow to load

        namespace = "" if self._every else cluster.namespace
        if cluster.place.paths is not None:
            jobs = await cluster.select(JOBS, namespace=namespace)
            await values.sample(cluster, self._pasts, now, jobs)
        found = await values.jobs_page(cluster, self._pasts, now, namespace)
        try:
            nodes = await node_values.nodes_page(cluster, now)
        except (SpecError, Forbidden) as error:
            nodes = {"nodes": [], "missing": [f"Nodes not shown: {error}"]}
        return {**found, **nodes, "missing": [*found["missing"], *nodes["missing"]]}
