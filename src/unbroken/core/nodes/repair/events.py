"""Events, orders and settings of the repairer.

Times are seconds since the epoch, of a clock without jumps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from unbroken.core.nodes.blame import LIMIT
from unbroken.core.tick import Tick
from unbroken.spec.nodes.kinds import (
    BlameEntry,
    CheckKind,
    CheckPhase,
    NodeCheckSpec,
    NodeRecordSpec,
)
from unbroken.spec.nodes.values import Action, Health, NodeRecovery


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A condition of the node that is True."""

    type: str
    reason: str
    at: float
    """Time since when the condition is True."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class RepairNode:
    """A node as the repairer sees it."""

    name: str
    is_ready: bool
    ready_at: float
    """Time since when the node is ready, or not ready."""
    is_silent: bool = False
    """The node is silent: Ready is Unknown, which its own kubelet would never report."""
    is_awaited: bool = False
    """A job waits for the proof that nothing runs on the node, and nobody has given it."""
    is_fence_asked: bool = False
    """True if it has the annotation by which the operator asks for this proof."""
    is_fenced: bool = False
    """True if it has the taint out-of-service, as `PatchNode.is_out_of_service` sets it."""
    boot_id: str = ""
    uid: str = ""
    machine: str = ""
    """Provider ID of the machine that the node says it is."""
    has_joined: bool = True
    """False while a cloud's controller has yet to give the node its provider ID."""
    cluster: str = ""
    """Label `cluster-name`."""
    rack: str = ""
    """Narrowest place in its labels, with the places around it; empty: not known."""
    health: Health | None = None
    """Value of the label; None: it has none, or an unknown one."""
    unknown_health: str = ""
    """Value of the label that is not documented; empty: it is, or there is none."""
    has_taint: bool = False
    """True if it has the taint `node-health-status`."""
    faults: tuple[NodeFault, ...] = ()
    fault_reason: str = ""
    """Label `fault-reasons`."""
    marks: frozenset[str] = frozenset()
    """Labels and annotations of a fault that the node has."""
    order: str = ""
    """Annotation `unbroken.dev/repair`."""
    advice: str = ""
    """Annotation `unbroken.dev/advised-repair`."""
    verified: str = ""
    has_failed_check: bool = False
    """Label `deep-health-check-status` is Failed."""
    is_in_deep_check: bool = False
    """The label is InProgress: the tester of the node also returns it to service."""


class Answer(Enum):
    """Answer of a provider about an order."""

    WORKING = "working"
    DONE = "done"
    """The machine was reset, rebooted or replaced."""
    GONE = "gone"
    """Nothing of the machine runs any more; its replacement is not known."""
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    """The provider cannot do this with this node."""


@dataclass(frozen=True, slots=True)
class OrderStatus:
    """A provider's report about an order."""

    answer: Answer
    text: str = ""
    replacement: str = ""
    """Name of the replacing node, once it is known; empty: the same node, or not known."""


@dataclass(frozen=True, slots=True)
class RepairOrder:
    """A repair as requested from a provider. Requested twice with one `id`, it is done once."""

    node: str
    action: Action
    boot_id: str
    """ID of the boot in which the fault occurred."""
    id: str
    is_tested: bool = False
    """The replacement is tested before it takes pods: it should join with the taint."""


@dataclass(frozen=True, slots=True)
class RepairNodeSeen:
    """A node exists, or has changed."""

    node: RepairNode


@dataclass(frozen=True, slots=True)
class RepairNodeGone:
    """Its object was deleted."""

    name: str


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """A NodeRecord exists, or has changed."""

    name: str
    record: NodeRecordSpec


@dataclass(frozen=True, slots=True)
class RecordGone:
    """A NodeRecord was deleted by somebody."""

    name: str


@dataclass(frozen=True, slots=True)
class PodsSeen:
    """The pods of jobs on a node; those that have ended do not count."""

    node: str
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckSeen:
    """A NodeCheck exists, or has changed."""

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
    recovery: NodeRecovery | None


@dataclass(frozen=True, slots=True)
class Blamed:
    """An incident that this operator saw happen names a node as culprit."""

    node: str
    entry: BlameEntry


@dataclass(frozen=True, slots=True)
class ProviderAnswered:
    """A provider's answer about an order."""

    order: RepairOrder
    status: OrderStatus


