"""Operations on nodes: list, describe, and BatchAdd-, -Delete-, -Reboot-, -ReplaceClusterNodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.core.clusters.groups import instance_types, is_continuous, retargeted
from unbroken.core.clusters.state import InstancePhase, InstanceState, instance_id
from unbroken.kube.client import Object
from unbroken.spec.keys import CLIENT_TOKENS, REPAIR
from unbroken.spec.nodes.kinds import ClusterSpec, MachinePhase
from unbroken.spec.nodes.values import Action

from .clusters import added, check_limit, kubernetes_details, require_settled, token_places, without
from .errors import invalid, not_found
from .shapes import Key, is_between, page
from .store import ApiCall, Stored, StoredMachine

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


async def instances_of(call: ApiCall, stored: Stored) -> list[Instance]:
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


async def list_cluster_nodes(call: ApiCall) -> Object:
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


async def describe_cluster_node(call: ApiCall) -> Object:
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


async def _details(call: ApiCall, stored: Stored, instance: Instance) -> Object:
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


async def _address(call: ApiCall, node: str) -> str:
    content = await call.store.node(node) or {}
    for item in (content.get("status") or {}).get("addresses") or ():
        if item.get("type") == "InternalIP" and ":" not in item.get("address", ":"):
            return str(item["address"])
    return ""


TOKEN_SECONDS = 8 * 3600.0
"""A ClientToken is remembered that long (reference section 1.2)."""
TOKENS_MAX = 500
"""Most tokens of a cluster; an object's annotations may have 256 KiB."""

# --- add


async def batch_add_cluster_nodes(call: ApiCall) -> Object:
    """BatchAddClusterNodes."""
    answer: Object = {}

    def change(stored: Stored) -> tuple[ClusterSpec, Object]:
        if not is_continuous(stored.spec):
            raise invalid(
                "BatchAddClusterNodes needs a cluster of NodeProvisioningMode Continuous; "
                "change InstanceCount with UpdateCluster instead"
            )
        require_settled(stored, "scaled")
        token = call.text("ClientToken") or call.context.new_hex(16)
        tokens, is_repeated = _tokens(call, stored, token)
        groups = {item["InstanceGroupName"]: item for item in stored.spec.request["InstanceGroups"]}
        answer.update({"Successful": [], "Failed": []})
        targets = {name: list(ids) for name, ids in stored.spec.targets.items()}
        for number, item in enumerate(call.body["NodesToAdd"]):
            failure = _cannot_add(groups, item)
            if failure is not None:
                answer["Failed"].append(failure)
                continue
            name, count = item["InstanceGroupName"], item["IncrementTargetCountBy"]
            made = token_places(stored.spec.cluster_id, token, name, number, count)
            targets[name] += [] if is_repeated else made
            answer["Successful"] += [_added(stored, name, id) for id in made]
        check_limit(targets)
        call.require_machines(added(stored.spec.targets, targets))
        annotations = {CLIENT_TOKENS: tokens} if call.text("ClientToken") else {}
        return retargeted(stored.spec, targets), annotations

    await call.store.change(call.text("ClusterName"), change)
    return answer


def _added(stored: Stored, group: str, logical_id: str) -> Object:
    known = {instance.logical_id: instance for instance in stored.state.instances}
    phase = known[logical_id].phase if logical_id in known else InstancePhase.PENDING
    return {"NodeLogicalId": logical_id, "InstanceGroupName": group, "Status": phase.value}


def _cannot_add(groups: Mapping[str, Any], one: Mapping[str, Any]) -> Object | None:
    name = one["InstanceGroupName"]
    code = text = ""
    if name not in groups:
        code, text = "InstanceGroupNotFound", "the cluster has no such instance group"
    elif set(one.get("InstanceTypes") or ()) - set(instance_types(groups[name])):
        code, text = "IncompatibleInstanceTypes", "the group has other instance types"
    elif one.get("AvailabilityZones"):
        code, text = "IncompatibleAvailabilityZones", "there are no availability zones here"
    if not code:
        return None
    return {
        "InstanceGroupName": name,
        "ErrorCode": code,
        "FailedCount": one["IncrementTargetCountBy"],
        "Message": text,
        **{key: one[key] for key in ("InstanceTypes", "AvailabilityZones") if key in one},
    }


def _tokens(call: ApiCall, stored: Stored, token: str) -> tuple[str, bool]:
    """The tokens of the last hours with this one, and whether it is among them already."""
    annotations = stored.metadata.get("annotations") or {}
    try:
        known = msgspec.json.decode(
            annotations.get(CLIENT_TOKENS, "{}"), type=dict[str, tuple[float, str]]
        )
    except msgspec.DecodeError:
        known = {}
    now = call.context.now()
    recent = {key: one for key, one in known.items() if now - one[0] < TOKEN_SECONDS}
    encoded = msgspec.json.encode(call.body["NodesToAdd"], order="sorted")
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    if token in recent:
        if recent[token][1] != digest:
            raise invalid("This ClientToken was used for another request")
        return msgspec.json.encode(recent).decode(), True
    if len(recent) >= TOKENS_MAX:
        raise invalid(f"More than {TOKENS_MAX} ClientTokens in {TOKEN_SECONDS / 3600:.0f} h")
    recent[token] = (now, digest)
    return msgspec.json.encode(recent).decode(), False


# --- delete


