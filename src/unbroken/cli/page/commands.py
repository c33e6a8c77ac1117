"""`unbroken ui`: a link to the live page of a local cluster."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from unbroken.cli.options import Directory
from unbroken.cli.place import DEFAULT, ClusterPlace, resolve
from unbroken.cli.show import note
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.local import state

OPENING = '<!doctype html><meta http-equiv="refresh" content="0; url={link}">'


def command(
    directory: Directory = DEFAULT,
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the link in a browser of this machine, too.")
    ] = False,
) -> None:
    """Print a link to the live page of the local cluster: jobs, ranks, incidents, nodes.

    A link opens the page once, within ten minutes. The browser then keeps access for 30 days.
    From another machine, forward the port first: `ssh -L PORT:127.0.0.1:PORT HOST`.

    Example: `unbroken ui --browser`
    """
    paths = state.Paths(resolve(directory))
    ClusterPlace(str(paths.kubeconfig), None, paths).require_running()
    running = state.running(paths)
    link = link_to(running, paths)
    print(link)
    if browser:
        from unbroken.local.apiserver.access import write_private  # slow to load

        # Arguments of a process can be read by every user of the machine.
        write_private(paths.ui_link, OPENING.format(link=link).encode())
        if not webbrowser.open(paths.ui_link.as_uri()):
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
