"""Input and output of the rules of `clusters`: the observed cluster, the orders, the new state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.spec.nodes.kinds import CheckKind, CheckPhase, ClusterSpec, MachinePhase, MachineSpec

from .groups import InstanceGroup, NodeConfig, instance_groups, is_continuous
from .state import (
    EVENTS_MAX,
    OPERATIONS_MAX,
    ClusterPhase,
    ClusterState,
    EventState,
    GroupState,
    InstanceState,
    Level,
    OperationState,
    Resource,
    identifier,
)

# --- observed


@dataclass(frozen=True, slots=True)
class MachineView:
    """A machine of the cluster."""

    name: str
    logical_id: str
    group: str = ""
    phase: MachinePhase = MachinePhase.PENDING
    message: str = ""
    is_deleting: bool = False
    created_at: float = 0.0
    config: NodeConfig = field(default_factory=NodeConfig)
    """The spec's labels and taints, to which its node was last brought."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """The node of a machine; labels are empty if there is none."""

    name: str
    is_ready: bool = False
    health: str = ""
    deep_check: str = ""
    is_held: bool = False
    """True while a deep check has marked it."""
    repair: str = ""
    """The order in its annotation that has not been accepted yet."""


@dataclass(frozen=True, slots=True)
class CheckView:
    """A NodeCheck."""

    name: str
    nodes: tuple[str, ...]
    kinds: tuple[CheckKind, ...]
    phase: CheckPhase = CheckPhase.PENDING
    faulty: tuple[str, ...] = ()
    message: str = ""

    @property
    def has_ended(self) -> bool:
        """True if it has a result."""
        return self.phase not in (CheckPhase.PENDING, CheckPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class World:
    """A Cluster and its machines, nodes and checks."""

    name: str
    """Name of the object."""
    spec: ClusterSpec
    phase: ClusterPhase = ClusterPhase.CREATING
    message: str = ""
    is_deleting: bool = False
    machines: Sequence[MachineView] = ()
    nodes: Mapping[str, ClusterNode] = field(default_factory=dict)
    checks: Sequence[CheckView] = ()


# --- orders; each may be carried out twice without harm


@dataclass(frozen=True, slots=True)
class CreateMachine:
    """Make a machine, unless one has that name."""

    name: str
    spec: MachineSpec


@dataclass(frozen=True, slots=True)
class DeleteMachine:
    """Delete a machine."""

    name: str


@dataclass(frozen=True, slots=True)
class CreateCheck:
    """Make a NodeCheck, unless one has that name."""

    name: str
    nodes: tuple[str, ...]
    kinds: tuple[CheckKind, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Configure:
    """Bring a node, then the machine of the same name, from some labels and taints to others.

    Other labels and taints of the node stay.
    """

    name: str
    was: NodeConfig
    wanted: NodeConfig


@dataclass(frozen=True, slots=True)
class ReplaceNode:
    """Order the repairer to replace the node."""

    name: str


@dataclass(frozen=True, slots=True)
class Retarget:
    """Revert the change of some groups: group -> logical ids."""

    targets: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ReleaseCluster:
    """Release the Cluster object: nothing of the cluster is left."""


ClusterEffect = (
    CreateMachine
    | DeleteMachine
    | CreateCheck
    | Configure
    | ReplaceNode
    | Retarget
    | ReleaseCluster
)


@dataclass(frozen=True, slots=True)
class ClusterDecision:
    """The state to write, and the orders to carry out after that."""

    state: ClusterState
    phase: ClusterPhase
    message: str
    effects: tuple[ClusterEffect, ...]
    again_at: float | None = None
    """Time at which to decide again although nothing has changed."""


@dataclass(slots=True)
class GroupPlace:
    """A place in a group and the machine that fills it."""

    group: InstanceGroup
    logical_id: str
    machine: MachineView | None
    was: InstanceState | None
    now: InstanceState


class Draft:
    """A decision under construction."""

    def __init__(self, world: World, state: ClusterState, now: float) -> None:
        self.world = world
        self.now = now
        self.groups: tuple[InstanceGroup, ...] = instance_groups(world.spec)
        self.is_continuous = is_continuous(world.spec)
        self.was = state
        self.state = state
        self.phase = world.phase
        self.message = world.message
        self.places: list[GroupPlace] = []
        self.effects: list[ClusterEffect] = []
        self.again_at: float | None = None

    def of(self, group: str) -> list[GroupPlace]:
        """Return the places of a group."""
        return [place for place in self.places if place.group.name == group]

    def do(self, effect: ClusterEffect) -> None:
        """Add an order."""
        self.effects.append(effect)

    def wake(self, at: float) -> None:
        """Request a new decision at this time, if none comes earlier."""
        self.again_at = at if self.again_at is None else min(at, self.again_at)

    def record_event(
        self,
        resource: Resource,
        text: str,
        level: Level = Level.INFO,
        *,
        group: str = "",
        instance: str = "",
        **metadata: Mapping[str, Any],
    ) -> None:
        """Add an event; its `metadata` has one keyword, a member of EventMetadata."""
        made = EventState(
            id=self._next_id("event"),
            at=self.now,
            resource=resource,
            text=text,
            level=level,
            group=group,
            instance=instance,
            operation=self._operation_of(group),
            metadata=metadata,
        )
        self.state = replace(self.state, events=(*self.state.events, made)[-EVENTS_MAX:])

    def add_operation(self, operation: OperationState) -> None:
        """Add an operation, with an id of its own."""
        made = replace(operation, id=self._next_id("operation"))
        kept = (*self.state.operations, made)[-OPERATIONS_MAX:]
        self.state = replace(self.state, operations=kept)

    def put_place(self, place: GroupPlace, now: InstanceState) -> None:
        """Set the state of a place."""
        place.now = now
        kept = tuple(group_place.now for group_place in self.places)
        self.state = replace(self.state, instances=kept)

    def put_group(self, group: GroupState) -> None:
        """Set the state of a group."""
        others = [
            group_state for group_state in self.state.groups if group_state.name != group.name
        ]
        self.state = replace(self.state, groups=(*others, group))

    def decision(self) -> ClusterDecision:
        """Return the decision."""
        return ClusterDecision(
            self.state, self.phase, self.message, tuple(self.effects), self.again_at
        )

    def _next_id(self, kind: str) -> str:
        number = self.state.sequence + 1
        self.state = replace(self.state, sequence=number)
        return identifier(self.world.spec.cluster_id, kind, number)

    def _operation_of(self, group: str) -> str:
        for operation in reversed(self.state.operations):
            about = [
                *(part.group for part in operation.scaling),
                *(part.group for part in operation.checks),
            ]
            if group in about:
                return operation.id
        return ""
