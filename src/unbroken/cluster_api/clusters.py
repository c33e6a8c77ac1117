"""Operations on clusters: create, update, delete, describe, list, and their tags.

Each change writes what is wanted into the Cluster object and answers;
`operator/clusters` does it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unbroken.core.clusters.groups import instance_types, is_continuous, node_config, retargeted
from unbroken.core.clusters.state import (
    ClusterPhase,
    ClusterState,
    GroupPhase,
    GroupState,
    InstancePhase,
    OperationStatus,
    OperationType,
    SoftwareUpdate,
)
from unbroken.errors import SpecError
from unbroken.kube.client import Object
from unbroken.kube.errors import AlreadyExists
from unbroken.spec.keys import CLUSTER_ARN, CLUSTER_FINALIZER, CLUSTER_ID
from unbroken.spec.nodes.kinds import CLUSTER, ClusterSpec, script_names
from unbroken.spec.nodes.values import NodeRecovery

from .errors import conflict, in_use, invalid, limit_exceeded
from .shapes import Key, is_between, page
from .store import ARN, ApiCall, CallContext, Stored, StoredMachine

TAGS_MAX = 50
"""Most tags of one resource (TagList, API 2017-07-24)."""


def tags_of(given: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Tags by key; ValidationException for a key that is given twice."""
    result: dict[str, str] = {}
    for item in given:
        if item["Key"] in result:
            raise invalid(f"Duplicate tag keys: '{item['Key']}'")
        if item["Key"].lower().startswith("aws:"):
            raise invalid(f"Tag keys must not begin with 'aws:': '{item['Key']}'")
        result[item["Key"]] = item["Value"]
    return result


async def add_tags(call: ApiCall) -> Object:
    """AddTags: adds, and overwrites what has the same key."""
    new = tags_of(call.body["Tags"])

    def change(stored: Stored) -> tuple[ClusterSpec, Object]:
        tags = {**stored.spec.tags, **new}
        if len(tags) > TAGS_MAX:
            raise limit_exceeded(f"{len(tags)} tags; a resource has at most {TAGS_MAX}")
        return replace(stored.spec, tags=tags), {}

    stored = await call.store.change(_cluster(call), change)
    return {"Tags": _listed(stored.spec.tags)}


async def list_tags(call: ApiCall) -> Object:
    """ListTags."""
    stored = await call.store.find(_cluster(call))
    tags = _listed(stored.spec.tags)
    result, token = page(tags, lambda item: ("", item["Key"]), call.body, is_descending=False)
    return {"Tags": result, **({"NextToken": token} if token else {})}


async def delete_tags(call: ApiCall) -> Object:
    """DeleteTags; keys that are not there are no error."""
    gone = set(call.body["TagKeys"])

    def change(stored: Stored) -> tuple[ClusterSpec, Object]:
        kept = {key: value for key, value in stored.spec.tags.items() if key not in gone}
        return replace(stored.spec, tags=kept), {}

    await call.store.change(_cluster(call), change)
    return {}


def _cluster(call: ApiCall) -> str:
    arn = call.text("ResourceArn")
    if ARN.fullmatch(arn) is None:
        raise invalid(f"ResourceArn '{arn}': only clusters have tags here")
    return arn


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


KEPT = ("VpcConfig", "Orchestrator", "TieredStorageConfig", "NodeProvisioningMode", "ClusterRole")
"""Members of CreateCluster that DescribeCluster gives back as they came."""
KEPT_OF_GROUPS = (
    *("InstanceType", "LifeCycleConfig", "ExecutionRole", "ThreadsPerCore"),
    *("InstanceStorageConfigs", "OnStartDeepHealthChecks", "TrainingPlanArn", "OverrideVpcConfig"),
    *("ScheduledUpdateConfig", "CapacityRequirements", "NetworkInterface"),
)


async def describe_cluster(call: ApiCall) -> Object:
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


async def list_clusters(call: ApiCall) -> Object:
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


GroupRequest = Mapping[str, Any]
LOGICAL_DIGITS = 8
INSTANCES_MAX = 6758
"""Most instances of a cluster; the largest InstanceCount that the shape allows (API 2017-07-24)."""
NOT_OFFERED = {
    "RestrictedInstanceGroups": "restricted instance groups",
    "RestrictedInstanceGroupsConfig": "restricted instance groups",
}
"""Members of Create- and UpdateCluster that would be promised in vain."""


