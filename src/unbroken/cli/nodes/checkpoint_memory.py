"""`unbroken checkpoint-memory`: the memory tier of HyperPod's tiered checkpointing on one node."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from unbroken.cli.programs import start_logging, until_stopped
from unbroken.core.checkpoint_memory import PORT, SERVICE
from unbroken.errors import SpecError
from unbroken.foreign_numbers import PORT_MAX, whole_number


def command(
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", metavar="DIR", help="Folder in memory (tmpfs) that keeps the checkpoints."
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host",
            envvar="POD_IP",
            help="Address to listen on. Other nodes must be able to reach it.",
        ),
    ],
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory for checkpoints, such as 64Gi, or a share of the machine's, such as 20%.",
        ),
    ] = "20%",
    service: Annotated[
        str,
        typer.Option("--service", help="Name whose addresses are those of all nodes' servers."),
    ] = SERVICE,
    members: Annotated[
        Path | None,
        typer.Option(
            "--members",
            metavar="DIR",
            help="Folder with a file for each server, named HOST:PORT, in place of --service.",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=PORT_MAX, help="Port.")] = PORT,
) -> None:
    """Serve the memory tier of tiered checkpointing: checkpoints in the memory of two nodes.

    Scripts use it through AWS's package amzn-sagemaker-checkpointing.

    Example: `unbroken checkpoint-memory --folder /dev/shm/checkpoints --host 10.0.0.7 --memory 20%`
    """
    from unbroken.nodes.checkpoint_peers import in_folder, in_service
    from unbroken.nodes.checkpoint_server import MemberOptions, serve_member

    find = in_folder(members) if members is not None else in_service(service, port)
    options = MemberOptions(folder, host, memory_bytes(memory), find, port, service=service)
    start_logging()
    asyncio.run(until_stopped(serve_member(options)))


def memory_bytes(text: str) -> int:
    """Return the bytes of a size or of a share of this machine's memory. Raises SpecError."""
    from unbroken.kube.quantity import parse_quantity

    if text.endswith("%"):
        share = whole_number(text[:-1], 1, 100)
        if share is None:
            raise SpecError(f"--memory: expected 1% to 100%, not {text!r}")
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share // 100
    size = int(parse_quantity(text))
    if size <= 0:
        raise SpecError(f"--memory: expected a size above 0, not {text!r}")
    return size
