"""`unbroken page-server`: the live page as a program in a Kubernetes cluster."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.programs import ProgramTarget, start_logging
from unbroken.errors import SpecError
from unbroken.foreign_numbers import PORT_MAX
from unbroken.log_lines import Log

if TYPE_CHECKING:
    from unbroken.kube.client import KubeClient

    from .driver import SharedPage

log = Log(__name__)

TOKEN_FILE = Path("/var/run/secrets/unbroken/token")


def command(
    target: ProgramTarget,
    host: Annotated[
        str, typer.Option("--host", help="Address where the page is served.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=PORT_MAX, help="Port of the page; 0: any.")
    ] = 8090,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="Host name at which a proxy with TLS serves the page. Can be repeated. Browsers "
            "that name another host are refused.",
            show_default="only localhost",
        ),
    ] = None,
    operator: Annotated[
        str | None,
        typer.Option(
            "--operator",
            metavar="HOST:PORT",
            help="Where the operators serve the reports of agents (--reports-port).",
            show_default="none: the page shows no ranks, steps and metrics",
        ),
    ] = None,
    operator_token: Annotated[
        Path,
        typer.Option(
            "--operator-token",
            metavar="FILE",
            help="File of the token for the operators, with the audience unbroken-reports.",
        ),
    ] = TOKEN_FILE,
) -> None:
    """Serve the live page to people who sign in with tokens of their Kubernetes accounts.

    The chart runs it in the cluster (`page.enabled`). It reads with the token of the person, so
    each person sees what Kubernetes lets this person read.

    Example: `unbroken page-server --context prod --port 8090`
    """
    from .driver import SharedPage  # slow to load
    from .reports import operator_place

    if any("/" in one or ":" in one for one in names or ()):
        raise SpecError("--name is a host name alone, such as page.example.com")
    start_logging()
    place = None if operator is None else operator_place(operator, operator_token)
    options = SharedPage(host, port, tuple(names or ()), place)
    target.run("unbroken-page", partial(_serve, options))


async def _serve(options: SharedPage, client: KubeClient) -> None:
    from .driver import serving_people

    async with serving_people(client, options) as address:
        log.info("page is served", address=address)
        await asyncio.Event().wait()
