"""`unbroken node-daemon`: the program that detects faults of a node, for a DaemonSet or by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unbroken.cli.app import option
from unbroken.cli.options import Form, Output
from unbroken.cli.programs import ProgramTarget, start_logging
from unbroken.cli.show import note, print_table
from unbroken.errors import SpecError
from unbroken.log_lines import Log

if TYPE_CHECKING:
    from unbroken.nodes.metrics import MetricsPlace
    from unbroken.nodes.once import Findings

log = Log(__name__)

FOUND = 1


class Metrics(StrEnum):
    """Families of metrics of a node."""

    HOST = "host"
    GPUS = "gpus"


@dataclass(frozen=True, slots=True)
class NodeMetricsFlags:
    """Metrics of the node for Prometheus."""

    metrics_port: int = option(
        "--metrics-port",
        default=0,
        min=0,
        max=65535,
        help="Port of the node's metrics for Prometheus; 0 for none.",
    )
    metrics_host: str = option(
        "--metrics-host", default="127.0.0.1", help="Address where metrics are served."
    )
    metrics: list[Metrics] | None = option(
        "--metrics",
        help="Metrics to serve: host (names of node-exporter) or gpus (names of the DCGM "
        "exporter). Repeat the option for both.",
        show_default="both",
    )

    def place(self) -> MetricsPlace | None:
        """The place where metrics are served; None if they are not."""
        from unbroken.nodes.metrics import MetricsPlace

        if not self.metrics_port:
            return None
        wanted = self.metrics or list(Metrics)
        return MetricsPlace(
            self.metrics_host,
            self.metrics_port,
            has_host=Metrics.HOST in wanted,
            has_gpus=Metrics.GPUS in wanted,
        )


KernelLog = Annotated[
    Path | None,
    typer.Option(
        "--kernel-log",
        metavar="FILE",
        help="File to read in place of the kernel's log.",
        show_default="/dev/kmsg",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=0,
        help="Number of GPUs that the node must have.",
        show_default="as the node says",
    ),
]
Library = Annotated[
    str | None,
    typer.Option(
        "--nvml-library",
        metavar="FILE",
        help="File of the NVML library.",
        show_default="the driver's",
    ),
]


def command(
    node: Annotated[
        str,
        typer.Option("--node", envvar="NODE_NAME", help="Name of the node.", show_default=False),
    ] = "",
    kernel_log: KernelLog = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", metavar="FILE", help="File with changes to the table of faults."),
    ] = None,
    root: Annotated[
        Path,
        typer.Option(
            "--root", metavar="DIR", help="Folder where the node's file system is mounted."
        ),
    ] = Path("/"),
    log_directory: Annotated[
        Path | None,
        typer.Option(
            "--log-directory", metavar="DIR", help="Folder for the agent's log stream as a file."
        ),
    ] = None,
    gpus: Gpus = None,
    nvml_library: Library = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Check once, print the faults, and write nothing to the cluster."
        ),
    ] = False,
    *,
    metrics: NodeMetricsFlags,
    target: ProgramTarget,
    output: Form = Output.TEXT,
) -> None:
    """Detect faults of a node (kernel log, GPUs, disks, network) and record them on its Node.

    With --once: exit status 1 if a fault needs a repair of the node.

    Example: `unbroken node-daemon --once`
    """
    from unbroken.nodes.driver import DaemonOptions, run_daemon
    from unbroken.nodes.tables import read_table

    if once:
        from unbroken.nodes.once import look_once

        findings = asyncio.run(look_once(read_table(table), root, kernel_log, gpus, nvml_library))
        _show(findings, output)
        raise typer.Exit(FOUND if findings.is_faulty else 0)
    if not node:
        raise SpecError("the node is not named: give --node NAME, or set NODE_NAME")
    found_table = read_table(table)  # report problems of the table first
    start_logging()
    for warning in found_table.warnings:
        log.warning("problem in the table of faults", file=table, problem=warning)
    options = DaemonOptions(
        *(node, kernel_log, root, log_directory, gpus, table, nvml_library), metrics=metrics.place()
    )
    target.run("unbroken-node-daemon", lambda client: run_daemon(client, options))


def _show(findings: Findings, output: Output) -> None:
    views: list[dict[str, Any]] = [
        {
            "reason": sign.reason,
            "action": sign.entry.action.value,
            "part": sign.part,
            "title": sign.entry.title,
            "text": sign.text,
        }
        for sign in findings.signs
    ]
    if output.is_data:
        output.print({"findings": views, "unknown": findings.unknown})
        return
    for part, why in findings.unknown.items():
        note(f"{part}: not checked: {why}")
    if not views:
        print("no fault found")
        return
    titles = ("FAULT", "ACTION", "PART", "WHAT")
    print_table(titles, [(v["reason"], v["action"], v["part"], v["text"]) for v in views])
