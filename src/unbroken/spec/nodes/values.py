"""Values of labels and annotations of nodes, and of options about them; their keys: `spec/keys`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

from unbroken.spec.keys import HEALTH, INSTANCE_TYPES

COMPUTE_TYPE_VALUE = "hyperpod"
TAINT_VALUE, TAINT_EFFECT = "Unschedulable", "NoSchedule"


class Health(Enum):
    """Health of a node, in the words of the label."""

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
    """State of the latest deep check."""

    IN_PROGRESS = "InProgress"
    PASSED = "Passed"
    FAILED = "Failed"


class Action(Enum):
    """Action that a fault requires, least first."""

    NONE = "none"
    """An event only."""
    RESTART_JOB = "restart-job"
    """The fault of the program, or one that a new process does not have: nothing is done to the
    node."""
    RESET_GPU = "reset-gpu"
    REBOOT = "reboot"
    REPLACE = "replace"


class NodeRecovery(StrEnum):
    """Setting of who repairs nodes (`NodeRecovery` of a cluster)."""

    AUTOMATIC = "Automatic"
    NONE = "None"
    """Nodes stay untouched: labels, taints and events only; a repair that a person orders is
    made."""


class NodeProvider(StrEnum):
    """Providers that reset, reboot and replace the machines of nodes (`--node-provider`)."""

    MACHINES = "machines"
    CLUSTER_API = "cluster-api"
    KARPENTER = "karpenter"
    AWS = "aws"
    COMMAND = "command"
    NONE = "none"


def health_of(labels: Mapping[str, str]) -> str:
    """Return the value of a node's label `node-health-status`, in today's words; empty: none."""
    label = labels.get(HEALTH, "")
    return OLDER_HEALTH.get(label, label)


def instance_type_of(labels: Mapping[str, str]) -> str:
    """Return the instance type in a node's labels; empty: none."""
    return next((labels[key] for key in INSTANCE_TYPES if key in labels), "")
