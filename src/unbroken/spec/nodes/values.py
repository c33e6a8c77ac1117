"""Values of labels and annotations of nodes, and of options about them; their keys: `spec/keys`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

from unbroken.spec.keys import HEALTH, INSTANCE_TYPES

COMPUTE_TYPE_VALUE = "hyperpod"
TAINT_VALUE, TAINT_EFFECT = "Unschedulable", "NoSchedule"


class Health(Enum):
    """Health of a node, as the label says it."""

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
    """What a fault calls for, least first."""

    NONE = "none"
    """An event only."""
    RESTART_JOB = "restart-job"
    """The program's fault, or one that a new process is free of: nothing is done to the node."""
    RESET_GPU = "reset-gpu"
    REBOOT = "reboot"
    REPLACE = "replace"


class Recovery(StrEnum):
    """Setting that says who repairs (`NodeRecovery` of a cluster)."""

    AUTOMATIC = "Automatic"
    NONE = "None"
    """Nothing is touched: labels, taints and events only; a repair that a person orders is made."""


class NodeProvider(StrEnum):
    """Providers that reset, reboot and replace the machines of nodes (`--node-provider`)."""

    MACHINES = "machines"
    CLUSTER_API = "cluster-api"
    KARPENTER = "karpenter"
    AWS = "aws"
    COMMAND = "command"
    NONE = "none"


def health_of(labels: Mapping[str, str]) -> str:
    """Value of a node's label `node-health-status`, as documents of today write it; empty: none."""
    found = labels.get(HEALTH, "")
    return OLDER_HEALTH.get(found, found)


def instance_type_of(labels: Mapping[str, str]) -> str:
    """What a node's labels say of its type; empty: nothing."""
    return next((labels[key] for key in INSTANCE_TYPES if key in labels), "")
