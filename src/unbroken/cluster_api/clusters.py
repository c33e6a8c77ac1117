"""CreateCluster, UpdateCluster, UpdateClusterSoftware, DeleteCluster.

Each writes what is wanted into the Cluster object and answers; `operator/clusters/controller` does
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unbroken.core.clusters.groups import is_continuous, retargeted
from unbroken.core.clusters.state import ClusterPhase, ClusterState, SoftwareUpdate
from unbroken.kube.errors import AlreadyExists
from unbroken.spec.keys import CLUSTER_ARN, CLUSTER_FINALIZER, CLUSTER_ID
from unbroken.spec.nodes.cluster import ClusterSpec
from unbroken.spec.nodes.kinds import CLUSTER
from unbroken.spec.nodes.values import Recovery

from .calls import Call, CallContext, Object
from .errors import conflict, in_use, invalid
from .groups import added, check_change, check_limit, check_request, places
from .store import Stored
from .tags import tags_of

ID_DIGITS = 12
SETTLED = (ClusterPhase.IN_SERVICE.value, ClusterPhase.FAILED.value)


async def create_cluster(call: Call) -> Object:
    """CreateCluster."""
    around, body = call.context, call.body
    check_request(body)
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
        node_recovery=Recovery(body.get("NodeRecovery") or Recovery.AUTOMATIC.value),
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


async def update_cluster(call: Call) -> Object:
    """UpdateCluster."""
    check_request(call.body)
    stored = await call.store.change(
        call.text("ClusterName"), lambda result: (_updated(call, result), {})
    )
    return {"ClusterArn": stored.arn}


def _updated(call: Call, stored: Stored) -> ClusterSpec:
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
        node_recovery=Recovery(recovery),
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


async def update_cluster_software(call: Call) -> Object:
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


async def delete_cluster(call: Call) -> Object:
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
