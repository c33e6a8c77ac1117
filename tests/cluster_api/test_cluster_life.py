"""Clusters over their life: what the operations answer, and what becomes of machines and nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.apiservers import Cluster
from tests.cluster_api.api_program import Hands, Running, running_api

ROLE = "arn:aws:iam::123456789012:role/worker"
pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[pytest.param("real", marks=pytest.mark.realkube), "embedded"]
)
def running(
    request: pytest.FixtureRequest, clusters: Callable[[str], Cluster]
) -> Iterator[Running]:
    """The cluster API over each of the two API servers."""
    with running_api(clusters(request.param)) as found:
        yield found


def group(name: str = "workers", count: int = 2, **more: Any) -> dict[str, Any]:
    """An instance group."""
    return {
        "InstanceGroupName": name,
        "InstanceType": "ml.p5.48xlarge",
        "InstanceCount": count,
        "ExecutionRole": ROLE,
        **more,
    }


def test_a_cluster_is_created_scaled_and_deleted(running: Running) -> None:
    made = running.ok(
        "CreateCluster",
        ClusterName="Life",
        InstanceGroups=[group(), group("head", 1)],
        Tags=[{"Key": "team", "Value": "a"}],
    )
    arn = made["ClusterArn"]
    assert arn.startswith("arn:aws:sagemaker:us-west-2:123456789012:cluster/")
    found = running.until_phase("Life", "InService")
    assert found["ClusterArn"] == arn
    assert running.ok("DescribeCluster", ClusterName=arn)["ClusterName"] == "Life"
    assert [(one["InstanceGroupName"], one["CurrentCount"], one["TargetCount"], one["Status"])
            for one in found["InstanceGroups"]] == [
        ("workers", 2, 2, "InService"), ("head", 1, 1, "InService")]  # fmt: skip
    assert found["NodeRecovery"] == "Automatic"
    nodes = [one for one in running.objects("nodes") if one["metadata"]["name"][:9] == "hyperpod-"]
    labels = nodes[0]["metadata"]["labels"]
    assert labels["sagemaker.amazonaws.com/cluster-name"] == "Life"
    assert labels["sagemaker.amazonaws.com/node-health-status"] == "Schedulable"
    assert running.call("CreateCluster", ClusterName="Life", InstanceGroups=[group()]).code == (
        "ResourceInUse"
    )
    running.ok(
        "UpdateCluster",
        ClusterName="Life",
        InstanceGroups=[group(count=3)],
        InstanceGroupsToDelete=["head"],
        NodeRecovery="None",
    )
    running.until(
        lambda: running.ok("DescribeCluster", ClusterName="Life"),
        lambda now: (
            now["ClusterStatus"] == "InService"
            and [(g["InstanceGroupName"], g["CurrentCount"]) for g in now["InstanceGroups"]]
            == [("workers", 3)]
        ),
    )
    assert running.ok("DescribeCluster", ClusterName="Life")["NodeRecovery"] == "None"
    running.gone("Life")
    assert running.call("DeleteCluster", ClusterName="Life").code == "ResourceNotFound"
    assert running.call("DescribeCluster", ClusterName=arn).code == "ResourceNotFound"
    assert not [one for one in running.objects("machines") if one["spec"]["cluster"] == "life"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"InstanceGroups": [group(), group()]}, "given twice"),
        ({"InstanceGroups": [group(InstanceRequirements={"InstanceTypes": ["ml.g5.xlarge"]})]},
         "give one of InstanceType and InstanceRequirements"),
        ({"InstanceGroups": [group(MinInstanceCount=3)]}, "above InstanceCount"),
        ({"InstanceGroups": [group(SlurmConfig={"NodeType": "Login"})]}, "Slurm is not offered"),
        ({"InstanceGroups": [group(LifeCycleConfig={"OnCreate": "a.sh"})]}, "needs SourceS3Uri"),
        ({"InstanceGroups": []}, "Member must have length greater than or equal to 1"),
        ({}, "A cluster needs InstanceGroups"),
        ({"InstanceGroups": [group()], "Orchestrator": {"Slurm": {}}}, "Slurm is not offered"),
        ({"InstanceGroups": [group()], "AutoScaling": {"Mode": "Enable"}}, "not offered"),
        ({"InstanceGroups": [group()], "TieredStorageConfig": {"Mode": "Enable"}},
         "checkpointMemory.enabled"),
        ({"InstanceGroups": [group()],
          "Tags": [{"Key": "a", "Value": ""}, {"Key": "a", "Value": "b"}]}, "Duplicate tag"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_once(
    running: Running, change: dict[str, Any], words: str
) -> None:
    answer = running.call("CreateCluster", ClusterName="never", **change)
    assert answer.code == "ValidationException"
    assert words in answer.message
    assert running.call("DescribeCluster", ClusterName="never").code == "ResourceNotFound"


def test_a_name_is_taken_whatever_its_capitals(running: Running) -> None:
    running.ok("CreateCluster", ClusterName="Caps", InstanceGroups=[group(count=0)])
    answer = running.call("CreateCluster", ClusterName="caps", InstanceGroups=[group(count=0)])
    assert answer.code == "ResourceInUse"
    for name in ("caps", "CAPS", "Caps"):
        found = running.ok("DescribeCluster", ClusterName=name)
        assert found["ClusterName"] == "Caps"
        assert running.ok("ListClusterNodes", ClusterName=name)["ClusterNodeSummaries"] == []
    running.ok("UpdateCluster", ClusterName="CAPS", NodeRecovery="None")
    assert running.ok("DescribeCluster", ClusterName="caps")["NodeRecovery"] == "None"
    running.gone("caps")


def test_a_creation_that_fails_says_why(running: Running, hands: Hands) -> None:
    hands.fails.add("broken")
    running.ok("CreateCluster", ClusterName="fails", InstanceGroups=[group("broken", 1)])
    found = running.until_phase("fails", "Failed")
    assert "OnCreate ended with 1" in found["FailureMessage"]
    [node] = running.ok("ListClusterNodes", ClusterName="fails")["ClusterNodeSummaries"]
    assert node["InstanceStatus"] == {"Status": "Failure", "Message": "OnCreate ended with 1"}
    running.gone("fails")


def test_an_update_that_fails_is_rolled_back(running: Running, hands: Hands) -> None:
    running.ok("CreateCluster", ClusterName="rolls", InstanceGroups=[group(count=1)])
    running.until_phase("rolls", "InService")
    hands.fails.add("more")
    running.ok("UpdateCluster", ClusterName="rolls", InstanceGroups=[group("more", 1)])
    found = running.until(
        lambda: running.ok("DescribeCluster", ClusterName="rolls"),
        lambda now: now["ClusterStatus"] == "InService" and "FailureMessage" in now,
    )
    assert [one["TargetCount"] for one in found["InstanceGroups"]] == [1, 0]
    running.gone("rolls")


def own_taints(node: Any) -> list[tuple[str, str]]:
    """Key and effect of all but those that Kubernetes puts on a node."""
    found = [(one["key"], one["effect"]) for one in node["spec"].get("taints") or ()]
    return [one for one in found if not one[0].startswith("node.kubernetes.io/")]


def test_nodes_follow_the_labels_and_taints_of_their_group(running: Running) -> None:
    def workers(labels: dict[str, str], *taints: tuple[str, str]) -> dict[str, Any]:
        asked = [{"Key": key, "Value": "x", "Effect": effect} for key, effect in taints]
        return group(count=1, KubernetesConfig={"Labels": labels, "Taints": asked})

    first = workers({"team": "a", "tier": "1"}, ("dedicated", "NoSchedule"))
    running.ok("CreateCluster", ClusterName="dress", InstanceGroups=[first])
    running.until_phase("dress", "InService")
    [node] = [one for one in running.objects("nodes") if one["metadata"]["labels"].get("tier")]
    path = f"/api/v1/nodes/{node['metadata']['name']}"
    mine = {"key": "mine", "effect": "NoExecute"}
    taints = [mine, *node["spec"]["taints"]]
    own = {"metadata": {"labels": {"own": "kept"}}, "spec": {"taints": taints}}
    running.api.patch("merge", path, own).done()

    second = workers({"team": "b", "zone": "z"}, ("dedicated", "NoExecute"))
    running.ok("UpdateCluster", ClusterName="dress", InstanceGroups=[second])
    [shown] = running.until(
        lambda: running.ok("DescribeCluster", ClusterName="dress")["InstanceGroups"],
        lambda found: found[0]["KubernetesConfig"]["CurrentLabels"] == {"team": "b", "zone": "z"},
    )
    config = shown["KubernetesConfig"]
    assert config["DesiredLabels"] == config["CurrentLabels"]
    assert config["DesiredTaints"] == config["CurrentTaints"]
    now = running.api.get(path).made
    labels = {key: now["metadata"]["labels"].get(key) for key in ("team", "tier", "zone", "own")}
    assert labels == {"team": "b", "tier": None, "zone": "z", "own": "kept"}
    assert own_taints(now) == [("mine", "NoExecute"), ("dedicated", "NoExecute")]

    running.ok("UpdateCluster", ClusterName="dress", InstanceGroups=[group(count=1)])
    bare = running.until(
        lambda: running.api.get(path).made,
        lambda found: own_taints(found) == [("mine", "NoExecute")],
    )
    assert bare["metadata"]["labels"].keys().isdisjoint(("team", "zone"))
    assert bare["metadata"]["labels"]["sagemaker.amazonaws.com/instance-group-name"] == "workers"
    running.gone("dress")


def test_an_update_waits_for_the_one_before(running: Running, hands: Hands) -> None:
    hands.fails.add("slow")
    running.ok("CreateCluster", ClusterName="waits", InstanceGroups=[group("slow", 1)])
    answer = running.call("UpdateCluster", ClusterName="waits", InstanceGroups=[group("slow", 2)])
    # It is Creating, or has Failed already: then an update may repair it.
    assert answer.code in ("ConflictException", "")
    running.until_phase("waits", "Failed")
    text = running.call(
        "UpdateCluster",
        ClusterName="waits",
        InstanceGroups=[group("slow", 1, InstanceType="ml.g5.xlarge")],
    )
    assert "the instance type cannot be changed" in text.message
    for change, words in (
        ({"InstanceGroupsToDelete": ["none"]}, "no instance group 'none'"),
        ({"InstanceGroupsToDelete": ["slow"]}, "at least one instance group"),
        ({"NodeProvisioningMode": "Continuous"}, "cannot be changed"),
    ):
        refused = running.call("UpdateCluster", ClusterName="waits", **change)
        assert (refused.code, words in refused.message) == ("ValidationException", True), refused
    running.gone("waits")


def test_nodes_are_listed_described_and_deleted(running: Running) -> None:
    running.ok("CreateCluster", ClusterName="nodes", InstanceGroups=[group(count=3)])
    running.until_phase("nodes", "InService")
    listed = running.ok("ListClusterNodes", ClusterName="nodes", SortBy="NAME")
    ids = [one["InstanceId"] for one in listed["ClusterNodeSummaries"]]
    assert ids == sorted(ids)
    assert len(ids) == 3
    details = running.ok("DescribeClusterNode", ClusterName="nodes", NodeId=ids[0])["NodeDetails"]
    assert details["InstanceStatus"] == {"Status": "Running"}
    assert details["PrivatePrimaryIp"] == "10.9.8.7"
    logical_id = details["NodeLogicalId"]
    same = running.ok("DescribeClusterNode", ClusterName="nodes", NodeLogicalId=logical_id)
    assert same["NodeDetails"] == details
    for members in ({}, {"NodeId": ids[0], "NodeLogicalId": logical_id}):
        refused = running.call("DescribeClusterNode", ClusterName="nodes", **members)
        assert refused.code == "ValidationException"
    done = running.ok(
        "BatchDeleteClusterNodes", ClusterName="nodes", NodeIds=[ids[0], "i-00000000"]
    )
    assert done["Successful"] == [ids[0]]
    [failed] = done["Failed"]
    assert (failed["NodeId"], failed["Code"]) == ("i-00000000", "NodeIdNotFound")
    found = running.until(
        lambda: running.ok("DescribeCluster", ClusterName="nodes"),
        lambda now: (
            now["ClusterStatus"] == "InService" and now["InstanceGroups"][0]["CurrentCount"] == 2
        ),
    )
    assert found["InstanceGroups"][0]["TargetCount"] == 2
    left = running.ok("ListClusterNodes", ClusterName="nodes", SortBy="NAME")
    assert [one["InstanceId"] for one in left["ClusterNodeSummaries"]] == ids[1:]
    running.gone("nodes")


def test_a_reboot_is_ordered_of_the_repairer_once(running: Running) -> None:
    running.ok("CreateCluster", ClusterName="boots", InstanceGroups=[group(count=1)])
    running.until_phase("boots", "InService")
    [node] = running.ok("ListClusterNodes", ClusterName="boots")["ClusterNodeSummaries"]
    id = node["InstanceId"]
    answer = running.ok("BatchRebootClusterNodes", ClusterName="boots", NodeIds=[id])
    assert answer == {"Successful": [id]}
    metadata = running.api.get(f"/api/v1/nodes/hyperpod-{id}").made["metadata"]
    assert metadata["annotations"]["unbroken.dev/repair"] == "reboot"
    again = running.ok("BatchReplaceClusterNodes", ClusterName="boots", NodeIds=[id])
    assert again["Failed"][0]["ErrorCode"] == "InstanceIdInUse"
    assert "a reboot of the node was ordered already" in again["Failed"][0]["Message"]
    refused = running.call("BatchRebootClusterNodes", ClusterName="boots")
    assert "Give NodeIds or NodeLogicalIds" in refused.message
    running.gone("boots")


def test_continuous_clusters_have_events_operations_and_batches(running: Running) -> None:
    running.ok(
        "CreateCluster",
        ClusterName="flows",
        InstanceGroups=[group(count=1)],
        NodeProvisioningMode="Continuous",
    )
    running.until(
        lambda: running.ok("DescribeCluster", ClusterName="flows"),
        lambda now: (
            now["ClusterStatus"] == "InService"
            and now["InstanceGroups"][0]["Status"] == "InService"
        ),
    )
    adding = {"InstanceGroupName": "workers", "IncrementTargetCountBy": 2}
    missing = {"InstanceGroupName": "none", "IncrementTargetCountBy": 1}
    asked = {"ClusterName": "flows", "NodesToAdd": [adding, missing], "ClientToken": "once"}
    first = running.ok("BatchAddClusterNodes", **asked)
    assert [one["Status"] for one in first["Successful"]] == ["Pending", "Pending"]
    assert first["Failed"][0]["ErrorCode"] == "InstanceGroupNotFound"
    again = running.ok("BatchAddClusterNodes", **asked)
    ids = [one["NodeLogicalId"] for one in first["Successful"]]
    assert [one["NodeLogicalId"] for one in again["Successful"]] == ids
    other = running.call("BatchAddClusterNodes", **{**asked, "NodesToAdd": [adding]})
    assert "ClientToken was used for another" in other.message
    found = running.until(
        lambda: running.ok("DescribeCluster", ClusterName="flows"),
        lambda now: now["InstanceGroups"][0]["CurrentCount"] == 3,
    )
    assert found["InstanceGroups"][0]["TargetCount"] == 3
    running.ok("BatchDeleteClusterNodes", ClusterName="flows", NodeLogicalIds=ids[:1])
    operations = running.until(
        lambda: running.ok("ListClusterOperations", ClusterName="flows"),
        lambda now: (
            len(now["ClusterOperationSummaries"]) == 3
            and {one["Status"] for one in now["ClusterOperationSummaries"]} == {"Done"}
        ),
    )["ClusterOperationSummaries"]
    described = running.ok(
        "DescribeClusterOperation",
        ClusterName="flows",
        OperationId=operations[0]["OperationId"],
    )
    [scaling] = described["ScalingDetails"]
    assert scaling["Original"]["TargetCount"] == 3
    assert scaling["Desired"]["TargetCount"] == 2
    events = running.ok("ListClusterEvents", ClusterName="flows")["Events"]
    times = [one["EventTime"] for one in events]
    assert times == sorted(times, reverse=True)
    [instance, *_] = [one for one in events if one["ResourceType"] == "Instance"]
    detail = running.ok("DescribeClusterEvent", ClusterName="flows", EventId=instance["EventId"])[
        "EventDetails"
    ]
    assert "NodeLogicalId" in detail["EventDetails"]["EventMetadata"]["Instance"]
    few = running.ok("ListClusterEvents", ClusterName="flows", ResourceType="Cluster")["Events"]
    assert few
    assert {one["ResourceType"] for one in few} == {"Cluster"}
    running.gone("flows")


def test_what_needs_continuous_provisioning_says_so(running: Running) -> None:
    running.ok("CreateCluster", ClusterName="classic", InstanceGroups=[group(count=0)])
    adding = {"InstanceGroupName": "workers", "IncrementTargetCountBy": 1}
    for operation, members in (
        ("ListClusterEvents", {}),
        ("DescribeClusterEvent", {"EventId": "01234567-89ab-cdef-0123-456789abcdef"}),
        ("BatchAddClusterNodes", {"NodesToAdd": [adding]}),
        ("BatchRebootClusterNodes", {"NodeLogicalIds": ["workers-1"]}),
    ):
        answer = running.call(operation, ClusterName="classic", **members)
        assert answer.code == "ValidationException", operation
        assert "Continuous" in answer.message
    running.gone("classic")


def test_one_check_on_demand_at_a_time(running: Running) -> None:
    running.ok("CreateCluster", ClusterName="checks", InstanceGroups=[group()])
    running.until_phase("checks", "InService")
    configuration = {"InstanceGroupName": "workers", "DeepHealthChecks": ["InstanceStress"]}
    more = {"InstanceGroupName": "workers", "DeepHealthChecks": ["InstanceConnectivity"]}
    asked = {"ClusterName": "checks", "DeepHealthCheckConfigurations": [configuration, more]}
    running.ok("StartClusterHealthCheck", **asked)
    assert running.call("StartClusterHealthCheck", **asked).code == "ConflictException"
    [check] = running.until(
        lambda: [
            one
            for one in running.objects("nodechecks")
            if one["metadata"]["labels"]["unbroken.dev/cluster"] == "checks"
        ],
        lambda found: found,
    )
    assert check["spec"]["kinds"] == ["InstanceStress", "InstanceConnectivity"]
    assert len(check["spec"]["nodes"]) == 2
    with running.run_checker():
        running.until(
            lambda: running.ok(
                "ListClusterOperations", ClusterName="checks", Type="DeepHealthCheck"
            ),
            lambda found: found["ClusterOperationSummaries"][0]["Status"] == "Done",
        )
    running.ok("StartClusterHealthCheck", **asked)
    missing = {**configuration, "InstanceIds": ["i-00000000"]}
    wrong = {"ClusterName": "checks", "DeepHealthCheckConfigurations": [missing]}
    assert running.call("StartClusterHealthCheck", **wrong).code in (
        "ResourceNotFound",
        "ConflictException",
    )
    running.gone("checks")


def test_new_nodes_take_pods_only_when_checked(running: Running) -> None:
    deep = group(count=1, OnStartDeepHealthChecks=["InstanceStress"])
    running.ok("CreateCluster", ClusterName="deep", InstanceGroups=[deep])
    [summary] = running.until(
        lambda: running.ok("ListClusterNodes", ClusterName="deep")["ClusterNodeSummaries"],
        lambda found: found and found[0]["InstanceStatus"]["Status"] == "DeepHealthCheckInProgress",
    )
    path = f"/api/v1/nodes/hyperpod-{summary['InstanceId']}"
    node = running.api.get(path).made
    assert "sagemaker.amazonaws.com/node-health-status" in [
        one["key"] for one in node["spec"]["taints"]
    ]
    with running.run_checker():
        running.until_phase("deep", "InService")
    node = running.api.get(path).made
    labels = node["metadata"]["labels"]
    # Nothing runs on these nodes: the check could not be made, and blames nobody.
    assert labels["sagemaker.amazonaws.com/node-health-status"] == "Schedulable"
    assert "sagemaker.amazonaws.com/deep-health-check-status" not in labels
    # The real API server has a taint of its own on nodes that it has not seen ready.
    keys = [one["key"] for one in node["spec"].get("taints") or ()]
    assert "sagemaker.amazonaws.com/node-health-status" not in keys
    running.gone("deep")


def test_software_is_updated_by_replacing_nodes(running: Running) -> None:
    running.ok("CreateCluster", ClusterName="soft", InstanceGroups=[group(count=2)])
    running.until_phase("soft", "InService")
    one_at_a_time = {"MaximumBatchSize": {"Type": "INSTANCE_COUNT", "Value": 1}}
    deployment = {"RollingUpdatePolicy": one_at_a_time}
    running.ok("UpdateClusterSoftware", ClusterName="soft", DeploymentConfig=deployment)
    assert running.call("UpdateClusterSoftware", ClusterName="soft").code == "ConflictException"
    replaced: set[str] = set()

    def ordered() -> list[str]:
        return [
            one["metadata"]["name"]
            for one in running.objects("nodes")
            if (one["metadata"].get("annotations") or {}).get("unbroken.dev/repair") == "replace"
            and one["metadata"]["name"] not in replaced
        ]

    for _ in range(2):
        # The repairer's part: the machine goes, and the controller fills its place.
        [name] = running.until(ordered, lambda found: found)
        replaced.add(name)
        running.api.delete(f"/apis/unbroken.dev/v1/machines/{name}").done()
    found = running.until_phase("soft", "InService")
    assert found["InstanceGroups"][0]["SoftwareUpdateStatus"] == "Succeeded"
    running.gone("soft")


def test_tags_are_added_listed_and_deleted(running: Running) -> None:
    tags = [{"Key": "team", "Value": "a"}, {"Key": "cost", "Value": "1"}]
    made = running.ok(
        "CreateCluster", ClusterName="tags", InstanceGroups=[group(count=0)], Tags=tags
    )
    arn = made["ClusterArn"]
    assert running.ok("ListTags", ResourceArn=arn)["Tags"] == sorted(tags, key=lambda t: t["Key"])
    running.ok("AddTags", ResourceArn=arn, Tags=[{"Key": "team", "Value": "b"}])
    running.ok("DeleteTags", ResourceArn=arn, TagKeys=["cost", "none"])
    assert running.ok("ListTags", ResourceArn=arn)["Tags"] == [{"Key": "team", "Value": "b"}]
    many = [{"Key": f"k{one}", "Value": ""} for one in range(50)]
    assert running.call("AddTags", ResourceArn=arn, Tags=many).code == "ResourceLimitExceeded"
    other = arn.replace(":cluster/", ":endpoint/")
    assert running.call("ListTags", ResourceArn=other).code == "ValidationException"
    running.gone("tags")


def test_pages_follow_each_other_without_a_gap(running: Running) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        running.ok("CreateCluster", ClusterName=name, InstanceGroups=[group(count=0)])
    query = {"NameContains": "page-", "MaxResults": 2, "SortBy": "NAME", "SortOrder": "Descending"}
    first = running.ok("ListClusters", **query)
    assert [one["ClusterName"] for one in first["ClusterSummaries"]] == ["page-4", "page-3"]
    running.gone("page-3")
    second = running.ok("ListClusters", **query, NextToken=first["NextToken"])
    third = running.ok("ListClusters", **query, NextToken=second["NextToken"])
    rest = [one["ClusterName"] for page in (second, third) for one in page["ClusterSummaries"]]
    assert rest == ["page-2", "page-1", "page-0"]
    assert "NextToken" not in third
    for token, changes in (("garbage", {}), (first["NextToken"], {"SortBy": "CREATION_TIME"})):
        answer = running.call("ListClusters", **{**query, **changes, "NextToken": token})
        assert answer.code == "ValidationException"
        assert "NextToken" in answer.message
    later = running.ok("ListClusters", NameContains="page-", CreationTimeAfter=4e9)
    assert later["ClusterSummaries"] == []
    for name in names:
        if name != "page-3":
            running.gone(name)