def check_request(request: GroupRequest) -> None:
    """ValidationException for what CreateCluster and UpdateCluster refuse alike."""
    for member, what in NOT_OFFERED.items():
        if request.get(member):
            raise invalid(f"{member}: {what} are not offered here")
    if (request.get("Orchestrator") or {}).get("Slurm") is not None:
        raise invalid("Orchestrator: Slurm is not offered here; clusters are of Kubernetes (Eks)")
    if (request.get("AutoScaling") or {}).get("Mode") == "Enable":
        raise invalid("AutoScaling: Karpenter is not offered here; change InstanceCount instead")
    groups: Sequence[GroupRequest] = request.get("InstanceGroups") or ()
    names = [group["InstanceGroupName"] for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"Instance group names must be unique: '{name}' is given twice")
    for group in groups:
        _check_group(group)


def _check_tiered_storage(call: ApiCall) -> None:
    """ValidationException for a memory for checkpoints that no node would get."""
    config = call.body.get("TieredStorageConfig") or {}
    if config.get("Mode") != "Enable":
        return
    if not call.context.keeps_checkpoints:
        raise invalid(
            "TieredStorageConfig: in this Kubernetes cluster, checkpointMemory.enabled and "
            "checkpointMemory.memoryGiB of unbroken's chart set the memory for tiered checkpoints "
            "for all nodes; leave TieredStorageConfig out or give Mode Disable"
        )
    if config.get("InstanceMemoryAllocationPercentage") == 0:
        raise invalid(
            "TieredStorageConfig: InstanceMemoryAllocationPercentage must be 1 to 100 with Mode "
            "Enable, not 0; to switch the memory off, give Mode Disable"
        )


def _check_group(group: GroupRequest) -> None:
    name = group["InstanceGroupName"]
    is_single, is_several = "InstanceType" in group, "InstanceRequirements" in group
    if is_single == is_several:
        raise invalid(f"Instance group '{name}': give one of InstanceType and InstanceRequirements")
    if (group.get("MinInstanceCount") or 0) > group["InstanceCount"]:
        raise invalid(f"Instance group '{name}': MinInstanceCount is above InstanceCount")
    if group.get("SlurmConfig") is not None:
        raise invalid(f"Instance group '{name}': Slurm is not offered here")
    capacity = group.get("CapacityRequirements") or {}
    if len(capacity) > 1:
        raise invalid(f"Instance group '{name}': give one of Spot and OnDemand")
    scripts = group.get("LifeCycleConfig") or {}
    has_script = scripts.get("OnCreate") or scripts.get("OnInitComplete")
    if has_script and not scripts.get("SourceS3Uri"):
        raise invalid(f"Instance group '{name}': LifeCycleConfig needs SourceS3Uri")
    _check_scripts(name, scripts)
    checks = group.get("OnStartDeepHealthChecks") or ()
    if len(set(checks)) != len(checks):
        raise invalid(f"Instance group '{name}': OnStartDeepHealthChecks are given twice")


def _check_scripts(name: str, scripts: GroupRequest) -> None:
    """Refuse addresses and file names of scripts that may lead out of their folder."""
    below = str(scripts.get("SourceS3Uri") or "").partition("://")[2].removesuffix("/")
    files = [scripts.get("OnCreate"), scripts.get("OnInitComplete")]
    for path in (one for one in (below, *files) if one):
        try:
            script_names(path)
        except SpecError as error:
            raise invalid(f"Instance group '{name}': LifeCycleConfig: {error}") from error


def check_change(before: GroupRequest, after: GroupRequest) -> None:
    """ValidationException where an existing group is asked to be another."""
    name = after["InstanceGroupName"]
    if instance_types(before) != instance_types(after):
        raise invalid(
            f"Instance group '{name}': the instance type cannot be changed; "
            "add a group of the new type and delete this one"
        )


