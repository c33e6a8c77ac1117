"""Keys and values on nodes, as HyperPod documents them, and our own.

Source: reference section 2.1; the documentation spells `fault-type` and `fault-reason`, real nodes
have the plurals: those are written, both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

PREFIX = "sagemaker.amazonaws.com/"
HEALTH = PREFIX + "node-health-status"
"""Label, a `Health`; also the key of the taint."""
TAINT_VALUE, TAINT_EFFECT = "Unschedulable", "NoSchedule"
DEEP_CHECK = PREFIX + "deep-health-check-status"
"""Label, a `DeepCheck`."""
FAULT_TYPES, FAULT_REASONS = PREFIX + "fault-types", PREFIX + "fault-reasons"
"""Labels: of the newest fault."""
FAULT_TYPES_ALSO, FAULT_REASONS_ALSO = PREFIX + "fault-type", PREFIX + "fault-reason"
FAULT_DETAILS = PREFIX + "fault-details"
"""Annotation: JSON array of {timestamp, type, reason, message}, newest last."""
CLUSTER_NAME, INSTANCE_GROUP = PREFIX + "cluster-name", PREFIX + "instance-group-name"
COMPUTE_TYPE, COMPUTE_TYPE_VALUE = PREFIX + "compute-type", "hyperpod"
INSTANCE_TYPES = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")

GPU_UNHEALTHY = "NvidiaGPUUnhealthy"
"""Condition of a node whose GPU or driver is at fault: True while it is."""
HARDWARE_UNHEALTHY = "HardwareUnhealthy"
"""Condition of our own for every other fault of a node that has an action."""

REPAIR = "unbroken.dev/repair"
"""Annotation: an `Action` (reset, reboot, replace) that somebody orders whatever NodeRecovery is;
removed when the repair begins."""
ADVICE = "unbroken.dev/advised-repair"
"""Annotation of the daemon: the `Action` that the table of faults names, where the documented label
cannot say it (`reset-gpu` is labelled UnschedulablePendingReboot)."""
VERIFIED = "unbroken.dev/verified"
"""Annotation, set by the repairer: the boot ID (`status.nodeInfo.bootID`), or `check NAME`, after
which the node was found well.  The daemon takes its faults before that back when it changes."""
POWER, FENCE = "unbroken.dev/power", "unbroken.dev/fence"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class Health(Enum):
    """Of a node, as the label says it."""

    SCHEDULABLE = "Schedulable"
    UNSCHEDULABLE = "Unschedulable"
    """A deep check runs, or the node is in quarantine."""
    PENDING_REBOOT = "UnschedulablePendingReboot"
    PENDING_REPLACEMENT = "UnschedulablePendingReplacement"


OLDER_HEALTH: Mapping[str, str] = {
    "UnschedulablePendingReplace": Health.PENDING_REPLACEMENT.value,
}
"""Values of the label in older documents of HyperPod -> the value of today."""


class DeepCheck(Enum):
    """Of the latest deep check."""

    IN_PROGRESS = "InProgress"
    PASSED = "Passed"
    FAILED = "Failed"


class Action(Enum):
    """What a fault calls for, least first."""

    NONE = "none"
    """An event only."""
    RESTART_JOB = "restart-job"
    """The program's fault, or one that a new process is free of: nothing is done to the node."""
    RESET_GPU = "reset-gpu"
    REBOOT = "reboot"
    REPLACE = "replace"


class Recovery(StrEnum):
    """Who repairs (`NodeRecovery` of a cluster)."""

    AUTOMATIC = "Automatic"
    NONE = "None"
    """Nothing is touched: labels, taints and events only; a repair that a person orders is made."""


class NodeProvider(StrEnum):
    """Providers that reset, reboot and replace the machines of nodes (`--node-provider`)."""

    MACHINES = "machines"
    CLUSTER_API = "cluster-api"
    KARPENTER = "karpenter"
    COMMAND = "command"
    NONE = "none"


def health_of(labels: Mapping[str, str]) -> str:
    """Value of a node's label `node-health-status`, as documents of today write it; empty: none."""
    found = labels.get(HEALTH, "")
    return OLDER_HEALTH.get(found, found)


def instance_type_of(labels: Mapping[str, str]) -> str:
    """What a node's labels say of its type; empty: nothing."""
    return next((labels[key] for key in INSTANCE_TYPES if key in labels), "")
