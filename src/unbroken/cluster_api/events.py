"""Events, operations and checks on demand of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unbroken.core.clusters.groups import is_continuous
from unbroken.core.clusters.state import (
    CheckRequest,
    ClusterState,
    EventState,
    OperationState,
    OperationStatus,
    OperationType,
    identifier,
)
from unbroken.spec.nodes.check import CheckKind

from .calls import Call, Object
from .clusters import require_settled
from .errors import conflict, invalid, not_found
from .pages import is_between, page
from .store import Stored

MEMBERS: Mapping[str, Callable[[EventState], str]] = {
    "InstanceGroupName": lambda one: one.group,
    "NodeId": lambda one: one.instance,
    "ResourceType": lambda one: one.resource.value,
    "OperationId": lambda one: one.operation,
}
"""Parameters that choose events, and where an event has each."""

# --- events


async def list_cluster_events(call: Call) -> Object:
    """ListClusterEvents, newest first unless asked for otherwise."""
    body = call.body
    stored = await _with_events(call)
    chosen = [
        one
        for one in stored.state.events
        if is_between(one.at, body, "EventTime")
        and all(body[name] == of(one) for name, of in MEMBERS.items() if name in body)
    ]
    order = {one.id: number for number, one in enumerate(stored.state.events)}
    found, token = page(
        chosen,
        # Events of one moment stay in their order.
        lambda one: (one.at, f"{order[one.id]:04}"),
        body,
        is_descending=body.get("SortOrder") != "Ascending",
    )
    events = [_event(stored, one) for one in found]
    return {"Events": events, **({"NextToken": token} if token else {})}


async def describe_cluster_event(call: Call) -> Object:
    """DescribeClusterEvent."""
    stored = await _with_events(call)
    id = call.text("EventId")
    for one in stored.state.events:
        if one.id == id:
            details = {"EventDetails": {"EventMetadata": one.metadata}} if one.metadata else {}
            return {"EventDetails": {**_event(stored, one), **details}}
    raise not_found(f"Event '{id}' not found in cluster '{stored.spec.name}'")


async def _with_events(call: Call) -> Stored:
    stored = await call.store.find(call.text("ClusterName"))
    if not is_continuous(stored.spec):
        raise invalid("Cluster events need a cluster of NodeProvisioningMode Continuous")
    return stored


def _event(stored: Stored, event: EventState) -> Object:
    optional = {
        "InstanceGroupName": event.group,
        "InstanceId": event.instance,
        "OperationId": event.operation,
    }
    return {
        "EventId": event.id,
        "ClusterArn": stored.arn,
        "ClusterName": stored.spec.name,
        "ResourceType": event.resource.value,
        "EventTime": event.at,
        "Description": event.text,
        "EventLevel": event.level.value,
        **{name: one for name, one in optional.items() if one},
    }


# --- operations


async def list_cluster_operations(call: Call) -> Object:
    """ListClusterOperations, newest first unless asked for otherwise."""
    body = call.body
    stored = await call.store.find(call.text("ClusterName"))
    chosen = [
        one
        for one in stored.state.operations
        if body.get("Status") in (None, one.status.value)
        and body.get("Type") in (None, one.type.value)
        and is_between(one.created_at, body, "CreationTime")
    ]
    found, token = page(
        chosen,
        lambda one: (one.created_at, one.id),
        body,
        is_descending=body.get("SortOrder") != "Ascending",
    )
    summaries = [_operation(stored, one) for one in found]
    return {"ClusterOperationSummaries": summaries, **({"NextToken": token} if token else {})}


async def describe_cluster_operation(call: Call) -> Object:
    """DescribeClusterOperation."""
    stored = await call.store.find(call.text("ClusterName"))
    id = call.text("OperationId")
    one = stored.state.operation(id)
    if one is None:
        raise not_found(f"Operation '{id}' not found in cluster '{stored.spec.name}'")
    found = _operation(stored, one)
    if one.scaling:
        found["ScalingDetails"] = [
            {
                "InstanceGroupName": detail.group,
                "Status": detail.status.value,
                "Original": {
                    "CurrentCount": detail.original_current,
                    "TargetCount": detail.original_target,
                    "MinCount": detail.original_minimum,
                },
                "Desired": {
                    "CurrentCount": detail.desired_target,
                    "TargetCount": detail.desired_target,
                    "MinCount": detail.desired_minimum,
                },
            }
            for detail in one.scaling
        ]
    if one.checks:
        found["DeepHealthCheckDetails"] = [
            {
                "InstanceGroupName": check.group,
                "DeepHealthChecks": [kind.value for kind in check.kinds],
                **({"InstanceIds": list(check.instance_ids)} if check.instance_ids else {}),
            }
            for check in one.checks
        ]
    return found


def _operation(stored: Stored, operation: OperationState) -> Object:
    return {
        "OperationId": operation.id,
        "ClusterArn": stored.arn,
        "Type": operation.type.value,
        "Status": operation.status.value,
        "CreationTime": operation.created_at,
    }


# --- checks on demand


async def start_cluster_health_check(call: Call) -> Object:
    """StartClusterHealthCheck: one at a time."""
    name = call.text("ClusterName")
    found = await call.store.find(name)
    machines = {
        one.name.removeprefix("hyperpod-"): one.spec.instance_group
        for one in await call.store.machines(found)
    }
    id = identifier(call.context.new_hex(32))

    def change(stored: Stored) -> ClusterState:
        require_settled(stored, "checked")
        for one in stored.state.operations:
            if one.type is OperationType.DEEP_CHECK and one.status is OperationStatus.IN_PROGRESS:
                raise conflict(f"A deep health check of the cluster is under way: {one.id}")
        checks = _requests(stored, call.body, machines)
        made = OperationState(id, OperationType.DEEP_CHECK, call.context.now(), checks=checks)
        return replace(stored.state, operations=(*stored.state.operations, made))

    stored = await call.store.change_state(name, change)
    return {"ClusterArn": stored.arn}


def _requests(
    stored: Stored, body: Mapping[str, Any], machines: Mapping[str, str]
) -> tuple[CheckRequest, ...]:
    """Requests by group; those that overlap are merged."""
    known = [one["InstanceGroupName"] for one in stored.spec.request["InstanceGroups"]]
    merged: dict[str, tuple[set[str], set[str] | None]] = {}
    for one in body["DeepHealthCheckConfigurations"]:
        group, ids = one["InstanceGroupName"], one.get("InstanceIds")
        if group not in known:
            raise not_found(f"No instance group '{group}' in cluster '{stored.spec.name}'")
        for id in ids or ():
            if machines.get(id) != group:
                raise not_found(f"No instance '{id}' in instance group '{group}'")
        kinds, before = merged.get(group, (set(), set()))
        chosen = None if ids is None or before is None else before | set(ids)
        merged[group] = (kinds | set(one["DeepHealthChecks"]), chosen)
    return tuple(
        CheckRequest(
            group,
            tuple(kind for kind in CheckKind if kind.value in kinds),
            tuple(sorted(ids or ())),
        )
        for group, (kinds, ids) in merged.items()
    )
