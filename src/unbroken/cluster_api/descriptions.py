"""DescribeCluster and ListClusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from unbroken.core.clusters.groups import instance_types, node_config
from unbroken.core.clusters.state import GroupPhase, GroupState, OperationStatus, OperationType

from .calls import Call, Object
from .pages import Key, is_between, page
from .store import Stored, StoredMachine

KEPT = ("VpcConfig", "Orchestrator", "TieredStorageConfig", "NodeProvisioningMode", "ClusterRole")
"""Members of CreateCluster that DescribeCluster gives back as they came."""
KEPT_OF_GROUPS = (
    *("InstanceType", "LifeCycleConfig", "ExecutionRole", "ThreadsPerCore"),
    *("InstanceStorageConfigs", "OnStartDeepHealthChecks", "TrainingPlanArn", "OverrideVpcConfig"),
    *("ScheduledUpdateConfig", "CapacityRequirements", "NetworkInterface"),
)


async def describe_cluster(call: Call) -> Object:
    """DescribeCluster."""
    stored = await call.store.find(call.text("ClusterName"))
    machines = await call.store.machines(stored)
    request = stored.spec.request
    answer: Object = {
        "ClusterArn": stored.arn,
        "ClusterName": stored.spec.name,
        "ClusterStatus": stored.phase,
        "CreationTime": stored.created_at,
        "InstanceGroups": [
            _group(stored, item, machines) for item in request.get("InstanceGroups") or ()
        ],
        "NodeRecovery": stored.spec.node_recovery.value,
        **{name: request[name] for name in KEPT if name in request},
    }
    if stored.status.message:
        answer["FailureMessage"] = stored.status.message
    if "AutoScaling" in request:
        answer["AutoScaling"] = {**request["AutoScaling"], "Status": "InService"}
    return answer


def _group(stored: Stored, request: Mapping[str, Any], machines: Sequence[StoredMachine]) -> Object:
    name = request["InstanceGroupName"]
    state = stored.state.group(name) or GroupState(name)
    target = len(stored.spec.targets.get(name) or ())
    types = instance_types(request)
    mine = [machine for machine in machines if machine.spec.instance_group == name]
    counts = Counter(stored_machine.spec.instance_type for stored_machine in mine)
    result: Object = {
        "InstanceGroupName": name,
        "CurrentCount": state.current,
        "TargetCount": target,
        "TargetStateCount": sum(
            instance.group == name and instance.phase.value == "Running"
            for instance in stored.state.instances
        ),
        "InstanceTypeDetails": [
            {"InstanceType": kind, "CurrentCount": counts[kind]} for kind in types
        ],
        "Status": _phase(stored, state),
        **{key: request[key] for key in KEPT_OF_GROUPS if key in request},
    }
    if "MinInstanceCount" in request:
        result["MinCount"] = request["MinInstanceCount"]
    if "InstanceRequirements" in request:
        both = {"CurrentInstanceTypes": list(types), "DesiredInstanceTypes": list(types)}
        result["InstanceRequirements"] = both
    if "ImageId" in request:
        result["DesiredImageId"] = request["ImageId"]
    if "AutoPatchConfig" in request:
        patching = request["AutoPatchConfig"]
        result["AutoPatchConfig"] = {
            key: item for key, item in patching.items() if key != "PatchSchedule"
        }
    if "KubernetesConfig" in request:
        result["KubernetesConfig"] = kubernetes_details(
            request["KubernetesConfig"], next(iter(mine), None)
        )
    _add_operations(result, stored, name)
    return result


def _phase(stored: Stored, state: GroupState) -> str:
    if stored.is_deleting:
        return GroupPhase.DELETING.value
    is_updating = stored.state.update is not None and state.name in stored.state.update.groups
    return GroupPhase.SYSTEM_UPDATING.value if is_updating else state.phase.value


def _add_operations(found: Object, stored: Stored, name: str) -> None:
    scaling = sum(
        detail.group == name and detail.status is OperationStatus.IN_PROGRESS
        for operation in stored.state.operations
        if operation.type is OperationType.SCALING
        for detail in operation.scaling
    )
    if scaling:
        found["ActiveOperations"] = {OperationType.SCALING.value: scaling}
    if stored.state.update is not None and name in stored.state.update.groups:
        found["SoftwareUpdateStatus"] = "InProgress"
    elif name in stored.state.updated:
        found["SoftwareUpdateStatus"] = "Succeeded"


def kubernetes_details(config: Mapping[str, Any], machine: StoredMachine | None) -> Object:
    """A KubernetesConfig as groups and nodes show it: what they have and what they are to have.

    `machine`: the one whose labels and taints are the current ones; None: there is none.
    """
    result: Object = {}
    if config.get("Labels"):
        result["DesiredLabels"] = config["Labels"]
    if config.get("Taints"):
        result["DesiredTaints"] = config["Taints"]
    if machine is None:
        return result
    own = node_config(machine.spec)
    taints = [
        {
            "Key": taint.key,
            "Effect": taint.effect,
            **({"Value": taint.value} if taint.value else {}),
        }
        for taint in own.taints
    ]
    current = {"CurrentLabels": own.labels, "CurrentTaints": taints}
    return {**{key: one for key, one in current.items() if one}, **result}


async def list_clusters(call: Call) -> Object:
    """ListClusters."""
    body = call.body
    plan, part = body.get("TrainingPlanArn"), call.text("NameContains")
    chosen = [
        cluster
        for cluster in await call.store.clusters()
        if part.lower() in cluster.spec.name.lower()
        and is_between(cluster.created_at, body, "CreationTime")
        and (plan is None or plan in _plans(cluster))
    ]

    def key(stored: Stored) -> Key:
        by_name = body.get("SortBy") == "NAME"
        return stored.spec.name if by_name else stored.created_at, stored.object_name

    result, token = page(chosen, key, body, is_descending=body.get("SortOrder") == "Descending")
    summaries = [_summary(stored) for stored in result]
    return {"ClusterSummaries": summaries, **({"NextToken": token} if token else {})}


def _summary(stored: Stored) -> Object:
    result: Object = {
        "ClusterArn": stored.arn,
        "ClusterName": stored.spec.name,
        "CreationTime": stored.created_at,
        "ClusterStatus": stored.phase,
    }
    if plans := _plans(stored):
        result["TrainingPlanArns"] = plans
    return result


def _plans(stored: Stored) -> list[str]:
    groups = stored.spec.request.get("InstanceGroups") or ()
    return sorted({group["TrainingPlanArn"] for group in groups if "TrainingPlanArn" in group})
