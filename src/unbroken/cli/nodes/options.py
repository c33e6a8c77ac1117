"""Options of `unbroken up` and `unbroken operator` about the repair of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unbroken.cli.app import option
from unbroken.spec.nodes.values import NodeProvider, Recovery

if TYPE_CHECKING:
    from unbroken.operator.nodes.repair import RepairOptions

DEFAULT_SHARE = 0.2
"""Share of the nodes that `unbroken operator` repairs at once (docs/design/nodes.md)."""
RESUME_HELP = (
    "Restarts of a PyTorchJob, TrainJob, RayJob or RayCluster without annotations of auto-resume "
    "after losses of pods and nodes; 0: only jobs with annotations restart."
)


@dataclass(frozen=True, slots=True)
class RepairFlags:
    """Options of the repair of nodes; None if not given."""

    node_recovery: Recovery | None = option(
        "--node-recovery",
        help="Automatic: repair faulty nodes. None: repair only on a user's order. The "
        "NodeRecovery of a cluster overrides it.",
        show_default="Automatic",
    )
    node_provider: NodeProvider | None = option(
        "--node-provider",
        help="Provider that resets, reboots and replaces nodes.",
        show_default=False,
    )
    node_command: str | None = option(
        "--node-command",
        metavar="COMMAND",
        help="Command of the provider `command`. It gets NODE, ACTION and PROVIDER_ID in its "
        "environment, or as {node}, {action}, ... in its words. Exit status 0: done, 75: in "
        "progress.",
        show_default=False,
    )
    repair_share: float | None = option(
        "--repair-share",
        min=0.0,
        max=1.0,
        help="Largest share of the nodes under repair at a time; one node is always allowed.",
        show_default="0.2",
    )
    repair_dry_run: bool | None = option(
        "--repair-dry-run/--no-repair-dry-run",
        help="Only report in events and records what the repair would do.",
        show_default="--no-repair-dry-run",
    )

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
