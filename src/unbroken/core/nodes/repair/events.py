"""The vocabulary of the repairer: what it is told, what it orders, how it is set.

Times are seconds since the epoch, of a clock that goes on evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from unbroken.core.nodes.blame import LIMIT
from unbroken.core.tick import Tick
from unbroken.spec.nodes.check import CheckKind, CheckPhase, NodeCheckSpec
from unbroken.spec.nodes.record import BlameEntry, NodeRecordSpec
from unbroken.spec.nodes.values import Action, Health, Recovery


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A condition of the node that is True."""

    type: str
    reason: str
    at: float
    """Since when."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class RepairNode:
    """A node as the repairer sees it."""

    name: str
    is_ready: bool
    ready_at: float
    """Since when it is, or is not."""
    is_silent: bool = False
    """Nothing is heard of it: Ready is Unknown, which its kubelet would never say."""
    boot_id: str = ""
    cluster: str = ""
    """Label `cluster-name`."""
    rack: str = ""
    """Narrowest place that its labels name, with what is around it; empty: not known."""
    health: Health | None = None
    """Value of the label; None: there is none, or nothing known."""
    unknown_health: str = ""
    """Value of the label that no document knows; empty: it is known, or there is none."""
    has_taint: bool = False
    """True if it has the taint `node-health-status`."""
    faults: tuple[NodeFault, ...] = ()
    fault_reason: str = ""
    """Label `fault-reasons`."""
    marks: frozenset[str] = frozenset()
    """Which of the labels and annotations that tell of a fault it has."""
    order: str = ""
    """Annotation `unbroken.dev/repair`."""
    advice: str = ""
    """Annotation `unbroken.dev/advised-repair`."""
    verified: str = ""
    has_failed_check: bool = False
    """Label `deep-health-check-status` is Failed."""
    is_in_deep_check: bool = False
    """It is InProgress: who tests the node returns it, too."""


class Answer(Enum):
    """Answer of a provider about an order."""

    WORKING = "working"
    DONE = "done"
    """The machine was reset, rebooted or replaced."""
    GONE = "gone"
    """Nothing of the machine runs any more; what takes its place is not known."""
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    """It can do no such thing with this node."""


@dataclass(frozen=True, slots=True)
class OrderStatus:
    """What a provider says of an order."""

    answer: Answer
    text: str = ""
    replacement: str = ""
    """Name of the node that takes the place, once it is known; empty: the same, or not known."""


@dataclass(frozen=True, slots=True)
class RepairOrder:
    """A repair as a provider is asked for it.  Asked twice with one `id`, it is done once."""

    node: str
    action: Action
    boot_id: str
    """ID of the boot that it is about."""
    id: str
    is_tested: bool = False
    """What takes the node's place is tested before it takes pods: it should join with the taint."""


@dataclass(frozen=True, slots=True)
class RepairNodeSeen:
    """A node is there, or has changed."""

    node: RepairNode


@dataclass(frozen=True, slots=True)
class RepairNodeGone:
    """Its object was deleted."""

    name: str


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """A NodeRecord is there, or has changed."""

    name: str
    record: NodeRecordSpec


@dataclass(frozen=True, slots=True)
class RecordGone:
    """Somebody has deleted a NodeRecord."""

    name: str


@dataclass(frozen=True, slots=True)
class PodsSeen:
    """Which pods of jobs a node has; those that have ended count no more."""

    node: str
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckSeen:
    """A NodeCheck is there, or has changed."""

    name: str
    phase: CheckPhase
    message: str = ""
    faulty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckGone:
    """A NodeCheck was deleted."""

    name: str


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """NodeRecovery of a cluster; None: the cluster is gone."""

    name: str
    recovery: Recovery | None


@dataclass(frozen=True, slots=True)
class Blamed:
    """An incident that this operator saw happen names a node as culprit."""

    node: str
    entry: BlameEntry


@dataclass(frozen=True, slots=True)
class ProviderAnswered:
    """What a provider says of an order."""

    order: RepairOrder
    standing: OrderStatus


