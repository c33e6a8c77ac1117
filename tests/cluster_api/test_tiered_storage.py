"""TieredStorageConfig by boto3: it switches the memory for checkpoints of running nodes."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import Cli
from tests.cluster_api.test_cluster_on_up import Up
from tests.watching import wait_until
from unbroken.cluster_api.signatures import read_credentials

pytestmark = pytest.mark.slow
GIB = 1 << 30
CALL = """
import boto3, json, sys
operation, members = sys.argv[1], json.loads(sys.argv[2])
client = boto3.client("sagemaker")
try:
    answer = getattr(client, operation)(**members)
except client.exceptions.ClientError as error:
    answer = {"refused": error.response["Error"]["Code"], "said": str(error)}
print(json.dumps(answer, default=str))
"""
GROUP = {
    "InstanceGroupName": "workers",
    "InstanceType": "ml.c5.xlarge",
    "InstanceCount": 2,
    "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role",
}


class Boto3:
    """boto3 in an environment of its own, pointed at the cluster API of `unbroken up`."""

    def __init__(self, folder: Path, up: Up) -> None:
        self._python = folder / "python"
        (key,) = read_credentials(Path(up.running.cluster_api_credentials)).items()
        self._environment = {
            "PATH": os.environ["PATH"],
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ACCESS_KEY_ID": key[0],
            "AWS_SECRET_ACCESS_KEY": key[1].secret,
            "AWS_ENDPOINT_URL_SAGEMAKER": up.running.cluster_api,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __call__(self, operation: str, **members: Any) -> Any:
        """Return the answer of an operation, or its refusal."""
        done = subprocess.run(
            [self._python, "-c", CALL, operation, json.dumps(members)],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        return json.loads(done.stdout)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Start `unbroken up` without nodes of its own and without a checkpoint memory."""
    cli = Cli(tmp_path / "cluster", tmp_path)
    cli.call("up", "--detach", "--nodes", "0")
    try:
        yield Up(cli)
    finally:
        cli.take_away()


def capacities(up: Up) -> list[int]:
    """Return the bytes of each node's memory for checkpoints; 0: it does not answer."""
    folder = up.cli.directory / "checkpoint-memory"
    members = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_capacity(member.name) for member in members]


def _capacity(address: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}/v1/members/contents", timeout=30) as answer:
            return int(json.load(answer)["capacity_bytes"])
    except OSError:
        return 0


def test_it_switches_and_sizes_the_memory_of_running_nodes(up: Up, aws_folder: Path) -> None:
    boto3 = Boto3(aws_folder, up)
    create = partial(boto3, "create_cluster", ClusterName="Tiers", InstanceGroups=[GROUP])
    update = partial(boto3, "update_cluster", ClusterName="Tiers")

    def shown() -> Any:
        return boto3("describe_cluster", ClusterName="Tiers").get("TieredStorageConfig")

    for config, said in (
        (
            {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 101},
            "less than or equal to 100",
        ),
        ({"Mode": "Enable", "InstanceMemoryAllocationPercentage": 0}, "must be 1 to 100"),
        ({"Mode": "Perhaps"}, "[Enable, Disable]"),
    ):
        answer = create(TieredStorageConfig=config)
        assert (answer["refused"], said in answer["said"]) == ("ValidationException", True), answer

    half = {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 50}
    assert "ClusterArn" in create(TieredStorageConfig=half)
    # An ml.c5.xlarge has 8 GiB.
    wait_until(partial(capacities, up), lambda found: found == [4 * GIB] * 2)
    assert shown() == half
    wait_until(partial(boto3, "describe_cluster", ClusterName="Tiers"),
               lambda found: found["ClusterStatus"] == "InService")  # fmt: skip

    (address, _) = sorted(path.name for path in (up.cli.directory / "checkpoint-memory").iterdir())
    url = f"http://{address}/v1/cp/namespaces/job?num_ranks=2"
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()
    assert "ClusterArn" in update(TieredStorageConfig={"Mode": "Enable"})
    wait_until(partial(capacities, up), lambda found: found == [8 * GIB // 5] * 2)
    # The servers go on with what they have.
    urllib.request.urlopen(url.partition("?")[0], timeout=30).close()

    assert "ClusterArn" in update(TieredStorageConfig={"Mode": "Disable"})
    wait_until(partial(capacities, up), lambda found: found == [])
    assert shown() == {"Mode": "Disable"}
    assert _capacity(address) == 0
    assert "ClusterArn" in update(TieredStorageConfig=half)
    wait_until(partial(capacities, up), lambda found: found == [4 * GIB] * 2)
    # The memory that was switched off is gone.
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.partition("?")[0], timeout=30)
