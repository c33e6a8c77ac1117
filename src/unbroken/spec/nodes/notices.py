"""Notices that a node will be lost: their form on a Node, and the time that each leaves.

Jobs leave such a node before it goes (`core.job.moves`). A new notice is a row of `NOTICES`.
HyperPod's labels and conditions of faulty nodes are no notices: jobs leave these nodes at once. Its
health label without a fault is one: somebody has ordered a repair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from unbroken.foreign_numbers import INT64_MAX, finite_number
from unbroken.spec import keys
from unbroken.spec.nodes.values import OLDER_HEALTH, DeepCheck, Health
from unbroken.spec.times import time_seconds

NO_DEADLINE = "none"
"""Value of the annotation `unbroken.dev/drain` of a node without a deadline."""
TEXT_CHARACTERS = 200
ORDER_SECONDS = 120.0
"""Seconds from the order of a repair until its jobs must be gone (judgement: as long as a Spot
instance of AWS has)."""
FAULT_LABELS = (
    *(keys.FAULT_TYPES, keys.FAULT_REASONS),
    *(keys.FAULT_TYPES_ALSO, keys.FAULT_REASONS_ALSO),
)
"""Labels of a node on which a fault was found."""


class Where(Enum):
    """The part of a Node that has a notice."""

    UNSCHEDULABLE = "spec.unschedulable"
    TAINT = "taint"
    LABEL = "label"
    ANNOTATION = "annotation"
    CONDITION = "condition"


class Clock(Enum):
    """Form of the time in a notice's value."""

    NONE = "none"
    """The value has no time."""
    UNIX = "seconds since the epoch"
    RFC_3339 = "RFC 3339"


@dataclass(frozen=True, slots=True)
class NoticeKind:
    """One kind of notice."""

    name: str
    """One word, for people and for metrics."""
    where: Where
    key: str
    meaning: str
    """Completes the sentence "the job leaves the node because ..."."""
    value: str = ""
    """Value of the taint, label, annotation or condition; empty: any."""
    seconds: float | None = None
    """Seconds from the notice to the loss of the node; None: not limited, or in the value."""
    clock: Clock = Clock.NONE
    is_order: bool = False
    """Somebody waits for the node, which works: a notice only without a fault of the node."""


class ConditionFacts(NamedTuple):
    """A condition of a Node."""

    status: str
    since: float | None
    """Its last transition, in seconds since the epoch; None: unknown."""


@dataclass(frozen=True, slots=True)
class NoticedNode:
    """The parts of a Node that may have notices."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: Mapping[str, str] = field(default_factory=dict)
    """Values of taints by key."""
    conditions: Mapping[str, ConditionFacts] = field(default_factory=dict)
    is_unschedulable: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice that was found on a node."""

    name: str
    text: str
    """Why the job leaves the node, for people."""
    deadline: float | None = None
    """Time at which the node goes, in seconds since the epoch; None: not known."""
    seconds: float | None = None
    """Seconds from the first sight of the notice to the loss of the node, if no deadline is known;
    None: not limited."""
    is_order: bool = False
    """Somebody waits for the node: after the deadline no pod stays there, whatever it does."""


