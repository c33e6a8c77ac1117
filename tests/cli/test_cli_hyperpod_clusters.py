"""The answer of `hyperpod get-clusters`, from nodes and pods."""

from __future__ import annotations

from typing import Any

from unbroken.cli.hyperpod.clusters import capacities

Object = dict[str, Any]
P5 = "ml.p5.48xlarge"


def node(name: str, cluster: str = "ml", type: str = P5, **labels: str) -> Object:
    """Return a node of a cluster with 8 GPUs that takes pods."""
    found = {
        "sagemaker.amazonaws.com/cluster-name": cluster,
        "node.kubernetes.io/instance-type": type,
        "sagemaker.amazonaws.com/node-health-status": labels.get("health", "Schedulable"),
    }
    if "check" in labels:
        found["sagemaker.amazonaws.com/deep-health-check-status"] = labels["check"]
    metadata = {"name": name, "labels": {key: text for key, text in found.items() if text}}
    return {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}


def pod(on: str, gpus: str, phase: str = "Running") -> Object:
    """Return a pod that has requested GPUs."""
    container = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return {"spec": {"nodeName": on, "containers": [container]}, "status": {"phase": phase}}


def test_each_type_of_each_cluster_has_a_row_with_what_is_free() -> None:
    nodes = [
        node("a0", check="Passed"),
        node("a1", check="Failed", health="UnschedulablePendingReboot"),
        node("b0", type="ml.c5.xlarge"),
        node("c0", "other", check="Passed"),
        node("d0", ""),
    ]
    pods = [pod("a0", "3"), pod("a0", "2"), pod("a0", "8", "Succeeded"), pod("a1", "8")]
    titles = ("Cluster", "InstanceType", "TotalNodes", "AcceleratorDevicesAvailable")
    titles += ("NodeHealthStatus=Schedulable", "DeepHealthCheckStatus=Passed")
    rows = [
        ("ml", "ml.c5.xlarge", 1, "N/A", 1, "N/A"),
        ("ml", P5, 2, 3, 1, 1),
        ("other", P5, 1, 8, 1, 1),
    ]
    assert capacities(nodes, pods, ()) == [dict(zip(titles, one, strict=True)) for one in rows]
    assert [one["Cluster"] for one in capacities(nodes, pods, {"other", "absent"})] == ["other"]


def test_odd_objects_count_as_nothing() -> None:
    odd = [pod("a0", "many"), {"spec": {}}, {"spec": {"nodeName": "a0", "containers": [{}]}}]
    (found,) = capacities([node("a0")], odd, ())
    assert found["AcceleratorDevicesAvailable"] == 8
    assert capacities([{"metadata": {"name": "x"}}], [], ()) == []
