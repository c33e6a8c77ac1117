"""`unbroken down`: stop the local cluster and every process of its pods."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from typing import Annotated

import typer

from unbroken.cli.options import Directory
from unbroken.cli.place import DEFAULT, resolve
from unbroken.local import state

NAMED_MAX = 10
"""Names of remaining files that are printed, at most."""


def command(
    directory: Directory = DEFAULT,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also delete the objects, logs and volumes.")
    ] = False,
) -> None:
    """Stop the local cluster and its pods. Its objects stay in DIR unless --purge is given.

    Example: `unbroken down --purge`
    """
    paths = state.Paths(resolve(directory))
    result = state.running(paths)
    if result is not None:
        _end(result.pid)
    elif not paths.directory.is_dir():
        print(f"no cluster in {paths.directory}")
        return
    from unbroken.local.machines.scripts import stop_scripts
    from unbroken.local.node import stop_pods  # slow to load

    # A cluster that was killed has left its pods running; a stopped cluster has no pods.
    asyncio.run(stop_scripts(paths.nodes))
    asyncio.run(stop_pods(paths.nodes))
    paths.state.unlink(missing_ok=True)
    print(f"stopped the cluster of {paths.directory}" if result else "no cluster was running")
    if purge:
        _purge(paths)


def _purge(paths: state.Paths) -> None:
    from unbroken.local import folders, networks
    from unbroken.local.checkpoint_memory import discard_memory

    left = folders.purge(paths)
    discard_memory(paths.directory)
    if left:
        names = ", ".join(left[:NAMED_MAX]) + (", ..." if len(left) > NAMED_MAX else "")
        print(f"deleted the cluster of {paths.directory}; left there: {names}")
        return
    networks.release(paths.directory)
    print(f"deleted {paths.directory}")


def _end(pid: int) -> None:
    """Send SIGTERM and wait for the end; the process bounds the time of its own shutdown."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        select.select([handle], [], [])
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
