"""The commands of the HyperPod guides, with the real aws CLI and boto3."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apiclient import Object
from tests.apiservers import Cluster
from tests.cluster_api.api_program import Running, credentials_file, running_api
from unbroken.cluster_api.driver import ClusterApiOptions

pytestmark = pytest.mark.slow
ROLE = "arn:aws:iam::111122223333:role/hyperpod-role"
SCRIPTS = {"SourceS3Uri": "s3://sagemaker-bucket/lifecycle", "OnCreate": "on_create.sh"}
GROUPS = [
    {
        "InstanceGroupName": "head-group",
        "InstanceType": "ml.c5.2xlarge",
        "InstanceCount": 1,
        "LifeCycleConfig": SCRIPTS,
        "ExecutionRole": ROLE,
        "ThreadsPerCore": 1,
    },
    {
        "InstanceGroupName": "worker-group-1",
        "InstanceType": "ml.p5.48xlarge",
        "InstanceCount": 2,
        "LifeCycleConfig": SCRIPTS,
        "ExecutionRole": ROLE,
        "ThreadsPerCore": 1,
        "InstanceStorageConfigs": [{"EbsVolumeConfig": {"VolumeSizeInGB": 500}}],
        "OnStartDeepHealthChecks": ["InstanceStress", "InstanceConnectivity"],
        "KubernetesConfig": {"Labels": {"team": "llm"}},
    },
]
VPC = {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0123456789abcdef0"]}
EKS = {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:111122223333:cluster/hyperpod-eks"}}

PAGES = """
import boto3, json, sys
client = boto3.client("sagemaker")
found = {}
nodes = client.get_paginator("list_cluster_nodes")
pages = list(nodes.paginate(ClusterName=sys.argv[1], PaginationConfig={"PageSize": 1}))
found["pages"] = len(pages)
found["nodes"] = [one["InstanceId"] for page in pages for one in page["ClusterNodeSummaries"]]
events = client.get_paginator("list_cluster_events")
pages = list(events.paginate(ClusterName=sys.argv[1], PaginationConfig={"PageSize": 2}))
found["events"] = [one["Description"] for page in pages for one in page["Events"]]
operations = client.list_cluster_operations(ClusterName=sys.argv[1])["ClusterOperationSummaries"]
found["operations"] = [one["Type"] for one in operations]
found["created"] = client.describe_cluster(ClusterName=sys.argv[1])["CreationTime"].year
for error, call in (
    ("ResourceNotFound", lambda: client.describe_cluster(ClusterName="none")),
    ("ResourceInUse", lambda: client.create_cluster(ClusterName=sys.argv[1], InstanceGroups=[{
        "InstanceGroupName": "g", "InstanceType": "ml.c5.large", "InstanceCount": 1,
        "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role"}])),
    ("ConflictException", lambda: client.start_cluster_health_check(ClusterName=sys.argv[1],
        DeepHealthCheckConfigurations=[{"InstanceGroupName": "workers",
                                        "DeepHealthChecks": ["InstanceStress"]}])),
):
    if error == "ConflictException":
        call()
    try:
        call()
    except getattr(client.exceptions, error) as raised:
        found[error] = raised.response["ResponseMetadata"]["HTTPStatusCode"]
print(json.dumps(found))
"""


class Aws:
    """The aws CLI, pointed at an address as the guides do."""

    def __init__(self, folder: Path, running: Running, home: Path) -> None:
        self.folder = folder
        self.running = running
        kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        self.environment = {
            **kept,
            "HOME": str(home),
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret/of+it",
            "AWS_ENDPOINT_URL_SAGEMAKER": running.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
            "AWS_PAGER": "",
        }
        self.home = home

    def run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        done = subprocess.run(
            [str(self.folder / command[0]), *command[1:]],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done

    def __call__(self, *arguments: str) -> Any:
        """Return the answer of `aws sagemaker ...`."""
        said = self.run("aws", "sagemaker", *arguments).stdout
        return json.loads(said) if said else None

    def refused(self, *arguments: str) -> str:
        """Run `aws sagemaker ...`, which must be refused; return its error text."""
        return self.run("aws", "sagemaker", *arguments, code=255).stderr

    def until_groups(self, cluster: str, phase: str) -> None:
        """Wait for all groups in the cluster's object: each call of the CLI takes a second."""

        def phases() -> set[str]:
            path = f"/apis/unbroken.dev/v1/clusters/{cluster}"
            state = self.running.api.get(path).made.get("status", {}).get("state", {})
            return {one["phase"] for one in state.get("groups", ())}

        self.running.until(phases, lambda found: found == {phase})

    def file(self, name: str, value: object) -> str:
        """Write a file; return it as an argument."""
        (self.home / name).write_text(json.dumps(value))
        return f"file://{name}"


@pytest.fixture(scope="module")
def aws(
    clusters: Callable[[str], Cluster],
    aws_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Aws]:
    """Run the CLI against a server that verifies its signatures."""
    home = tmp_path_factory.mktemp("aws")
    options = ClusterApiOptions(credentials=credentials_file(home))
    with running_api(clusters("embedded"), options) as running:
        yield Aws(aws_folder, running, home)


def checks_of(aws: Aws, cluster: str) -> list[Object]:
    """Return the node checks of one cluster; the API server may hold those of other tests too."""
    found = aws.running.objects("nodechecks")
    return [one for one in found if one["metadata"]["name"].startswith(f"{cluster}-")]