async def batch_delete_cluster_nodes(call: ApiCall) -> Object:
    """BatchDeleteClusterNodes: the group becomes so much smaller."""
    chosen = await _chosen(call)
    gone: list[tuple[str, str, Instance]] = []
    failed: dict[str, list[Object]] = {"NodeId": [], "NodeLogicalId": []}
    for member, id, instance in chosen:
        code, text = "", ""
        if instance is None:
            code, text = "NodeIdNotFound", "the cluster has no such node"
        elif instance.state.phase is InstancePhase.SHUTTING_DOWN:
            code, text = "InvalidNodeStatus", f"the node is {instance.state.phase.value} already"
        elif instance.machine is not None and await call.store.repair_of(instance.machine.name):
            code, text = "NodeIdInUse", "the node is being repaired"
        if code:
            failed[member].append({"Code": code, "Message": text, member: id})
        elif instance is not None:
            gone.append((member, id, instance))
    if gone:
        places = {instance.state.logical_id for _, _, instance in gone}
        await call.store.change(
            call.text("ClusterName"), lambda stored: (without(stored.spec, places), {})
        )
    return _sorted_out([(member, id) for member, id, _ in gone], failed)


# --- reboot, replace


async def batch_reboot_cluster_nodes(call: ApiCall) -> Object:
    """BatchRebootClusterNodes: the repairer does it, whatever NodeRecovery says."""
    return await _order(call, Action.REBOOT)


async def batch_replace_cluster_nodes(call: ApiCall) -> Object:
    """BatchReplaceClusterNodes: the repairer does it, whatever NodeRecovery says."""
    return await _order(call, Action.REPLACE)


async def _order(call: ApiCall, action: Action) -> Object:
    done: list[tuple[str, str]] = []
    failed: dict[str, list[Object]] = {"NodeId": [], "NodeLogicalId": []}
    for member, id, instance in await _chosen(call):
        failure = await _order_item(call, instance, action)
        if failure is None:
            done.append((member, id))
        else:
            failed[member].append({member: id, "ErrorCode": failure[0], "Message": failure[1]})
    return _sorted_out(done, failed)


async def _order_item(
    call: ApiCall, instance: Instance | None, action: Action
) -> tuple[str, str] | None:
    """Why it is not ordered, as (code, text); None: it is."""
    if instance is None:
        return "InstanceIdNotFound", "the cluster has no such node"
    if instance.machine is None or instance.state.phase is InstancePhase.SHUTTING_DOWN:
        return "InvalidInstanceStatus", f"the node is {instance.state.phase.value}"
    repair = await call.store.repair_of(instance.machine.name)
    if repair is not None:
        return "InstanceIdInUse", f"a {repair.action.value} of the node is {repair.state.value}"
    node = await call.store.node(instance.machine.name)
    if node is None:
        is_broken = instance.machine.status.phase is MachinePhase.FAILED
        if action is Action.REPLACE and is_broken:
            # It never joined: there is nothing to drain, and another takes its place.
            await call.store.delete_machine(instance.machine)
            return None
        return (
            "InvalidInstanceStatus",
            f"the node has not joined: it is {instance.state.phase.value}",
        )
    ordered = (node["metadata"].get("annotations") or {}).get(REPAIR)
    if ordered:
        return "InstanceIdInUse", f"a {ordered} of the node was ordered already"
    if not await call.store.annotate(node, {REPAIR: action.value}):
        return "InternalServerError", "the node is being changed by others; try again"
    return None


# --- what is common


async def _chosen(call: ApiCall) -> list[tuple[str, str, Instance | None]]:
    """Each id that was given: as which member, and its instance."""
    ids: Sequence[str] = call.body.get("NodeIds") or ()
    logical_ids: Sequence[str] = call.body.get("NodeLogicalIds") or ()
    if not ids and not logical_ids:
        raise invalid("Give NodeIds or NodeLogicalIds")
    stored = await call.store.find(call.text("ClusterName"))
    if logical_ids and not is_continuous(stored.spec):
        raise invalid("NodeLogicalIds need a cluster of NodeProvisioningMode Continuous")
    instances = await instances_of(call, stored)
    by_id = _index(instances, lambda instance: instance.id)
    by_logical_id = _index(instances, lambda instance: instance.state.logical_id)
    return [
        *(("NodeId", id, by_id.get(id)) for id in dict.fromkeys(ids)),
        *(("NodeLogicalId", id, by_logical_id.get(id)) for id in dict.fromkeys(logical_ids)),
    ]


def _index(instances: Sequence[Instance], key: Callable[[Instance], str]) -> dict[str, Instance]:
    # Of two machines for one place the one that stays is listed.
    by_worth = sorted(
        instances,
        key=lambda instance: instance.state.phase is InstancePhase.SHUTTING_DOWN,
        reverse=True,
    )
    return {key(instance): instance for instance in by_worth}


def _sorted_out(done: list[tuple[str, str]], failed: dict[str, list[Object]]) -> Object:
    ids = [id for member, id in done if member == "NodeId"]
    logical_ids = [id for member, id in done if member == "NodeLogicalId"]
    parts = {
        "Successful": ids,
        "Failed": failed["NodeId"],
        "SuccessfulNodeLogicalIds": logical_ids,
        "FailedNodeLogicalIds": failed["NodeLogicalId"],
    }
    return {name: part for name, part in parts.items() if part}
