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
    if running is None or not running.ui:
        raise SpecError(
            "this cluster was started by a version without a page; restart it: unbroken down; "
            "unbroken up --detach"
        )
    link = link_to(running, paths)
    print(link)
    if browser:
        from unbroken.local.apiserver.access import write_private  # slow to load

        # Arguments of a process can be read by every user of the machine.
        write_private(paths.ui_link, OPENING.format(link=link).encode())
        if not webbrowser.open(paths.ui_link.as_uri()):
            note("no browser was found on this machine: open the link in another way")


def link_to(running: state.State, paths: state.Paths) -> str:
    """Make a link that opens the page once."""
    from .access import Access, kept  # slow to load

    return f"{running.ui}?link={Access(kept(paths.ui).key).link_token(wall())}"
