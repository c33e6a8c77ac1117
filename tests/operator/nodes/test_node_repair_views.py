"""Objects of the API as the repairer reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lightkube.models.core_v1 import NodeSpec, Taint
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.nodes.repair.events import PatchNode
from unbroken.operator.nodes.repair import is_of_a_job, node_patch, record_patch, repair_node
from unbroken.spec.keys import FENCE, HEALTH, OUT_OF_SERVICE, REPAIR
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action, Health

AT = "2026-01-02T03:04:05Z"


def node(
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    conditions: dict[str, str] | None = None,
) -> Node:
    """Return a node whose conditions have these states."""
    listed = [
        {"type": key, "status": value, "reason": f"{key}Reason", "lastTransitionTime": AT}
        for key, value in (conditions or {"Ready": "True"}).items()
    ]
    body = {
        "metadata": {"name": "n", "labels": labels or {}, "annotations": annotations or {}},
        "status": {"conditions": listed},
    }
    return msgspec.convert(body, Node)


def test_a_job_waits_for_the_fence_of_a_node_until_it_is_given() -> None:
    asked = node({}, {FENCE: "pod lm-0"}, {"Ready": "Unknown"})
    assert repair_node(asked).is_awaited
    asked.spec = NodeSpec(taints=[Taint("NoExecute", OUT_OF_SERVICE)])
    assert not repair_node(asked).is_awaited
    assert not repair_node(node({}, {}, {"Ready": "Unknown"})).is_awaited


def test_the_taint_of_a_replaced_machine_is_set_once_and_a_persons_never_removed() -> None:
    put, lifted = (PatchNode("n", is_out_of_service=value) for value in (True, False))
    other = {"key": "a", "effect": "NoExecute"}
    persons = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
    bare = {"metadata": {"resourceVersion": "7"}, "spec": {"taints": [other]}}
    taints = node_patch(bare, put)["spec"]["taints"]
    assert taints == [other, {**persons, "value": "machine-replaced"}]
    after = {**bare, "spec": {"taints": taints}}
    assert node_patch(after, put)["spec"]["taints"] == taints
    assert node_patch(after, lifted)["spec"]["taints"] == [other]
    by_hand = {**bare, "spec": {"taints": [persons]}}
    assert node_patch(by_hand, put)["spec"]["taints"] == [persons]
    assert node_patch(by_hand, lifted)["spec"]["taints"] == [persons]
    assert node_patch({"metadata": {"resourceVersion": "7"}}, put)["spec"]["taints"] == taints[1:]
    seen = node({}, {FENCE: "pod lm-0"})
    for value, is_fenced in (("machine-replaced", True), ("nodeshutdown", False), (None, False)):
        seen.spec = NodeSpec(taints=[Taint("NoExecute", OUT_OF_SERVICE, value=value)])
        assert (repair_node(seen).is_fenced, repair_node(seen).is_fence_asked) == (is_fenced, True)


def test_node_with_a_fault() -> None:
    labels = {HEALTH: "UnschedulablePendingReboot", "sagemaker.amazonaws.com/fault-reason": "Xid79"}
    states = {"Ready": "Unknown", "NvidiaGPUUnhealthy": "True", "HardwareUnhealthy": "False"}
    found = repair_node(node(labels, {REPAIR: "reboot"}, states))
    assert found.health is Health.PENDING_REBOOT
    assert [(one.type, one.reason) for one in found.faults] == [
        ("NvidiaGPUUnhealthy", "NvidiaGPUUnhealthyReason")
    ]
    assert (found.is_ready, found.is_silent) == (False, True)
    assert found.ready_at == 1767323045.0
    assert found.fault_reason == "Xid79"
    assert found.order == "reboot"
    assert found.marks == {"sagemaker.amazonaws.com/fault-reason"}


@pytest.mark.parametrize(
    ("labels", "rack"),
    [
        ({}, ""),
        ({"topology.kubernetes.io/zone": "a"}, ""),
        ({"topology.kubernetes.io/zone": "a", "unbroken.dev/rack": "r1"}, "a/r1"),
        ({"topology.k8s.aws/network-node-layer-1": "x"}, ""),
        ({"topology.k8s.aws/network-node-layer-3": "s3"}, "s3"),
    ],
)
def test_rack_is_the_narrowest_place_and_never_a_zone(labels: dict[str, str], rack: str) -> None:
    assert repair_node(node(labels)).rack == rack


def test_label_of_no_meaning_is_none() -> None:
    found = repair_node(node({HEALTH: "Fine"}))
    assert (found.health, found.unknown_health) == (None, "Fine")


def test_label_of_older_documents_asks_for_a_replacement() -> None:
    found = repair_node(node({HEALTH: "UnschedulablePendingReplace"}))
    assert (found.health, found.unknown_health) == (Health.PENDING_REPLACEMENT, "")


@pytest.mark.parametrize(
    ("labels", "phase", "expected"),
    [
        ({"HPJob": "lm"}, "Running", True),
        ({"training.kubeflow.org/job-name": "lm"}, "Pending", True),
        ({"ray.io/cluster": "lm"}, "Running", True),
        ({"job-name": "lm", "controller-uid": "1"}, "Running", True),
        ({"job-name": "lm", "controller-uid": "1"}, "Succeeded", False),
        ({"job-name": "lm"}, "Running", False),
        ({"HPJob": "lm"}, "Succeeded", False),
        ({"app": "dns"}, "Running", False),
    ],
)
def test_pods_of_jobs(labels: dict[str, str], phase: str, expected: bool) -> None:
    body: dict[str, Any] = {"metadata": {"name": "p", "labels": labels}, "status": {"phase": phase}}
    assert is_of_a_job(msgspec.convert(body, Pod)) is expected


def test_record_leaves_the_appeal_and_nothing_stale() -> None:
    repair = RepairRecord(Action.REBOOT, "why", "daemon", RepairState.WAITING, 1.0)
    patch = record_patch(NodeRecordSpec(repair=repair, cleared_at=5.0))["spec"]
    assert not {"clearedAt", "clearedBy"} & patch.keys()
    assert patch["quarantinedAt"] is None
    assert patch["repair"]["message"] is None
    assert patch["repair"]["state"] == "Waiting"
    assert record_patch(NodeRecordSpec())["spec"]["repair"] is None


def test_patch_keeps_the_taints_of_others() -> None:
    other = {"key": "a", "effect": "NoExecute"}
    ours = {"key": HEALTH, "value": "Unschedulable", "effect": "NoSchedule"}
    found = {"metadata": {"resourceVersion": "7"}, "spec": {"taints": [other, ours]}}
    body = node_patch(found, PatchNode("n", {HEALTH: "Schedulable"}, taint=False))
    assert body["spec"]["taints"] == [other]
    assert body["metadata"]["resourceVersion"] == "7"
    assert node_patch(found, PatchNode("n", taint=True))["spec"]["taints"] == [other, ours]
    assert "spec" not in node_patch(found, PatchNode("n"))