@dataclass(frozen=True, slots=True)
class RepairSynced:
    """All objects that existed have been reported; before that, nothing is decided."""


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
    """Write all of a NodeRecord but the appeal, which is the person's. Carry it out before later
    effects."""

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
    is_out_of_service: bool | None = None
    """Set or remove the taint out-of-service, by which Kubernetes removes the node's pods and
    detaches their volumes; None: leave it. A taint that a person has set is never removed."""
    repair_of: str = ""
    """Node whose repair needs this, if it is another one. A record that the repair has ended must
    not be written before the node that replaced it is patched."""


@dataclass(frozen=True, slots=True)
class RecordRepairEvent:
    """Record an event on a node."""

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
    """Ask the provider for the state of an order."""

    order: RepairOrder


@dataclass(frozen=True, slots=True)
class MakeCheck:
    """Create a NodeCheck, if none has the name."""

    node: str
    """Node that the repair is for."""
    name: str
    spec: NodeCheckSpec


@dataclass(frozen=True, slots=True)
class DropRecord:
    """Delete the NodeRecord of a node that has long been gone."""

    node: str


RepairEffect = (
    WriteRecord | DropRecord | PatchNode | RecordRepairEvent | OrderRepair | AskProvider | MakeCheck
)


def queue_of(effect: RepairEffect) -> str:
    """Return the node whose effects an effect is carried out with, in their order."""
    match effect:
        case OrderRepair(order) | AskProvider(order):
            return order.node
        case PatchNode(node, repair_of=name):
            return name or node
        case _:
            return effect.node


ALL_ACTIONS = frozenset({Action.RESET_GPU, Action.REBOOT, Action.REPLACE})


@dataclass(frozen=True, slots=True)
class RepairSettings:
    """Settings of the repairer."""

    recovery: NodeRecovery = NodeRecovery.AUTOMATIC
    """Recovery of nodes whose cluster does not set it."""
    provider: str = "none"
    supports: frozenset[Action] = ALL_ACTIONS
    """Actions that the provider supports."""
    share: float = 0.2
    """Share of all nodes that may be in quarantine or under repair at a time; always one
    (docs/design/nodes.md)."""
    one_per_rack: bool = True
    notes_machines: bool = False
    """The provider finds a machine by the provider ID of the node: keep the first one."""
    is_dry_run: bool = False
    """Record what would be done, do nothing."""
    lost_seconds: float = 600.0
    """Seconds that a node may be not ready before it is repaired (judgement; Cluster API's examples
    of a MachineHealthCheck have 5 min, Karpenter's node repair 30)."""
    awaited_seconds: float = 60.0
    """The same for a silent node that a job waits for (judgement)."""
    drain_seconds: float = 600.0
    """Seconds that jobs have to move off (judgement)."""
    act_seconds: float = 1800.0
    """Seconds after which a reset or a reboot must be over, with the node Ready: bare metal takes
    up to 30 min (reference section 8, item 18)."""
    replace_seconds: float = 3600.0
    probation_seconds: float = 86400.0
    """Seconds after a repair in which a fault counts as the repair's failure (judgement)."""
    tries_max: int = 3
    """Attempts at a rung if the provider fails."""
    backoff_seconds: float = 30.0
    """Seconds before the second attempt at a rung; doubled for each further one."""
    refused_seconds: float = 60.0
    """Seconds before a provider that refused is asked again: a Machine may have been made since, a
    kind installed. Doubled each time (judgement)."""
    refused_seconds_max: float = 3600.0
    ask_seconds: float = 5.0
    """Seconds between two questions to the provider."""
    check: tuple[CheckKind, ...] = (CheckKind.BASIC,)
    """Tests before a repaired node returns; empty: it is not tested."""
    burn_in: tuple[CheckKind, ...] = (CheckKind.BASIC, CheckKind.STRESS)
    """Tests before a node leaves quarantine."""
    check_seconds: float = 7200.0
    check_pending_seconds: float = 900.0
    """Seconds after which a check that has not begun is no longer waited for."""
    blame_limit: float = LIMIT
    flaps_max: int = 3
    """Repairs within `flap_seconds` that end in quarantine (judgement)."""
    flap_seconds: float = 86400.0
