"""Metrics of nodes: present states, and ended repairs, each counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from unbroken.observe.node_metrics import NodeMetrics, NodeState
from unbroken.spec.nodes.kinds import (
    CheckKind,
    CheckPhase,
    NodeCheckSpec,
    NodeCheckStatus,
    NodeRecordSpec,
    RepairRecord,
    RepairState,
)
from unbroken.spec.nodes.values import Action

SINCE = 1000.0
DONE = RepairRecord(
    *(Action.REBOOT, "Xid79", "daemon", RepairState.DONE, 1010.0),
    acted_at=1014.0,
    returned_at=1040.0,
    ended_at=1050.0,
)


def metrics() -> tuple[CollectorRegistry, NodeMetrics]:
    """Return the metrics of a program that began at SINCE."""
    registry = CollectorRegistry()
    return registry, NodeMetrics(registry, SINCE)


def test_nodes_are_counted_by_their_label_and_group() -> None:
    registry, found = metrics()
    well = NodeState(True, "Schedulable", "ml", "workers")
    for name in ("a", "b", "c"):
        found.node(name, well)
    found.node("b", replace(well, health="UnschedulablePendingReboot", is_ready=False))
    found.node("c", None)
    name, group = (
        "hyperpod_node_health_status_",
        {"cluster_name": "ml", "instance_group": "workers"},
    )
    assert registry.get_sample_value(name + "schedulable", group) == 1
    assert registry.get_sample_value(name + "unschedulable_pending_reboot", group) == 1
    assert registry.get_sample_value(name + "unschedulable_pending_replacement", group) is None
    assert registry.get_sample_value("unbroken_nodes", {"ready": "true"}) == 1
    assert registry.get_sample_value("unbroken_nodes", {"ready": "false"}) == 1


def seconds(registry: CollectorRegistry, stage: str) -> tuple[float | None, float | None]:
    """Return the number of ended stages of reboots, and the sum of their seconds."""
    labels = {"action": "reboot", "stage": stage}
    name = "unbroken_node_repair_seconds"
    value = registry.get_sample_value
    return value(f"{name}_count", labels), value(f"{name}_sum", labels)


def test_a_repair_is_counted_once_with_its_stages() -> None:
    registry, found = metrics()
    found.record("a", NodeRecordSpec(repair=replace(DONE, state=RepairState.ACTING)))
    under_way = {"action": "reboot", "state": "Acting"}
    name = "unbroken_node_repairs_under_way"
    assert registry.get_sample_value(name, under_way) == 1
    ended = NodeRecordSpec(history=(DONE,), quarantined_at=1050.0)
    for _ in range(3):
        found.record("a", ended)
    assert registry.get_sample_value(name, under_way) is None
    assert registry.get_sample_value("unbroken_nodes_quarantined") == 1
    total = {"action": "reboot", "outcome": "Done"}
    assert registry.get_sample_value("unbroken_node_repairs_total", total) == 1
    assert seconds(registry, "decide") == (1, 4)
    assert seconds(registry, "act") == (1, 26)
    assert seconds(registry, "check") == (1, 10)
    assert seconds(registry, "whole") == (1, 40)


def test_what_ended_before_the_program_began_is_not_counted_again() -> None:
    registry, found = metrics()
    found.record("a", NodeRecordSpec(history=(replace(DONE, began_at=900.0, ended_at=950.0), DONE)))
    total = {"action": "reboot", "outcome": "Done"}
    assert registry.get_sample_value("unbroken_node_repairs_total", total) == 1


def test_a_repair_that_failed_has_no_length() -> None:
    registry, found = metrics()
    found.record("a", NodeRecordSpec(history=(replace(DONE, state=RepairState.FAILED),)))
    total = {"action": "reboot", "outcome": "Failed"}
    assert registry.get_sample_value("unbroken_node_repairs_total", total) == 1
    assert seconds(registry, "whole") == (None, None)


def test_a_check_is_counted_when_it_ends() -> None:
    registry, found = metrics()
    spec = NodeCheckSpec(("a",), (CheckKind.STRESS, CheckKind.CONNECTIVITY))
    found.check("c", spec, NodeCheckStatus(CheckPhase.RUNNING, started_at=1010.0))
    ended = NodeCheckStatus(CheckPhase.FAILED, started_at=1010.0, ended_at=1070.0)
    found.check("c", spec, ended)
    found.check("c", spec, ended)
    kinds = "InstanceStress,InstanceConnectivity"
    labels = {"kinds": kinds, "phase": "Failed"}
    assert registry.get_sample_value("unbroken_node_checks_total", labels) == 1
    name = "unbroken_node_check_seconds_sum"
    assert registry.get_sample_value(name, {"kinds": kinds}) == 60


def test_prometheus_can_read_all_of_it() -> None:
    registry, found = metrics()
    found.node("a", NodeState(True, "Schedulable"))
    found.record("a", NodeRecordSpec(history=(DONE,)))
    families: list[Any] = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {"unbroken_nodes", "unbroken_node_repairs"} <= {one.name for one in families}
