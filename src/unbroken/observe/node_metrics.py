"""Nodes, repairs and checks as metrics: how many nodes are healthy, and how long repairs take.

Gauges show the present state. Counters count what has ended since this program began, so that a
restart counts nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as Total
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from unbroken.spec.nodes.kinds import (
    NodeCheckSpec,
    NodeCheckStatus,
    NodeRecordSpec,
    RepairRecord,
    RepairState,
)
from unbroken.spec.nodes.values import Health

SECONDS = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
"""Buckets in seconds. A process node is back in seconds, a replacement typically takes 20 to 30
minutes, and a deep check two hours (reference, section 1.5 and 2.2)."""
DOCUMENTED = {
    Health.SCHEDULABLE: "hyperpod_node_health_status_schedulable",
    Health.UNSCHEDULABLE: "hyperpod_node_health_status_unschedulable",
    Health.PENDING_REBOOT: "hyperpod_node_health_status_unschedulable_pending_reboot",
    Health.PENDING_REPLACEMENT: "hyperpod_node_health_status_unschedulable_pending_replacement",
}
"""Names under which CloudWatch's agent reports HyperPod's nodes (reference, section 2.5)."""
GROUP = ("cluster_name", "instance_group")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of a node, for counts."""

    is_ready: bool
    health: str
    """Value of the label; empty: it has none."""
    cluster: str = ""
    instance_group: str = ""


class NodeMetrics(Collector):
    """Nodes, and their repairs and checks that have ended since `since`."""

    def __init__(self, registry: CollectorRegistry, since: float) -> None:
        self._since = since
        self._nodes: dict[str, NodeState] = {}
        self._records: dict[str, NodeRecordSpec] = {}
        self._checks: dict[str, NodeCheckStatus] = {}
        self._repairs = Total(
            "unbroken_node_repairs",
            "Repairs that have ended.",
            ("action", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "unbroken_node_repair_seconds",
            "Length of the stages of repairs that have ended: decide (from the need to the order), "
            "act (until the node is back), check (until it takes pods), whole.",
            ("action", "stage"),
            buckets=SECONDS,
            registry=registry,
        )
        self._ended = Total(
            "unbroken_node_checks", "Checks that have ended.", ("kinds", "phase"), registry=registry
        )
        self._check_seconds = Histogram(
            "unbroken_node_check_seconds",
            "Length of checks that have ended.",
            ("kinds",),
            buckets=SECONDS,
            registry=registry,
        )
        registry.register(self)

    # --- input

    def node(self, name: str, state: NodeState | None) -> None:
        """Take the present state of a node; None: it is gone."""
        _put(self._nodes, name, state)

    def record(self, name: str, record: NodeRecordSpec | None) -> None:
        """Take the present state of a node's record; None: it is gone."""
        before = self._records.get(name)
        known = (
            {_identity(repair_record) for repair_record in before.history}
            if before is not None
            else set()
        )
        for repair_record in record.history if record is not None else ():
            if (
                _identity(repair_record) not in known
                and (repair_record.ended_at or 0.0) >= self._since
            ):
                self._count(repair_record)
        _put(self._records, name, record)

    def check(self, name: str, spec: NodeCheckSpec, status: NodeCheckStatus | None) -> None:
        """Take the present state of a check; None: it is gone."""
        before = self._checks.get(name)
        is_new = before is None or before.ended_at is None
        if status is not None and is_new and (status.ended_at or 0.0) >= self._since:
            kinds = ",".join(kind.value for kind in spec.kinds)
            self._ended.labels(kinds, status.phase.value).inc()
            if status.started_at is not None and status.ended_at is not None:
                self._check_seconds.labels(kinds).observe(status.ended_at - status.started_at)
        _put(self._checks, name, status)

    def _count(self, repair: RepairRecord) -> None:
        action = repair.action.value
        self._repairs.labels(action, repair.state.value).inc()
        if repair.state is not RepairState.DONE:
            return
        stages = {
            "decide": (repair.began_at, repair.acted_at),
            "act": (repair.acted_at, repair.returned_at),
            "check": (repair.returned_at, repair.ended_at),
            "whole": (repair.began_at, repair.ended_at),
        }
        for stage, (begin, end) in stages.items():
            if begin is not None and end is not None:
                self._seconds.labels(action, stage).observe(max(end - begin, 0.0))

    # --- output

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the same families as `collect`, which the registry needs for their names."""
        return self.collect()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the present state, in gauges."""
        for health, name in DOCUMENTED.items():
            family = GaugeMetricFamily(name, f"Nodes that are {health.value}.", labels=GROUP)
            states = [node for node in self._nodes.values() if node.health == health.value]
            groups = Counter((state.cluster, state.instance_group) for state in states)
            for group, count in sorted(groups.items()):
                family.add_metric(group, count)
            yield family
        ready = Counter(node.is_ready for node in self._nodes.values())
        family = GaugeMetricFamily("unbroken_nodes", "Nodes by readiness.", labels=("ready",))
        for is_ready in (True, False):
            family.add_metric((str(is_ready).lower(),), ready[is_ready])
        yield family
        yield self._under_way()
        quarantined = sum(record.quarantined_at is not None for record in self._records.values())
        yield GaugeMetricFamily(
            "unbroken_nodes_quarantined", "Nodes in quarantine.", value=quarantined
        )

    def _under_way(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "unbroken_node_repairs_under_way",
            "Repairs in progress, by action and stage.",
            labels=("action", "state"),
        )
        repairs = [record.repair for record in self._records.values() if record.repair is not None]
        counter = Counter((repair.action.value, repair.state.value) for repair in repairs)
        for (action, state), count in sorted(counter.items()):
            family.add_metric((action, state), count)
        return family


def _identity(repair: RepairRecord) -> tuple[float, str]:
    return repair.began_at, repair.action.value


def _put(known: dict[str, T], name: str, value: T | None) -> None:
    if value is None:
        known.pop(name, None)
    else:
        known[name] = value