def names_of_clusters(aws: Aws) -> list[str]:
    """Return all clusters of the API server, those of other tests too."""
    return [one["metadata"]["name"] for one in aws.running.objects("clusters")]


def test_a_cluster_of_two_groups_from_its_documents(aws: Aws) -> None:
    made = aws(
        *("create-cluster", "--cluster-name", "ml-cluster", "--node-recovery", "Automatic"),
        *("--instance-groups", aws.file("groups.json", GROUPS)),
        *("--vpc-config", aws.file("vpc.json", VPC)),
        *("--orchestrator", json.dumps(EKS)),
        *("--tags", "Key=team,Value=llm"),
    )
    arn = made["ClusterArn"]
    assert arn.startswith("arn:aws:sagemaker:us-west-2:111122223333:cluster/")
    aws.running.until(lambda: checks_of(aws, "ml-cluster"), lambda found: found)
    table = aws.run("aws", "sagemaker", "list-clusters", "--output", "table").stdout
    assert "ml-cluster" in table
    assert "Creating" in table
    nodes = aws("list-cluster-nodes", "--cluster-name", "ml-cluster")["ClusterNodeSummaries"]
    statuses = sorted(one["InstanceStatus"]["Status"] for one in nodes)
    assert statuses == ["DeepHealthCheckInProgress", "DeepHealthCheckInProgress", "Running"]
    with aws.running.run_checker():
        aws.until_groups("ml-cluster", "InService")
    found = aws("describe-cluster", "--cluster-name", arn)
    assert found["ClusterStatus"] == "InService"
    assert found["VpcConfig"] == VPC
    assert found["Orchestrator"] == EKS
    worker = found["InstanceGroups"][1]
    assert worker["OnStartDeepHealthChecks"] == ["InstanceStress", "InstanceConnectivity"]
    assert worker["KubernetesConfig"]["CurrentLabels"] == {"team": "llm"}
    assert worker["LifeCycleConfig"] == SCRIPTS
    id = next(n["InstanceId"] for n in nodes if n["InstanceGroupName"] == "worker-group-1")
    details = aws("describe-cluster-node", "--cluster-name", "ml-cluster", "--node-id", id)
    assert details["NodeDetails"]["PrivatePrimaryIp"] == "10.9.8.7"
    replaced = aws("batch-replace-cluster-nodes", "--cluster-name", arn, "--node-ids", id)
    assert replaced == {"Successful": [id]}
    again = aws("batch-replace-cluster-nodes", "--cluster-name", arn, "--node-ids", id)
    assert again["Failed"][0]["ErrorCode"] == "InstanceIdInUse"
    gone = aws(
        "batch-delete-cluster-nodes", "--cluster-name", arn, "--node-ids", "i-0123456789abcdef0"
    )
    assert gone["Failed"][0]["Code"] == "NodeIdNotFound"
    aws("add-tags", "--resource-arn", arn, "--tags", "Key=cost,Value=7")
    tags = aws("list-tags", "--resource-arn", arn)["Tags"]
    assert tags == [{"Key": "cost", "Value": "7"}, {"Key": "team", "Value": "llm"}]
    assert aws("delete-cluster", "--cluster-name", "ml-cluster") == {"ClusterArn": arn}
    aws.running.until(lambda: names_of_clusters(aws), lambda found: "ml-cluster" not in found)
    assert aws("list-clusters", "--name-contains", "ml-cluster") == {"ClusterSummaries": []}


def test_what_is_wrong_is_said_by_the_server(aws: Aws) -> None:
    wrong = [{**GROUPS[0], "InstanceCount": 7000, "InstanceType": "ml.none"}]
    said = aws.refused(
        "create-cluster", "--cluster-name", "a", "--instance-groups", aws.file("bad.json", wrong)
    )
    assert "(ValidationException)" in said
    assert "2 validation errors detected" in said
    assert "at 'instanceGroups.1.member.instanceCount' failed to satisfy constraint" in said
    said = aws.refused("describe-cluster", "--cluster-name", "none")
    assert "(ResourceNotFound)" in said
    assert "Cluster with name none not found" in said
    said = aws.refused("list-compute-quotas")
    assert "(UnsupportedOperationException)" in said


def test_boto3_pages_through_lists_and_knows_the_errors(aws: Aws) -> None:
    group = {**GROUPS[0], "InstanceGroupName": "workers", "InstanceCount": 3}
    aws(
        *("create-cluster", "--cluster-name", "flow", "--node-provisioning-mode", "Continuous"),
        *("--instance-groups", aws.file("flow.json", [group])),
    )
    aws.until_groups("flow", "InService")
    found = json.loads(aws.run("python", "-c", PAGES, "flow").stdout)
    assert found["pages"] == 3
    assert len(set(found["nodes"])) == 3
    assert "Cluster flow is InService" in found["events"]
    assert len(found["events"]) == len(set(found["events"]))
    assert "Scaling" in found["operations"]
    assert found["created"] >= 2025
    for error in ("ResourceNotFound", "ResourceInUse", "ConflictException"):
        assert found[error] == 400
    aws("delete-cluster", "--cluster-name", "flow")


def test_a_key_that_is_not_known_is_refused(aws: Aws) -> None:
    known = aws.environment["AWS_SECRET_ACCESS_KEY"]
    aws.environment["AWS_SECRET_ACCESS_KEY"] = "another"
    try:
        said = aws.refused("list-clusters")
    finally:
        aws.environment["AWS_SECRET_ACCESS_KEY"] = known
    assert "(InvalidSignatureException)" in said
