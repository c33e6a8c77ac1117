"""The repairer's knowledge: nodes, their records, pods, checks and clusters, as reported.

The repairer is the only writer of NodeRecords, except for the appeal. Once a record is known, only
the appeal is taken from the API's version, which may be older than the next write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from unbroken.core.tick import Tick
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairState
from unbroken.spec.nodes.values import Action, NodeRecovery

from .events import (
    Blamed,
    CheckGone,
    CheckSeen,
    ClusterSeen,
    OrderStatus,
    PodsSeen,
    ProviderAnswered,
    RecordGone,
    RecordSeen,
    RepairEvent,
    RepairNode,
    RepairNodeGone,
    RepairNodeSeen,
    RepairSettings,
    RepairSynced,
)
from .rules import ACTIVE, order_of


@dataclass(slots=True)
class RepairFacts:
    """All known facts; `take` adds to them."""

    settings: RepairSettings
    nodes: dict[str, RepairNode] = field(default_factory=dict)
    records: dict[str, NodeRecordSpec] = field(default_factory=dict)
    pods: dict[str, tuple[str, ...]] = field(default_factory=dict)
    checks: dict[str, CheckSeen] = field(default_factory=dict)
    clusters: dict[str, NodeRecovery] = field(default_factory=dict)
    statuses: dict[str, OrderStatus] = field(default_factory=dict)
    """The newest status of the order under way, by node."""
    is_synced: bool = False

    def record(self, name: str) -> NodeRecordSpec:
        """Return the record of a node; an empty one if nothing is known of it yet."""
        return self.records.get(name) or NodeRecordSpec()

    def recovery(self, node: RepairNode) -> NodeRecovery:
        """Return the setting of who repairs the node."""
        return self.clusters.get(node.cluster, self.settings.recovery)

    def active(self) -> list[str]:
        """Return the nodes under repair; a burn-in does not count as one."""
        result = []
        for name, record in self.records.items():
            repair = record.repair
            if repair and repair.state in ACTIVE and repair.action is not Action.NONE:
                result.append(name)
        return result

    def out_of_service(self) -> set[str]:
        """Return nodes that the repairer has taken out of service: under repair, or in
        quarantine."""
        kept = (name for name in self.nodes if self.record(name).quarantined_at is not None)
        return {*self.active(), *kept}

    def waiting(self) -> list[str]:
        """Return nodes whose repair waits, the longest first."""
        result = [
            (record.repair.began_at, name)
            for name, record in self.records.items()
            if record.repair is not None and record.repair.state is RepairState.WAITING
        ]
        return [name for _, name in sorted(result)]

    def take(self, event: RepairEvent) -> Iterable[str]:
        """Take an event; return the names of its nodes."""
        match event:
            case RepairNodeSeen() | RepairNodeGone():
                return self._take_node(event)
            case RecordSeen() | RecordGone():
                return self._take_record(event)
            case PodsSeen(name, pods):
                self.pods[name] = pods
                return (name,)
            case CheckSeen() | CheckGone():
                return self._take_check(event)
            case ClusterSeen(name, recovery):
                return self._take_cluster(name, recovery)
            case ProviderAnswered():
                return self._take_answer(event)
            case RepairSynced():
                self.is_synced = True
                return sorted({*self.nodes, *self.records})
            case Blamed() | Tick():
                return ()

    def _take_node(self, event: RepairNodeSeen | RepairNodeGone) -> Iterable[str]:
        if isinstance(event, RepairNodeSeen):
            self.nodes[event.node.name] = event.node
            return (event.node.name, *self._replaced_by(event.node.name))
        self.nodes.pop(event.name, None)
        return (event.name, *self._replaced_by(event.name))

    def _take_cluster(self, name: str, recovery: NodeRecovery | None) -> Iterable[str]:
        self.clusters.pop(name, None)
        if recovery is not None:
            self.clusters[name] = recovery
        return [node.name for node in self.nodes.values() if node.cluster == name]

    def _take_record(self, event: RecordSeen | RecordGone) -> Iterable[str]:
        known = self.records.get(event.name)
        if isinstance(event, RecordGone):
            self.records.pop(event.name, None)
        elif known is None:
            self.records[event.name] = event.record
        else:
            appeal = event.record.cleared_at, event.record.cleared_by
            if (known.cleared_at or 0.0) >= (appeal[0] or 0.0):
                return ()
            self.records[event.name] = replace(known, cleared_at=appeal[0], cleared_by=appeal[1])
        return (event.name,)

    def _take_check(self, event: CheckSeen | CheckGone) -> Iterable[str]:
        if isinstance(event, CheckSeen):
            self.checks[event.name] = event
        else:
            self.checks.pop(event.name, None)
        return [
            name
            for name, record in self.records.items()
            if record.repair is not None and record.repair.check == event.name
        ]

    def _take_answer(self, event: ProviderAnswered) -> Iterable[str]:
        repair = self.record(event.order.node).repair
        is_current = (
            repair is not None
            and repair.state is RepairState.ACTING
            and order_of(event.order.node, repair).id == event.order.id
        )
        if not is_current:
            return ()
        self.statuses[event.order.node] = event.status
        return (event.order.node,)

    def _replaced_by(self, name: str) -> list[str]:
        result = [other for other, status in self.statuses.items() if status.replacement == name]
        for other, record in self.records.items():
            if record.repair is not None and record.repair.replacement == name:
                result.append(other)
        return result
