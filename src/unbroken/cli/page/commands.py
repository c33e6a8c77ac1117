"""`unbroken ui`: a link to the live page of a cluster."""

from __future__ import annotations

import asyncio
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.options import ClusterTarget
from unbroken.cli.show import note
from unbroken.errors import SpecError
from unbroken.foreign_numbers import PORT_MAX
from unbroken.kube.clock import wall
from unbroken.local import state

if TYPE_CHECKING:
    from unbroken.cli.connection import Cluster
    from unbroken.cli.place import ClusterPlace

OPENING = '<!doctype html><meta http-equiv="refresh" content="0; url={link}">'


def command(
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--namespace",
            help="On a Kubernetes cluster, show only jobs of this namespace. Can be repeated.",
            show_default="all that your account may read",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=PORT_MAX,
            help="On a Kubernetes cluster, serve the page at this port of 127.0.0.1; 0: any.",
        ),
    ] = 0,
    prometheus: Annotated[
        str,
        typer.Option(
            "--prometheus",
            metavar="URL",
            help="On a Kubernetes cluster, show dashboards of the data of this Prometheus.",
            show_default="none",
        ),
    ] = "",
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the link in a browser of this machine, too.")
    ] = False,
    *,
    target: ClusterTarget,
) -> None:
    """Print a link to the live page of a cluster: jobs, ranks, incidents, nodes.

    A link opens the page once, within ten minutes. From another machine, forward the port first:
    `ssh -L PORT:127.0.0.1:PORT HOST`.

    Local cluster: `unbroken up` serves the page. The browser keeps access for 30 days.

    Kubernetes cluster: this command serves the page until Ctrl-C. It reads with the account of your
    kubeconfig, so the page shows what Kubernetes lets you read.

    Example: `unbroken ui --browser`

    Example: `unbroken ui --context prod --namespace team-a`
    """
    from .prometheus import read_prometheus_address  # slow to load

    place = target.place()
    if place.paths is None:
        address = read_prometheus_address(prometheus) if prometheus else ""
        _serve(place, namespaces or (), port, address, browser=browser)
        return
    if namespaces or port or prometheus:
        given = "--namespace" if namespaces else "--port" if port else "--prometheus"
        raise SpecError(
            f"{given} is for the page of a Kubernetes cluster, and {place.paths.directory} is a "
            "local cluster: its page shows all jobs at the port of `unbroken up --ui-port`, and "
            "dashboards of `unbroken up --prometheus`"
        )
    place.require_running()
    link = link_to(state.running(place.paths), place.paths)
    print(link)
    if browser:
        _open(link, place.paths.ui_link)


def _serve(
    place: ClusterPlace, namespaces: Sequence[str], port: int, prometheus: str, *, browser: bool
) -> None:
    """Serve the page of a Kubernetes cluster until the command is stopped."""
    from unbroken.cli.connection import on_cluster  # slow to load
    from unbroken.cli.programs import start_logging, until_stopped

    from .driver import serving_account

    start_logging()

    async def serve(cluster: Cluster) -> None:
        async with serving_account(cluster, namespaces, port, prometheus) as link:
            print(link, flush=True)
            note("the page shows what your account may read; Ctrl-C ends it")
            with tempfile.TemporaryDirectory(prefix="unbroken-ui-") as folder:
                if browser:
                    _open(link, Path(folder) / "link.html")
                await asyncio.Event().wait()

    on_cluster(place, "", lambda cluster: until_stopped(serve(cluster)))


def _open(link: str, file: Path) -> None:
    """Open a link in a browser by way of a private file.

    Arguments of a process can be read by every user of the machine.
    """
    from unbroken.local.apiserver.access import write_private  # slow to load

    write_private(file, OPENING.format(link=link).encode())
    if not webbrowser.open(file.as_uri()):
        note("no browser was found on this machine: open the link in another way")


def link_to(running: state.State | None, paths: state.Paths) -> str:
    """Make a link that opens the page once.  Raises SpecError if the cluster has no page."""
    from .access import Access, read_page_file  # slow to load

    file = read_page_file(paths.ui)
    if running is None or not running.ui or file is None:
        is_served = running is not None and running.ui
        reason = f"{paths.ui} is missing" if is_served else "an earlier version started it"
        raise SpecError(
            f"the cluster of {paths.directory} serves no page that a link can open ({reason}): "
            "restart it with: unbroken down; unbroken up --detach"
        )
    return f"{running.ui}?link={Access(file.key).link_token(wall())}"
