"""`unbroken operator`: the operator as a program of its own, for any cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .place import Context, Embedded, find

if TYPE_CHECKING:
    from unbroken.controller.driver import OperatorOptions


def command(
    kubeconfig: Annotated[
        Path | None,
        typer.Option("--kubeconfig", help="Of the cluster.", show_default="KUBECONFIG's"),
    ] = None,
    context: Context = None,
    directory: Embedded = None,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", help="Look after its jobs only.", show_default="all"),
    ] = None,
    lease_namespace: Annotated[
        str, typer.Option("--lease-namespace", help="Where operators agree on who acts.")
    ] = "kube-system",
) -> None:
    """Run the operator in the foreground. Of several on one cluster, one acts.

    An embedded cluster has its own, unless it was started with --no-operator.
    """
    # Here, because it loads the whole operator: other commands answer faster without.
    from unbroken.controller.driver import OperatorOptions
    from unbroken.controller.election import LeaderTerms

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    file: Path | str | None = kubeconfig
    if kubeconfig is None and (directory is not None or context is None):
        place = find(directory, context)
        file, context = place.kubeconfig, place.context
    options = OperatorOptions(namespace, LeaderTerms(namespace=lease_namespace))
    asyncio.run(_run(file, context, options))


async def _run(file: Path | str | None, context: str | None, options: OperatorOptions) -> None:
    from unbroken.controller.driver import run_operator
    from unbroken.kube.client import connect

    client = connect(file, context=context, manager="unbroken-operator")
    running = asyncio.ensure_future(run_operator(client, None, options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        await client.close()