@dataclass(frozen=True, slots=True)
class RepairSynced:
    """All that there was has been told; before that, nothing is decided."""


RepairEvent = (
    RepairNodeSeen
    | RepairNodeGone
    | RecordSeen
    | RecordGone
    | PodsSeen
    | CheckSeen
    | CheckGone
    | ClusterSeen
    | Blamed
    | ProviderAnswered
    | RepairSynced
    | Tick
)


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write all of a NodeRecord but the appeal, which is the person's.  Before what follows."""

    node: str
    record: NodeRecordSpec


@dataclass(frozen=True, slots=True)
class PatchNode:
    """Change labels and annotations of a node (None: remove), and its taint."""

    node: str
    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    taint: bool | None = None
    """Set or remove the taint of `node-health-status`; None: leave it."""


@dataclass(frozen=True, slots=True)
class TellNode:
    """An event on a node."""

    node: str
    reason: str
    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class OrderRepair:
    """Ask the provider for a repair."""

    order: RepairOrder


@dataclass(frozen=True, slots=True)
class AskProvider:
    """Ask the provider how an order stands."""

    order: RepairOrder


@dataclass(frozen=True, slots=True)
class MakeCheck:
    """Create a NodeCheck, where there is none of the name."""

    node: str
    """Node that the repair is for."""
    name: str
    spec: NodeCheckSpec


@dataclass(frozen=True, slots=True)
class DropRecord:
    """Delete the NodeRecord of a node that has long been gone."""

    node: str


RepairEffect = (
    WriteRecord | DropRecord | PatchNode | TellNode | OrderRepair | AskProvider | MakeCheck
)

ALL_ACTIONS = frozenset({Action.RESET_GPU, Action.REBOOT, Action.REPLACE})


@dataclass(frozen=True, slots=True)
class RepairSettings:
    """How repairs are made."""

    recovery: Recovery = Recovery.AUTOMATIC
    """Recovery of nodes whose cluster says nothing."""
    provider: str = "none"
    supports: frozenset[Action] = ALL_ACTIONS
    """What the provider can do at all."""
    share: float = 0.2
    """Share of all nodes that may be in quarantine or under repair at a time; always one
    (docs/design/nodes.md)."""
    one_per_rack: bool = True
    is_dry_run: bool = False
    """Say what would be done, do nothing."""
    lost_seconds: float = 600.0
    """A node that is not ready for so long is repaired (judgement; Cluster API's examples of a
    MachineHealthCheck have 5 min, Karpenter's node repair 30)."""
    drain_seconds: float = 600.0
    """Jobs have so long to move off (judgement)."""
    act_seconds: float = 1800.0
    """A reset or a reboot must be over by then, the node Ready: bare metal takes up to 30 min
    (reference section 8, item 18)."""
    replace_seconds: float = 3600.0
    probation_seconds: float = 86400.0
    """A fault so soon after a repair is the repair's failure (judgement)."""
    tries_max: int = 3
    """Attempts at a rung where the provider fails."""
    backoff_seconds: float = 30.0
    """Before the second try of a rung; doubled for each further one."""
    refused_seconds: float = 60.0
    """Before a provider is asked again that could not do it: a Machine may have been made since, a
    kind installed.  Doubled each time (judgement)."""
    refused_seconds_max: float = 3600.0
    ask_seconds: float = 5.0
    """Between two questions to the provider."""
    check: tuple[CheckKind, ...] = (CheckKind.BASIC,)
    """Before a repaired node returns; empty: it is not tested."""
    burn_in: tuple[CheckKind, ...] = (CheckKind.BASIC, CheckKind.STRESS)
    """Before a node leaves quarantine."""
    check_seconds: float = 7200.0
    check_pending_seconds: float = 900.0
    """A check that nobody has begun by then is not waited for."""
    blame_limit: float = LIMIT
    flaps_max: int = 3
    """Repairs within `flap_seconds` that end in quarantine (judgement)."""
    flap_seconds: float = 86400.0
