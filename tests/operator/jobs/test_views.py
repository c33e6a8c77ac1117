"""Pods and nodes as the machine sees them, as tables of objects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from lightkube.resources.core_v1 import Node, Pod

from tests.tables import cases
from unbroken.core.job.events import NodeName, PodPhase, PodView
from unbroken.operator.jobs.views import agent_place, node_view, pod_view
from unbroken.spec.nodes.notices import Notice

Object = dict[str, Any]


def pod(status: Object, **metadata: Any) -> Pod:
    """A pod of replica spec `pods`, index 3."""
    labels = {"unbroken.dev/replica-spec": "pods", "unbroken.dev/index": "3"}
    content = {
        "metadata": {"name": "lm-pods-3", "uid": "u", "labels": labels, **metadata},
        "spec": {"containers": [{"name": "c"}], "nodeName": "n"},
        "status": status,
    }
    return msgspec.convert(content, Pod)


def view(status: Object, **metadata: Any) -> PodView:
    """The view of such a pod."""
    found = pod_view(pod(status, **metadata))
    assert found is not None
    return found


STOPPED = {"exitCode": 0, "reason": "Completed"}


@pytest.mark.parametrize(
    ("state", "deleted", "ended"),
    [
        ({"terminated": STOPPED}, "2026-01-01T00:00:00Z", True),
        ({"terminated": STOPPED}, None, False),
        ({"running": {"startedAt": None}}, "2026-01-01T00:00:00Z", False),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "2026-01-01T00:00:00Z", False),
        (
            {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}},
            "2026-01-01T00:00:00Z",
            False,
        ),
        (None, "2026-01-01T00:00:00Z", False),
    ],
)
def test_a_deleted_pod_has_ended_when_each_container_was_seen_to_end(
    state: Object | None, deleted: str | None, ended: bool
) -> None:
    statuses = [] if state is None else [container(**state)]
    found = view({"phase": "Running", "containerStatuses": statuses}, deletionTimestamp=deleted)
    assert found.has_ended is ended


def container(restarts: int = 0, **state: Object) -> Object:
    """The status of container `c`."""
    base = {"name": "c", "image": "", "imageID": "", "ready": False, "restartCount": restarts}
    return {**base, "state": state}


def test_a_running_pod() -> None:
    running = container(running={"startedAt": "2026-01-01T00:00:00Z"})
    status = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [running]}
    found = view(status)
    assert (found.replica_spec, found.index, found.phase) == ("pods", 3, PodPhase.RUNNING)
    assert (found.node, found.address) == (NodeName("n"), "10.0.0.1")
    assert found.has_been_ready
    assert not found.is_deleting
    assert (found.reason, found.message) == ("", "")
    assert view(status, deletionTimestamp="2026-01-01T00:00:00Z").is_deleting


@cases
def test_why_a_pod_is_not_well(status: Object, reason: str, said: str, started: bool) -> None:
    found = view(status)
    assert (found.reason, found.message, found.has_been_ready) == (reason, said, started)


@pytest.mark.parametrize("labels", [{}, {"unbroken.dev/index": "x"}, {"unbroken.dev/index": "1"}])
def test_a_strangers_pod_is_none_of_ours(labels: dict[str, str]) -> None:
    assert pod_view(pod({}, labels=labels)) is None


@pytest.mark.parametrize(
    ("env", "port"), [([], 8080), (["9090"], 9090), ([None], 8080), (["x"], 8080)]
)
def test_the_agents_port_is_the_templates(env: list[str | None], port: int) -> None:
    entries = [{"name": "AGENT_PORT", **({"value": value} if value else {})} for value in env]
    found = msgspec.convert({"spec": {"containers": [{"name": "c", "env": entries}]}}, Pod)
    assert agent_place(found).port == port


def test_a_container_that_was_started_again_is_another_place() -> None:
    first = container(0, running={"startedAt": "2026-01-01T00:00:00Z"})
    again = {**first, "restartCount": 1}
    places = [agent_place(pod({"containerStatuses": [status]})) for status in (first, again)]
    assert places[0] != places[1]


def node(**parts: Any) -> Node:
    """A ready node `n`; `conditions` adds to its conditions."""
    conditions = {"Ready": "True", **parts.pop("conditions", {})}
    content = {
        "metadata": {"name": "n", "labels": parts.pop("labels", {})},
        "spec": {"taints": parts.pop("taints", []), **parts.pop("spec", {})},
        "status": {"conditions": [{"type": k, "status": v} for k, v in conditions.items()]},
    }
    return msgspec.convert(content, Node)


HEALTH = "sagemaker.amazonaws.com/node-health-status"
FAULT = {"sagemaker.amazonaws.com/fault-types": "NvidiaGPUUnhealthy"}


@pytest.mark.parametrize(
    ("parts", "ready", "fenced", "healthy"),
    [
        ({}, True, False, True),
        ({"conditions": {"Ready": "Unknown"}}, False, False, True),
        (
            {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]},
            *(True, True, True),
        ),
        ({"labels": {HEALTH: "Schedulable"}}, True, False, True),
        ({"labels": {HEALTH: "Unschedulable"}}, True, False, True),
        ({"labels": {HEALTH: "UnschedulablePendingReboot"}}, True, False, True),
        ({"labels": {HEALTH: "UnschedulablePendingReboot", **FAULT}}, True, False, False),
        ({"labels": {HEALTH: "UnschedulablePendingReplacement", **FAULT}}, True, False, False),
        ({"labels": {HEALTH: "UnschedulablePendingReplace", **FAULT}}, True, False, False),
        ({"conditions": {"NvidiaGPUUnhealthy": "True"}}, True, False, False),
        ({"conditions": {"NvidiaGPUUnhealthy": "False"}}, True, False, True),
    ],
)
def test_what_a_node_is_good_for(parts: Object, ready: bool, fenced: bool, healthy: bool) -> None:
    found = node_view(node(**parts))
    assert (found.is_ready, found.is_fenced, found.is_healthy) == (ready, fenced, healthy)


@pytest.mark.parametrize("health", ["PendingReboot", "PendingReplacement", "PendingReplace"])
def test_a_health_label_without_a_fault_is_an_order(health: str) -> None:
    view = node_view(node(labels={HEALTH: f"Unschedulable{health}"}))
    assert view.notice is not None
    assert (view.notice.name, view.notice.is_order) == ("OrderedRepair", True)
    assert not view.is_usable


def test_a_notice_is_told_and_keeps_new_pods_off() -> None:
    assert node_view(node()).notice is None
    cordoned = node_view(node(spec={"unschedulable": True}))
    assert cordoned.notice == Notice("Cordon", "it is cordoned")
    assert not cordoned.is_usable
    spot = [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]
    found = node_view(node(taints=spot, spec={"unschedulable": True})).notice
    assert found is not None
    assert (found.name, found.seconds) == ("AwsSpot", 120.0)
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    sick = {"type": "RebootScheduled", "status": "True", "lastTransitionTime": at}
    view = node_view(msgspec.convert({"status": {"conditions": [sick]}}, Node))
    assert view.notice is not None
    assert view.notice.deadline == at.timestamp() + 900


def test_topology_is_told_widest_first() -> None:
    labels = {
        "topology.k8s.aws/network-node-layer-3": "c",
        "topology.k8s.aws/network-node-layer-1": "a",
        "topology.kubernetes.io/zone": "z",
    }
    assert node_view(node(labels=labels)).topology == ("z", "a", "", "c", "")


@pytest.mark.parametrize(
    ("labels", "topology"),
    [
        (
            {
                "cloud.google.com/gce-topology-block": "b",
                "cloud.google.com/gce-topology-subblock": "s",
            },
            ("", "", "b", "s", ""),
        ),
        (
            {
                "oci.oraclecloud.com/rdma.hpc_island_id": "i",
                "oci.oraclecloud.com/rdma.network_block_id": "b",
                "oci.oraclecloud.com/rdma.local_block_id": "l",
            },
            ("", "i", "b", "l", ""),
        ),
    ],
)
def test_labels_of_other_clouds_are_levels_too(
    labels: dict[str, str], topology: tuple[str, ...]
) -> None:
    view = node_view(node(labels=labels))
    assert view.topology == topology
    assert [key for key in view.topology_keys if key] == list(labels)


@pytest.mark.parametrize(
    ("labels", "rack"),
    [
        ({"unbroken.dev/rack": "r1"}, "r1"),
        ({"topology.kubernetes.io/rack": "r2", "unbroken.dev/rack": "r1"}, "r2"),
        ({"topology.kubernetes.io/rack": "", "unbroken.dev/rack": "r1"}, "r1"),
    ],
)
def test_a_rack_is_the_narrowest(labels: dict[str, str], rack: str) -> None:
    assert node_view(node(labels=labels)).topology == ("", "", "", "", rack)
