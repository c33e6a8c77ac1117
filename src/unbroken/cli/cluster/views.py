"""Rows and lines that `unbroken cluster` shows of the API's answers.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.spec.times import time_text

Object = Mapping[str, Any]
CLUSTER_TITLES = ("NAME", "STATUS", "CREATED", "ARN")
GROUP_TITLES = ("GROUP", "TYPE", "STATUS", "CURRENT", "TARGET", "CHECKS")


def cluster_row(summary: Object) -> tuple[str, ...]:
    """The row of a cluster."""
    return (
        summary["ClusterName"],
        summary["ClusterStatus"],
        time_text(summary["CreationTime"]),
        summary["ClusterArn"],
    )


def facts(cluster: Object) -> Iterator[tuple[str, str]]:
    """Name and value of each line about a cluster."""
    yield "Name", cluster["ClusterName"]
    yield "ARN", cluster["ClusterArn"]
    yield "Status", cluster["ClusterStatus"]
    if cluster.get("FailureMessage"):
        yield "Failure", cluster["FailureMessage"]
    yield "Created", time_text(cluster["CreationTime"])
    yield "Node recovery", cluster["NodeRecovery"]
    yield "Provisioning", cluster.get("NodeProvisioningMode") or "all or nothing"


def group_rows(cluster: Object) -> Iterator[tuple[object, ...]]:
    """The rows of a cluster's groups."""
    for item in cluster["InstanceGroups"]:
        types = [detail["InstanceType"] for detail in item.get("InstanceTypeDetails") or ()]
        yield (
            item["InstanceGroupName"],
            ",".join(types),
            item["Status"],
            item["CurrentCount"],
            item["TargetCount"],
            ",".join(item.get("OnStartDeepHealthChecks") or ()) or "-",
        )


def progress(cluster: Object) -> dict[str, str]:
    """A line for the cluster (key: empty) and a line for each group, by name."""
    name = cluster["ClusterName"]
    failure = f": {cluster['FailureMessage']}" if cluster.get("FailureMessage") else ""
    lines = {"": f"{name}: {cluster['ClusterStatus']}{failure}"}
    for item in cluster["InstanceGroups"]:
        group = item["InstanceGroupName"]
        count = f"{item['CurrentCount']} of {item['TargetCount']}"
        lines[group] = f"{name}/{group}: {item['Status']}, {count} up"
    return lines
