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
    memory_file: Annotated[
        Path | None,
        typer.Option(
            "--memory-file",
            metavar="FILE",
            help="File with such a size or share, in place of --memory. Changes are followed.",
        ),
    ] = None,
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

    def capacity() -> int:
        return memory_bytes(memory) if memory_file is None else memory_in(memory_file)

    options = MemberOptions(folder, host, capacity, find, port, service=service)
    start_logging()
    asyncio.run(until_stopped(serve_member(options)))


def memory_in(file: Path) -> int:
    """Return the bytes of the size or share that a file holds. Raises SpecError."""
    try:
        text = file.read_text().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"--memory-file: cannot read {file}: {reason}") from error
    return memory_bytes(text, f"--memory-file {file}")


def memory_bytes(text: str, place: str = "--memory") -> int:
    """Return the bytes of a size or of a share of this machine's memory. Raises SpecError."""
    from unbroken.kube.quantity import QuantityError, parse_quantity

    share = whole_number(text[:-1], 1, 100) if text.endswith("%") else None
    if share is not None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share // 100
    try:
        size = int(parse_quantity(text))
    except QuantityError:
        size = 0
    if size <= 0:
        raise SpecError(
            f"{place}: expected a size above 0, such as 64Gi, or a share of the memory from 1% to "
            f"100%, not {text[:40]!r}"
        )
    return size
