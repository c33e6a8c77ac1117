"""`unbroken node-daemon`: the program that watches over one node, for a DaemonSet or by hand."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unbroken.cli.options import Form, Output
from unbroken.cli.programs import ProgramTarget, start_logging
from unbroken.cli.show import note, print_json, print_table
from unbroken.errors import SpecError

if TYPE_CHECKING:
    from unbroken.nodes.once import Findings

FOUND = 1
Library = Annotated[
    str | None,
    typer.Option("--nvml-library", metavar="FILE", help="NVML.", show_default="the driver's"),
]


def command(
    node: Annotated[
        str,
        typer.Option("--node", envvar="NODE_NAME", help="The node's name.", show_default=False),
    ] = "",
    kernel_log: Annotated[
        Path | None,
        typer.Option(
            "--kernel-log",
            metavar="FILE",
            help="A file that stands for the kernel's log.",
            show_default="/dev/kmsg",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", metavar="FILE", help="Changes to the table of faults."),
    ] = None,
    root: Annotated[
        Path, typer.Option("--root", help="Where the node's file system is mounted.")
    ] = Path("/"),
    log_directory: Annotated[
        Path | None,
        typer.Option("--log-directory", help="Write the agent's log stream as a file below it."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=0, help="GPUs that must be there.", show_default="as the node says"
        ),
    ] = None,
    nvml_library: Library = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Look once, say what is found, and write nothing."),
    ] = False,
    *,
    target: ProgramTarget,
    output: Form = Output.TEXT,
) -> None:
    """Watch over a node: kernel log, GPUs, disks, network. What is wrong is written on the Node.

    With --once, ends with 1 where something calls for a repair of the node.
    """
    from unbroken.nodes.driver import DaemonOptions, run_daemon
    from unbroken.nodes.tables import read_table

    if once:
        from unbroken.nodes.once import look_once

        found = asyncio.run(look_once(read_table(table), root, kernel_log, gpus, nvml_library))
        _show(found, output)
        raise typer.Exit(FOUND if found.is_faulty else 0)
    if not node:
        raise SpecError("which node? give --node NAME, or set NODE_NAME")
    found_table = read_table(table)  # what is wrong with it is told before anything else is done
    start_logging()
    for warning in found_table.warnings:
        logging.getLogger(__name__).warning('table=%s warning="%s"', table, warning)
    options = DaemonOptions(node, kernel_log, root, log_directory, gpus, table, nvml_library)
    target.run("unbroken-node-daemon", lambda client: run_daemon(client, options))


def _show(found: Findings, output: Output) -> None:
    views: list[dict[str, Any]] = [
        {
            "reason": sign.reason,
            "action": sign.entry.action.value,
            "part": sign.part,
            "title": sign.entry.title,
            "text": sign.text,
        }
        for sign in found.signs
    ]
    if output is Output.JSON:
        print_json({"findings": views, "unknown": found.unknown})
        return
    for part, why in found.unknown.items():
        note(f"nothing is known of the {part}: {why}")
    if not views:
        print("no fault found")
        return
    titles = ("FAULT", "ACTION", "PART", "WHAT")
    print_table(titles, [(v["reason"], v["action"], v["part"], v["text"]) for v in views])
