"""Options of `unbroken up` and `unbroken operator` about the repair of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.spec.nodes.keys import NodeProvider, Recovery

if TYPE_CHECKING:
    from unbroken.operator.nodes.repair import RepairOptions

DEFAULT_SHARE = 0.2
"""Share of the nodes that `unbroken operator` repairs at once (docs/design/nodes.md)."""


@dataclass(frozen=True, slots=True)
class RepairFlags:
    """Options of the repair of nodes; None if not given."""

    node_recovery: Annotated[
        Recovery | None,
        typer.Option(
            "--node-recovery",
            help="Automatic: repair faulty nodes. None: repair only on a user's order. The "
            "NodeRecovery of a cluster overrides it.",
            show_default="Automatic",
        ),
    ] = None
    node_provider: Annotated[
        NodeProvider | None,
        typer.Option(
            "--node-provider",
            help="Provider that resets, reboots and replaces nodes.",
            show_default=False,
        ),
    ] = None
    node_command: Annotated[
        str | None,
        typer.Option(
            "--node-command",
            metavar="COMMAND",
            help="Command of the provider `command`. It gets NODE, ACTION and PROVIDER_ID in its "
            "environment, or as {node}, {action}, ... in its words. Exit status 0: done, 75: in "
            "progress.",
            show_default=False,
        ),
    ] = None
    repair_share: Annotated[
        float | None,
        typer.Option(
            "--repair-share",
            min=0.0,
            max=1.0,
            help="Largest share of the nodes under repair at a time; one node is always allowed.",
            show_default="0.2",
        ),
    ] = None
    repair_dry_run: Annotated[
        bool | None,
        typer.Option(
            "--repair-dry-run/--no-repair-dry-run",
            help="Only report in events and records what the repair would do.",
            show_default="--no-repair-dry-run",
        ),
    ] = None

    def options(self) -> RepairOptions:
        """The options for an operator of its own; SpecError if they are invalid."""
        from unbroken.operator.nodes.repair import options_of

        return options_of(
            self.node_recovery or Recovery.AUTOMATIC,
            self.node_provider or NodeProvider.NONE,
            self.node_command or "",
            DEFAULT_SHARE if self.repair_share is None else self.repair_share,
            bool(self.repair_dry_run),
        )