def places(
    name: str,
    count: int,
    held: Sequence[str],
    state: ClusterState,
    new_hex: Callable[[int], str],
) -> list[str]:
    """Logical ids of a group that is to have so many places.

    What is given up is first what does not run, then what came last.
    """
    if count >= len(held):
        new = (f"{name}-{new_hex(LOGICAL_DIGITS)}" for _ in range(count - len(held)))
        return [*held, *new]
    running = {
        instance.logical_id
        for instance in state.instances
        if instance.phase is InstancePhase.RUNNING
    }
    by_worth = sorted(held, key=lambda one: (one not in running, held.index(one)))
    kept = set(by_worth[:count])
    return [one for one in held if one in kept]


def check_limit(targets: Mapping[str, Sequence[str]]) -> None:
    """ResourceLimitExceeded where a cluster would have too many instances."""
    total = sum(len(ids) for ids in targets.values())
    if total > INSTANCES_MAX:
        raise limit_exceeded(f"{total} instances in a cluster; at most {INSTANCES_MAX}")


def added(held: Mapping[str, Sequence[str]], targets: Mapping[str, Sequence[str]]) -> int:
    """Number of instances in `targets` that are not among those held."""
    return sum(len(set(ids) - set(held.get(group) or ())) for group, ids in targets.items())


def token_places(cluster_id: str, token: str, group: str, number: int, count: int) -> list[str]:
    """Logical ids that a ClientToken stands for: the same each time that it is sent."""
    return [
        f"{group}-{hashlib.sha256(f'{cluster_id}/{token}/{number}/{one}'.encode()).hexdigest()[:LOGICAL_DIGITS]}"
        for one in range(count)
    ]


ID_DIGITS = 12
SETTLED = (ClusterPhase.IN_SERVICE.value, ClusterPhase.FAILED.value)


async def create_cluster(call: ApiCall) -> Object:
    """CreateCluster."""
    around, body = call.context, call.body
    check_request(body)
    _check_tiered_storage(call)
    groups: Sequence[Mapping[str, Any]] = body.get("InstanceGroups") or ()
    if not groups:
        raise invalid("A cluster needs InstanceGroups")
    nothing = ClusterState()
    targets = {
        group["InstanceGroupName"]: places(
            group["InstanceGroupName"], group["InstanceCount"], (), nothing, around.new_hex
        )
        for group in groups
    }
    check_limit(targets)
    call.require_machines(added({}, targets))
    name = call.text("ClusterName")
    spec = ClusterSpec(
        name=name,
        cluster_id=around.new_hex(ID_DIGITS),
        request={key: item for key, item in body.items() if key != "Tags" and item is not None},
        node_recovery=NodeRecovery(body.get("NodeRecovery") or NodeRecovery.AUTOMATIC.value),
        tags=tags_of(body.get("Tags") or ()),
        targets=targets,
    )
    arn = f"arn:aws:sagemaker:{call.region}:{_account(around, groups)}:cluster/{spec.cluster_id}"
    metadata = {
        "labels": {CLUSTER_ID: spec.cluster_id},
        "annotations": {CLUSTER_ARN: arn},
        "finalizers": [CLUSTER_FINALIZER],
    }
    try:
        await call.store.create(CLUSTER.new(name.lower(), spec, metadata))
    except AlreadyExists as error:
        raise in_use(f"A cluster with the name '{name}' exists already") from error
    return {"ClusterArn": arn}


def _account(around: CallContext, groups: Sequence[Mapping[str, Any]]) -> str:
    """The account is that of the first group's role: `arn:aws:iam::ACCOUNT:role/NAME`."""
    parts = str(groups[0]["ExecutionRole"]).split(":")
    return parts[4] or around.account


async def update_cluster(call: ApiCall) -> Object:
    """UpdateCluster."""
    check_request(call.body)
    _check_tiered_storage(call)
    stored = await call.store.change(
        call.text("ClusterName"), lambda result: (_updated(call, result), {})
    )
    return {"ClusterArn": stored.arn}


