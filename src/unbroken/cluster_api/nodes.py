"""ListClusterNodes and DescribeClusterNode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unbroken.core.clusters.groups import is_continuous
from unbroken.core.clusters.state import InstancePhase, InstanceState, instance_id

from .calls import Call, Object
from .descriptions import kubernetes_details
from .errors import invalid, not_found
from .pages import Key, is_between, page
from .store import Stored, StoredMachine

KEPT_OF_GROUPS = (
    *("LifeCycleConfig", "OverrideVpcConfig", "ThreadsPerCore", "InstanceStorageConfigs"),
    "NetworkInterface",
)


@dataclass(frozen=True, slots=True)
class Instance:
    """A place in a group, with the machine that fills it."""

    state: InstanceState
    machine: StoredMachine | None

    @property
    def id(self) -> str:
        """`i-...`; empty where there is no machine."""
        return instance_id(self.machine.name) if self.machine is not None else ""

    @property
    def status(self) -> Object:
        """ClusterInstanceStatusDetails."""
        message = {"Message": self.state.message} if self.state.message else {}
        return {"Status": self.state.phase.value, **message}


async def instances_of(call: Call, stored: Stored) -> list[Instance]:
    """Every place of a cluster and every machine, those that are on their way out too."""
    known = {instance.machine: instance for instance in stored.state.instances}
    machines = await call.store.machines(stored)
    instances = [Instance(_state(known, machine), machine) for machine in machines]
    filled = {instance.state.logical_id for instance in instances}
    for group, ids in stored.spec.targets.items():
        instances += [
            Instance(InstanceState(item, group, message="no instance yet"), None)
            for item in ids
            if item not in filled
        ]
    return instances


def _state(known: dict[str, InstanceState], machine: StoredMachine) -> InstanceState:
    state = known.get(machine.name)
    is_deleting = bool(machine.content["metadata"].get("deletionTimestamp"))
    if state is not None and not is_deleting:
        return state
    phase = InstancePhase.SHUTTING_DOWN if is_deleting else InstancePhase.PENDING
    spec = machine.spec
    return InstanceState(spec.logical_id, spec.instance_group, machine.name, phase)


async def list_cluster_nodes(call: Call) -> Object:
    """ListClusterNodes; places without an instance are not listed."""
    body = call.body
    stored = await call.store.find(call.text("ClusterName"))
    part = call.text("InstanceGroupNameContains")
    chosen = [
        (one, one.machine)
        for one in await instances_of(call, stored)
        if one.machine is not None
        and part in one.state.group
        and is_between(one.machine.created_at, body, "CreationTime")
    ]

    def key(one: tuple[Instance, StoredMachine]) -> Key:
        by_name = body.get("SortBy") == "NAME"
        return one[1].name if by_name else one[1].created_at, one[1].name

    is_descending = body.get("SortOrder") == "Descending"
    result, token = page(chosen, key, body, is_descending=is_descending)
    has_logical_ids = bool(body.get("IncludeNodeLogicalIds"))
    if has_logical_ids and not is_continuous(stored.spec):
        raise invalid("IncludeNodeLogicalIds needs a cluster of NodeProvisioningMode Continuous")
    summaries = []
    for instance, machine in result:
        summary = _common(instance, machine)
        if has_logical_ids:
            summary["NodeLogicalId"] = instance.state.logical_id
        summaries.append(summary)
    return {"ClusterNodeSummaries": summaries, **({"NextToken": token} if token else {})}


def _common(instance: Instance, machine: StoredMachine) -> Object:
    return {
        "InstanceGroupName": machine.spec.instance_group,
        "InstanceId": instance.id,
        "InstanceType": machine.spec.instance_type,
        "LaunchTime": machine.created_at,
        "InstanceStatus": instance.status,
    }


async def describe_cluster_node(call: Call) -> Object:
    """DescribeClusterNode, by one of its ids."""
    node_id, logical_id = call.text("NodeId"), call.text("NodeLogicalId")
    if bool(node_id) == bool(logical_id):
        raise invalid("Give one of NodeId and NodeLogicalId")
    stored = await call.store.find(call.text("ClusterName"))
    wanted = [
        instance
        for instance in await instances_of(call, stored)
        if (instance.id == node_id if node_id else instance.state.logical_id == logical_id)
    ]
    if not wanted:
        shown = node_id or logical_id
        raise not_found(f"Node '{shown}' not found in cluster '{stored.spec.name}'")
    # Of a place that is being filled anew: the newcomer.
    instance = min(wanted, key=lambda instance: instance.state.phase is InstancePhase.SHUTTING_DOWN)
    return {"NodeDetails": await _details(call, stored, instance)}


async def _details(call: Call, stored: Stored, instance: Instance) -> Object:
    groups = stored.spec.request.get("InstanceGroups") or ()
    name = instance.state.group
    request: dict[str, Any] = next((g for g in groups if g["InstanceGroupName"] == name), {})
    result: Object = {
        "InstanceGroupName": name,
        "NodeLogicalId": instance.state.logical_id,
        "InstanceStatus": instance.status,
        **{key: request[key] for key in KEPT_OF_GROUPS if key in request},
    }
    kubernetes = kubernetes_details(request.get("KubernetesConfig") or {}, instance.machine)
    if kubernetes:
        result["KubernetesConfig"] = kubernetes
    if instance.machine is not None:
        result.update(_common(instance, instance.machine))
        address = await _address(call, instance.machine.name)
        result.update({"PrivatePrimaryIp": address} if address else {})
    return result


async def _address(call: Call, node: str) -> str:
    content = await call.store.node(node) or {}
    for item in (content.get("status") or {}).get("addresses") or ():
        if item.get("type") == "InternalIP" and ":" not in item.get("address", ":"):
            return str(item["address"])
    return ""
