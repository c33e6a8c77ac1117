"""Options of `unbroken up` and `unbroken operator` about the repair of nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.spec.nodes.keys import NodeProvider, Recovery

NodeRecovery = Annotated[
    Recovery | None,
    typer.Option(
        "--node-recovery",
        help="Repair bad nodes, or touch nothing unless a person orders it; a cluster's own "
        "NodeRecovery comes first.",
        show_default="Automatic",
    ),
]
Provider = Annotated[
    NodeProvider | None,
    typer.Option(
        "--node-provider", help="Who resets, reboots and replaces nodes.", show_default=False
    ),
]
NodeCommand = Annotated[
    str | None,
    typer.Option(
        "--node-command",
        metavar="COMMAND",
        help="Of the provider `command`: called with NODE, ACTION, PROVIDER_ID in its environment, "
        "or as {node}, {action}, ... in its words. Exit status 0: done, 75: still at it.",
        show_default=False,
    ),
]
RepairShare = Annotated[
    float | None,
    typer.Option(
        "--repair-share",
        min=0.0,
        max=1.0,
        help="Share of the nodes that may be under repair at once; one always may.",
        show_default="0.2",
    ),
]
RepairDryRun = Annotated[
    bool | None,
    typer.Option(
        "--repair-dry-run/--no-repair-dry-run",
        help="Say in events and records what would be done to nodes, and do nothing.",
        show_default="--no-repair-dry-run",
    ),
]