def _updated(call: ApiCall, stored: Stored) -> ClusterSpec:
    body, spec = call.body, stored.spec
    require_settled(stored, "updated")
    mode = body.get("NodeProvisioningMode")
    if mode is not None and not is_continuous(spec):
        raise invalid("NodeProvisioningMode cannot be changed; create a new cluster")
    groups = {item["InstanceGroupName"]: item for item in spec.request["InstanceGroups"]}
    targets = {name: list(ids) for name, ids in spec.targets.items()}
    gone = _deleted(body, groups)
    for item in body.get("InstanceGroups") or ():
        name = item["InstanceGroupName"]
        if name in groups:
            check_change(groups[name], item)
        groups[name] = item
        held = targets.get(name) or []
        new_hex = call.context.new_hex
        targets[name] = places(name, item["InstanceCount"], held, stored.state, new_hex)
    kept = [group for name, group in groups.items() if name not in gone]
    if not kept:
        raise invalid("A cluster needs at least one instance group; delete the cluster instead")
    targets = {name: ids for name, ids in targets.items() if name not in gone}
    check_limit(targets)
    call.require_machines(added(spec.targets, targets))
    not_members = ("ClusterName", "InstanceGroups", "InstanceGroupsToDelete")
    others = {
        key: item for key, item in body.items() if key not in not_members and item is not None
    }
    recovery = body.get("NodeRecovery") or spec.node_recovery.value
    return replace(
        spec,
        request={**spec.request, **others, "InstanceGroups": kept},
        targets=targets,
        node_recovery=NodeRecovery(recovery),
    )


def _deleted(body: Mapping[str, Any], groups: Mapping[str, Any]) -> set[str]:
    gone = set(body.get("InstanceGroupsToDelete") or ())
    unknown = sorted(gone - groups.keys())
    if unknown:
        raise invalid(f"InstanceGroupsToDelete: no instance group '{unknown[0]}' in the cluster")
    both = sorted(gone & {item["InstanceGroupName"] for item in body.get("InstanceGroups") or ()})
    if both:
        raise invalid(f"Instance group '{both[0]}' is to be updated and to be deleted")
    return gone


def require_settled(stored: Stored, done: str) -> None:
    """ConflictException where the cluster cannot be changed now."""
    name, phase = stored.spec.name, stored.phase
    is_free = is_continuous(stored.spec) and phase != ClusterPhase.DELETING.value
    if stored.state.update is not None:
        raise conflict(f"Cluster '{name}' cannot be {done} while its software is updated")
    if not is_free and phase not in SETTLED:
        raise conflict(f"Cluster '{name}' cannot be {done} while it is {phase}")


async def update_cluster_software(call: ApiCall) -> Object:
    """UpdateClusterSoftware: every machine of the groups is replaced, a batch at a time."""
    name = call.text("ClusterName")
    stored = await call.store.find(name)
    machines = await call.store.machines(stored)

    def change(found: Stored) -> ClusterState:
        require_settled(found, "updated")
        known = [item["InstanceGroupName"] for item in found.spec.request["InstanceGroups"]]
        asked = call.body.get("InstanceGroups")
        groups = [item["InstanceGroupName"] for item in asked] if asked else known
        for group in groups:
            if group not in known:
                raise invalid(f"No instance group '{group}' in cluster '{found.spec.name}'")
        pending = [machine.name for machine in machines if machine.spec.instance_group in groups]
        batch = batch_size(call.body.get("DeploymentConfig"), len(pending))
        update = SoftwareUpdate(call.context.now(), tuple(groups), tuple(pending), batch)
        return replace(found.state, update=update)

    stored = await call.store.change_state(name, change)
    return {"ClusterArn": stored.arn}


def batch_size(deployment: Mapping[str, Any] | None, count: int) -> int:
    """Machines that may be down at once; all of them where nothing was said."""
    policy = (deployment or {}).get("RollingUpdatePolicy")
    if policy is None:
        return max(1, count)
    size = policy["MaximumBatchSize"]
    if size["Type"] == "INSTANCE_COUNT":
        return max(1, int(size["Value"]))
    return max(1, count * min(100, int(size["Value"])) // 100)


async def delete_cluster(call: ApiCall) -> Object:
    """DeleteCluster; again while it is under way is no error."""
    stored = await call.store.find(call.text("ClusterName"))
    await call.store.delete(stored)
    return {"ClusterArn": stored.arn}


def without(spec: ClusterSpec, gone: set[str]) -> ClusterSpec:
    """The spec without some places."""
    fewer = {
        group: [item for item in ids if item not in gone]
        for group, ids in spec.targets.items()
        if gone & set(ids)
    }
    return retargeted(spec, fewer)
