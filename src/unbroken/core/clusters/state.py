"""The stored state of a cluster besides its spec: groups, instances, operations, events.

It is `status.state` of the Cluster object. Names of phases are SageMaker's (API 2017-07-24).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from unbroken.spec.nodes.kinds import CheckKind
from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import PreciseTime as Time
from unbroken.spec.schema.fields import read_record, write_record

EVENTS_MAX = 500
"""Events that are kept; about as many are listed (reference section 1.5)."""
OPERATIONS_MAX = 100


class ClusterPhase(Enum):
    """ClusterStatus."""

    CREATING = "Creating"
    DELETING = "Deleting"
    FAILED = "Failed"
    IN_SERVICE = "InService"
    ROLLING_BACK = "RollingBack"
    SYSTEM_UPDATING = "SystemUpdating"
    UPDATING = "Updating"


class GroupPhase(Enum):
    """InstanceGroupStatus."""

    CREATING = "Creating"
    IN_SERVICE = "InService"
    UPDATING = "Updating"
    FAILED = "Failed"
    DEGRADED = "Degraded"
    SYSTEM_UPDATING = "SystemUpdating"
    DELETING = "Deleting"


class InstancePhase(Enum):
    """ClusterInstanceStatus."""

    PENDING = "Pending"
    RUNNING = "Running"
    FAILURE = "Failure"
    SHUTTING_DOWN = "ShuttingDown"
    DEEP_CHECK = "DeepHealthCheckInProgress"


class OperationType(Enum):
    """ClusterOperationType."""

    SCALING = "Scaling"
    DEEP_CHECK = "DeepHealthCheck"


class OperationStatus(Enum):
    """ClusterOperationStatus."""

    IN_PROGRESS = "InProgress"
    SUPERSEDED = "Superseded"
    DONE = "Done"


class Resource(Enum):
    """ClusterEventResourceType."""

    CLUSTER = "Cluster"
    GROUP = "InstanceGroup"
    INSTANCE = "Instance"


class Level(Enum):
    """ClusterEventLevel."""

    INFO = "Info"
    WARN = "Warn"
    ERROR = "Error"


@dataclass(frozen=True, slots=True)
class GroupState:
    """An instance group."""

    name: str
    phase: GroupPhase = GroupPhase.CREATING
    target: tuple[str, ...] = ()
    """Requested logical ids, as last seen."""
    settled: tuple[str, ...] = ()
    """Logical ids of the last time when all instances ran: a rollback returns to them."""
    current: int = 0
    """Instances that are up."""
    minimum: int = 0
    message: str = ""
    short_since: Time | None = None
    """Time since when fewer instances than the minimum are up."""


@dataclass(frozen=True, slots=True)
class InstanceState:
    """A place in a group, by its logical id."""

    logical_id: str
    group: str
    machine: str = ""
    """Name of the machine in this place, or of the last one."""
    phase: InstancePhase = InstancePhase.PENDING
    message: str = ""
    since: Time = 0.0
    """Time at which the phase was reached."""
    has_run: bool = False
    """True if this machine has been Running."""
    asked: str = ""
    """NodeCheck that was requested before the node takes pods."""
    concluded: str = ""
    """NodeCheck whose result was evaluated."""


@dataclass(frozen=True, slots=True)
class ScalingDetail:
    """Scaling of one group within an operation."""

    group: str
    status: OperationStatus = OperationStatus.IN_PROGRESS
    original_current: int = 0
    original_target: int = 0
    original_minimum: int = 0
    desired_target: int = 0
    desired_minimum: int = 0


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Instances of one group to be checked on demand; no ids: all."""

    group: str
    kinds: tuple[CheckKind, ...]
    instance_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperationState:
    """An operation on the cluster."""

    id: str
    type: OperationType
    created_at: Time
    status: OperationStatus = OperationStatus.IN_PROGRESS
    scaling: tuple[ScalingDetail, ...] = ()
    checks: tuple[CheckRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class EventState:
    """An event of the cluster."""

    id: str
    at: Time
    resource: Resource
    text: str
    level: Level = Level.INFO
    group: str = ""
    instance: str = ""
    operation: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """An EventMetadata of the API."""


@dataclass(frozen=True, slots=True)
class SoftwareUpdate:
    """Every machine of some groups is replaced by a new one, a batch at a time."""

    started_at: Time
    groups: tuple[str, ...]
    pending: tuple[str, ...]
    """Old machines that still exist."""
    batch: int = 1
    ordered: tuple[str, ...] = ()
    """Pending ones whose replacement was ordered."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The complete state."""

    sequence: int = 0
    """Events and operations so far; their ids are made of it."""
    groups: tuple[GroupState, ...] = ()
    instances: tuple[InstanceState, ...] = ()
    operations: tuple[OperationState, ...] = ()
    """Oldest first, at most OPERATIONS_MAX."""
    events: tuple[EventState, ...] = ()
    """Oldest first, at most EVENTS_MAX."""
    update: SoftwareUpdate | None = None
    updated: tuple[str, ...] = ()
    """Groups whose latest software update has ended."""

    def group(self, name: str) -> GroupState | None:
        """The state of a group."""
        return next((group for group in self.groups if group.name == name), None)

    def instance(self, machine: str) -> InstanceState | None:
        """The place that the machine fills."""
        return next((instance for instance in self.instances if instance.machine == machine), None)

    def operation(self, id: str) -> OperationState | None:
        """An operation."""
        return next((operation for operation in self.operations if operation.id == id), None)


def read_state(value: Mapping[str, Any]) -> ClusterState:
    """Return the state as it was written; malformed parts become defaults."""
    return read_record(ClusterState, value, "status.state", Report())


def write_state(state: ClusterState) -> dict[str, Any]:
    """Return the state as JSON."""
    return write_record(state)


def identifier(*parts: str | int) -> str:
    """Return the id of an event or operation (8-4-4-4-12 hexadecimal digits), derived from its
    identity."""
    digits = hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def node_name(cluster_id: str, logical_id: str, previous: str) -> str:
    """Return the name of the machine for a place, after the machine `previous` (empty: the first).

    Equal arguments give equal names, so that a repeated order makes one machine.
    """
    digits = hashlib.sha256(f"{cluster_id}/{logical_id}/{previous}".encode()).hexdigest()
    return f"{NODE_PREFIX}{digits[:17]}"


NODE_PREFIX = "hyperpod-i-"


def instance_id(node: str) -> str:
    """`hyperpod-i-0123` -> `i-0123`; machines of other names keep them."""
    return node.removeprefix("hyperpod-")