NOTICES = (
    NoticeKind(
        "Drain",
        Where.ANNOTATION,
        keys.DRAIN,
        "`unbroken nodes drain` was called for it",
        clock=Clock.RFC_3339,
    ),
    # A reclaimed Spot VM gets 30 s (cloud.google.com/compute/docs/instances/spot); GKE sets the
    # taint before host maintenance too.
    NoticeKind(
        "GkeTermination",
        Where.TAINT,
        "cloud.google.com/impending-node-termination",
        "GKE is about to stop it",
        seconds=30.0,
    ),
    # Azure scheduled events, as conditions by AKS's node-problem-detector: at least 30 s before a
    # preemption, 5 minutes before a termination, 15 minutes before a reboot or redeployment
    # (learn.microsoft.com/azure/virtual-machines/linux/scheduled-events). FreezeScheduled is not
    # here: such a pause takes a few seconds and the node stays.
    NoticeKind(
        "AksPreempt",
        Where.CONDITION,
        "PreemptScheduled",
        "Azure is about to reclaim it",
        "True",
        seconds=30.0,
    ),
    NoticeKind(
        "AksTerminate",
        Where.CONDITION,
        "TerminateScheduled",
        "Azure is about to delete it",
        "True",
        seconds=300.0,
    ),
    NoticeKind(
        "AksReboot",
        Where.CONDITION,
        "RebootScheduled",
        "Azure is about to reboot it",
        "True",
        seconds=900.0,
    ),
    NoticeKind(
        "AksRedeploy",
        Where.CONDITION,
        "RedeployScheduled",
        "Azure is about to move it to other hardware",
        "True",
        seconds=900.0,
    ),
    # Taints of aws-node-termination-handler (README, TAINT_NODE). A spot interruption notice comes
    # 2 minutes before (docs.aws.amazon.com/AWSEC2: Spot Instance interruption notices). The other
    # taints have no time.
    NoticeKind(
        "AwsSpot",
        Where.TAINT,
        "aws-node-termination-handler/spot-itn",
        "AWS is about to reclaim the spot instance",
        seconds=120.0,
    ),
    NoticeKind(
        "AwsMaintenance",
        Where.TAINT,
        "aws-node-termination-handler/scheduled-maintenance",
        "AWS has scheduled maintenance of the instance",
    ),
    NoticeKind(
        "AwsScaleIn",
        Where.TAINT,
        "aws-node-termination-handler/asg-lifecycle-termination",
        "its Auto Scaling group is about to terminate the instance",
    ),
    NoticeKind(
        "AwsRebalance",
        Where.TAINT,
        "aws-node-termination-handler/rebalance-recommendation",
        "AWS is likely to reclaim the spot instance",
    ),
    # Unix time of the maintenance (cloud.google.com/kubernetes-engine/docs: Manage disruptions).
    NoticeKind(
        "GkeMaintenance",
        Where.LABEL,
        "cloud.google.com/scheduled-maintenance-time",
        "Google has scheduled maintenance of its host",
        clock=Clock.UNIX,
    ),
    # Both drain through evictions, which the job's PodDisruptionBudget refuses until it has moved.
    # Before v1 Karpenter's taint was karpenter.sh/disruption (karpenter.sh/docs: Disruption).
    # DeletionCandidateOfClusterAutoscaler is not here: it marks a candidate, and evicts nothing.
    NoticeKind(
        "Karpenter",
        Where.TAINT,
        "karpenter.sh/disrupted",
        "Karpenter is about to remove it",
    ),
    NoticeKind(
        "Karpenter",
        Where.TAINT,
        "karpenter.sh/disruption",
        "Karpenter is about to remove it",
    ),
    NoticeKind(
        "ClusterAutoscaler",
        Where.TAINT,
        "ToBeDeletedByClusterAutoscaler",
        "the cluster autoscaler is about to remove it",
    ),
    *(
        NoticeKind(
            "OrderedRepair",
            Where.LABEL,
            keys.HEALTH,
            f"its {work} is ordered",
            value,
            seconds=ORDER_SECONDS,
            is_order=True,
        )
        for value, work in (
            (Health.PENDING_REBOOT.value, "reboot"),
            (Health.PENDING_REPLACEMENT.value, "replacement"),
            *((older, "replacement") for older in OLDER_HEALTH),
        )
    ),
    # States of a node that NVSentinel takes out (NVIDIA/NVSentinel, node drainer).
    NoticeKind(
        "NVSentinel",
        Where.LABEL,
        "dgxc.nvidia.com/nvsentinel-state",
        "NVSentinel has found it faulty",
        "quarantined",
    ),
    NoticeKind(
        "NVSentinel",
        Where.LABEL,
        "dgxc.nvidia.com/nvsentinel-state",
        "NVSentinel has found it faulty",
        "draining",
    ),
    # Permanent problems of node-problem-detector (its config/*.json): the node still runs.
    *(
        NoticeKind(name, Where.CONDITION, name, f"node-problem-detector reports {name}", "True")
        for name in (
            "KernelDeadlock",
            "ReadonlyFilesystem",
            "XfsShutdown",
            "CperHardwareErrorFatal",
        )
    ),
    # Conditions of the EKS node monitoring agent, False on a node with a fault. EKS's node auto
    # repair, where it is on, waits so long before it reboots or replaces the node.
    *(
        NoticeKind(
            f"Eks{name}",
            Where.CONDITION,
            name,
            f"the node monitoring agent of EKS reports {name} False",
            "False",
            seconds=seconds,
        )
        for name, seconds in (
            ("AcceleratedHardwareReady", 600.0),
            ("KernelReady", 1800.0),
            ("NetworkingReady", 1800.0),
            ("StorageReady", 1800.0),
            ("ContainerRuntimeReady", 1800.0),
        )
    ),
    # Last: a program that cordons a node often gives its reason elsewhere. `kubectl drain` cordons
    # first.
    NoticeKind("Cordon", Where.UNSCHEDULABLE, "", "it is cordoned"),
)
"""Every kind. If a node has several notices, the one with the earliest deadline counts, else the
first."""


def find_notice(node: NoticedNode) -> Notice | None:
    """Return the most urgent notice on a node; None: there is none."""
    notices = [notice for kind in NOTICES if (notice := _find(kind, node)) is not None]
    if not notices:
        return None
    return replace(min(notices, key=_urgency), is_order=any(one.is_order for one in notices))


def _has_fault(labels: Mapping[str, str]) -> bool:
    """True if the labels of a node say that a fault was found on it."""
    has_failed = labels.get(keys.DEEP_CHECK) == DeepCheck.FAILED.value
    return has_failed or any(labels.get(key) for key in FAULT_LABELS)


def _urgency(notice: Notice) -> tuple[bool, float]:
    due = notice.deadline if notice.deadline is not None else notice.seconds
    return (due is None, due or 0.0)


def _find(kind: NoticeKind, node: NoticedNode) -> Notice | None:
    value, since = _read(kind, node)
    if value is None or (kind.value and value != kind.value):
        return None
    if kind.is_order and _has_fault(node.labels):
        return None
    deadline = _time(kind.clock, value)
    if kind.seconds is not None and since is not None:
        deadline = since + kind.seconds
    seconds = kind.seconds if deadline is None else None
    return Notice(kind.name, kind.meaning[:TEXT_CHARACTERS], deadline, seconds, kind.is_order)


def _read(kind: NoticeKind, node: NoticedNode) -> tuple[str | None, float | None]:
    """Return the value, None if the node has none, and its time."""
    match kind.where:
        case Where.UNSCHEDULABLE:
            return ("true" if node.is_unschedulable else None), None
        case Where.TAINT:
            return node.taints.get(kind.key), None
        case Where.LABEL:
            return node.labels.get(kind.key), None
        case Where.ANNOTATION:
            return node.annotations.get(kind.key), None
        case Where.CONDITION:
            condition = node.conditions.get(kind.key)
            return (None, None) if condition is None else (condition.status, condition.since)


def _time(clock: Clock, value: str) -> float | None:
    """Return the time in a value; None: it has none that can be read."""
    try:
        match clock:
            case Clock.UNIX:
                return finite_number(value, 0.0, INT64_MAX)
            case Clock.RFC_3339:
                return time_seconds(value)
            case Clock.NONE:
                return None
    except (ValueError, OverflowError):
        return None
