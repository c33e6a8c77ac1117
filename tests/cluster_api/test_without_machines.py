"""A Kubernetes cluster in which nothing makes machines: what needs new ones is refused at once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.apiclient import Object
from tests.apiservers import Cluster
from tests.cli_calls import Cli
from tests.cluster_api.api_program import KEY, Running, credentials_file, running_api
from unbroken.cluster_api.driver import ClusterApiOptions

REASON = "nothing in this Kubernetes cluster makes machines"
ADVICE = "--node-provider machines"
BOTO3 = """
import boto3
client = boto3.client("sagemaker")
try:
    client.create_cluster(ClusterName="boto", InstanceGroups=[{
        "InstanceGroupName": "g", "InstanceType": "ml.c5.large", "InstanceCount": 1,
        "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role"}])
except client.exceptions.ResourceLimitExceeded as refusal:
    print(refusal.response["ResponseMetadata"]["RetryAttempts"], refusal)
"""


@pytest.fixture(scope="module")
def bare(
    clusters: Callable[[str], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Run the cluster API as it is with any node provider but `machines`."""
    keys = credentials_file(tmp_path_factory.mktemp("keys"))
    with running_api(clusters("embedded"), ClusterApiOptions(keys, makes_machines=False)) as found:
        yield found


def groups(count: int) -> list[Object]:
    """One instance group of this size."""
    return [
        {
            "InstanceGroupName": "workers",
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": count,
            "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role",
        }
    ]


def environment(running: Running) -> dict[str, str]:
    """Variables that point the aws CLI, boto3 and `unbroken cluster` at the server."""
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER": running.endpoint,
        "AWS_ACCESS_KEY_ID": KEY.key_id,
        "AWS_SECRET_ACCESS_KEY": KEY.secret,
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def test_a_creation_is_refused_and_leaves_nothing(bare: Running) -> None:
    answer = bare.call("CreateCluster", ClusterName="never", InstanceGroups=groups(2))
    assert (answer.status, answer.code) == (400, "ResourceLimitExceeded")
    assert answer.message.startswith(f"New instances needed: 2, but {REASON}")
    assert ADVICE in answer.message
    assert bare.call("DescribeCluster", ClusterName="never").code == "ResourceNotFound"


def test_scaling_up_is_refused_and_all_else_is_done(bare: Running) -> None:
    bare.ok("CreateCluster", ClusterName="empty", InstanceGroups=groups(0))
    bare.until_phase("empty", "InService")
    answer = bare.call("UpdateCluster", ClusterName="empty", InstanceGroups=groups(1))
    assert answer.code == "ResourceLimitExceeded"
    assert REASON in answer.message
    bare.ok("UpdateCluster", ClusterName="empty", InstanceGroups=groups(0), NodeRecovery="None")
    found = bare.until_phase("empty", "InService")
    assert [one["TargetCount"] for one in found["InstanceGroups"]] == [0]
    assert found["NodeRecovery"] == "None"
    bare.gone("empty")


def test_nodes_are_not_added(bare: Running) -> None:
    given = {"InstanceGroups": groups(0), "NodeProvisioningMode": "Continuous"}
    bare.ok("CreateCluster", ClusterName="grows", **given)
    added = [{"InstanceGroupName": "workers", "IncrementTargetCountBy": 1}]
    answer = bare.call("BatchAddClusterNodes", ClusterName="grows", NodesToAdd=added)
    assert answer.code == "ResourceLimitExceeded"
    assert REASON in answer.message
    bare.gone("grows")


@pytest.mark.slow
def test_boto3_knows_the_error_and_does_not_try_again(bare: Running, aws_folder: Path) -> None:
    done = subprocess.run(
        [str(aws_folder / "python"), "-c", BOTO3],
        env=environment(bare),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    tries, _, said = done.stdout.partition(" ")
    assert tries == "0"
    assert REASON in said


@pytest.mark.slow
def test_the_aws_cli_says_why(bare: Running, aws_folder: Path, tmp_path: Path) -> None:
    role = "arn:aws:iam::111122223333:role/hyperpod-role"
    shorthand = "InstanceGroupName=g,InstanceType=ml.c5.large,InstanceCount=1,ExecutionRole="
    done = subprocess.run(
        [
            *(str(aws_folder / "aws"), "sagemaker", "create-cluster", "--cluster-name", "cli"),
            *("--instance-groups", shorthand + role),
        ],
        env={**environment(bare), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (254, 255), done
    assert "(ResourceLimitExceeded) when calling the CreateCluster operation" in done.stderr
    assert REASON in done.stderr


@pytest.mark.slow
def test_the_command_says_why(bare: Running, tmp_path: Path) -> None:
    cli = Cli(tmp_path / "none", tmp_path)
    own = {name: one for name, one in cli.environment.items() if name != "UNBROKEN_DIR"}
    body = {"ClusterName": "command", "InstanceGroups": groups(1)}
    (tmp_path / "cluster.json").write_text(json.dumps(body))
    done = cli.call(
        *("cluster", "create", "--cli-input-json", "cluster.json", "--wait"),
        environment={**own, **environment(bare)},
        code=1,
    )
    assert REASON in done.stderr
    assert ADVICE in done.stderr
