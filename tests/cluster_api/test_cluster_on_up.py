"""A cluster on `unbroken up`: nodes of processes, lifecycle scripts, replacement, the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.cli_calls import Cli
from tests.watching import PATIENCE_SECONDS
from unbroken.cli.cluster.place import key_of
from unbroken.cluster_api.client import connected
from unbroken.kube.client import connect
from unbroken.kube.clock import pause
from unbroken.local import state

pytestmark = pytest.mark.slow
SOURCE = "s3://sagemaker-bucket/lifecycle"
ON_CREATE = """#!/bin/bash
echo "OnCreate of $(hostname) has run"
"""
PREFIX = "sagemaker.amazonaws.com/"
PATIENCE = 3 * PATIENCE_SECONDS
"""Seconds to wait: real processes drain, create and check a replacement."""


class Up:
    """A running `unbroken up` without nodes of its own."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        found = state.running(state.Paths(cli.directory))
        assert found is not None
        self.running = found
        self.key = key_of(found)

    def ok(self, operation: str, **members: Any) -> Any:
        """Call an operation that must succeed; return its answer."""

        async def call() -> Any:
            async with connected(self.running.cluster_api, self.key, "us-west-2") as client:
                return await client.call(operation, members)

        return asyncio.run(call())

    def objects(self, path: str) -> list[Any]:
        """Return the objects that the Kubernetes API lists."""

        async def get() -> list[Any]:
            async with connect(self.running.kubeconfig) as client:
                items: list[Any] = json.loads(await client.raw("GET", path))["items"]
                return items

        return asyncio.run(get())

    def until(self, what: Callable[[], Any], holds: Callable[[Any], object]) -> Any:
        """Call `what` until `holds` is true of its result; return it."""

        async def ask() -> Any:
            found = None
            try:
                async with asyncio.timeout(PATIENCE):
                    while not holds(found := await asyncio.to_thread(what)):
                        await pause(0.2)
            except TimeoutError:
                raise AssertionError(f"not in time: {found}") from None
            return found

        return asyncio.run(ask())


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Start `unbroken up` with a directory that stands for the address of the scripts."""
    scripts = tmp_path / "lifecycle"
    scripts.mkdir()
    (scripts / "on_create.sh").write_text(ON_CREATE)
    (scripts / "on_create.sh").chmod(0o755)
    cli = Cli(tmp_path / "cluster", tmp_path)
    cli.call("up", "--detach", "--nodes", "0", "--lifecycle-source", f"{SOURCE}={scripts}")
    try:
        yield Up(cli)
    finally:
        cli.take_away()


def group(name: str, count: int) -> dict[str, Any]:
    """Return an instance group with a lifecycle script."""
    return {
        "InstanceGroupName": name,
        "InstanceType": "ml.c5.xlarge",
        "InstanceCount": count,
        "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role",
        "LifeCycleConfig": {"SourceS3Uri": SOURCE, "OnCreate": "on_create.sh"},
    }


def test_a_cluster_of_real_nodes_lives_through_a_replacement(up: Up) -> None:
    status = up.cli.json("status")
    assert status["clusterApi"] == up.running.cluster_api
    body = {"ClusterName": "Two", "InstanceGroups": [group("head", 1), group("workers", 2)]}
    (up.cli.folder / "two.json").write_text(json.dumps(body))
    done = up.cli.call("cluster", "create", "--cli-input-json", "two.json", "--wait")
    assert "Two: InService" in done.stderr
    nodes = up.objects("api/v1/nodes")
    assert len(nodes) == 3
    with urlopen(status["metrics"], timeout=PATIENCE_SECONDS) as answer:
        assert b'unbroken_nodes{ready="true"} 3.0' in answer.read()
    for node in nodes:
        labels = node["metadata"]["labels"]
        assert labels[f"{PREFIX}cluster-name"] == "Two"
        assert labels[f"{PREFIX}node-health-status"] == "Schedulable"
        assert labels["node.kubernetes.io/instance-type"] == "ml.c5.xlarge"
        assert node["status"]["capacity"]["cpu"] == "4"
    logs = up.cli.directory / "logs/LifecycleConfig"
    assert len(list(logs.glob("*/i-*.log"))) == 3
    listed = up.ok("ListClusterNodes", ClusterName="Two", InstanceGroupNameContains="workers")
    id = listed["ClusterNodeSummaries"][0]["InstanceId"]
    described = up.ok("DescribeClusterNode", ClusterName="Two", NodeId=id)["NodeDetails"]
    place = described["NodeLogicalId"]
    up.ok("BatchReplaceClusterNodes", ClusterName="Two", NodeIds=[id])

    def there() -> Any:
        found = up.ok("DescribeClusterNode", ClusterName="Two", NodeLogicalId=place)
        return found["NodeDetails"]

    new = up.until(
        there,
        lambda now: (
            now.get("InstanceId") not in (None, id) and now["InstanceStatus"]["Status"] == "Running"
        ),
    )
    log = logs / "workers" / f"{new['InstanceId']}.log"
    assert "has run" in log.read_text()
    up.until(
        lambda: up.ok("DescribeCluster", ClusterName="Two")["InstanceGroups"],
        lambda now: {one["Status"] for one in now} == {"InService"},
    )
    up.cli.call("cluster", "delete", "Two", "--wait")
    assert not up.objects("apis/unbroken.dev/v1/machines")
    assert not up.objects("api/v1/nodes")
