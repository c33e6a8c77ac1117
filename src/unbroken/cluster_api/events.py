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
from unbroken.kube.client import Object
from unbroken.spec.nodes.kinds import CheckKind

from .clusters import require_settled
from .errors import conflict, invalid, not_found
from .shapes import is_between, page
from .store import ApiCall, Stored

MEMBERS: Mapping[str, Callable[[EventState], str]] = {
    "InstanceGroupName": lambda event_state: event_state.group,
    "NodeId": lambda event_state: event_state.instance,
    "ResourceType": lambda event_state: event_state.resource.value,
    "OperationId": lambda event_state: event_state.operation,
}
"""Parameters that choose events, and where an event has each."""

# --- events


async def list_cluster_events(call: ApiCall) -> Object:
    """ListClusterEvents, newest first unless asked for otherwise."""
    body = call.body
    stored = await _with_events(call)
    chosen = [
        event
        for event in stored.state.events
        if is_between(event.at, body, "EventTime")
        and all(body[name] == of(event) for name, of in MEMBERS.items() if name in body)
    ]
    order = {event.id: number for number, event in enumerate(stored.state.events)}
    event_states, token = page(
        chosen,
        # Events of one moment stay in their order.
        lambda event_state: (event_state.at, f"{order[event_state.id]:04}"),
        body,
        is_descending=body.get("SortOrder") != "Ascending",
    )
    events = [_event(stored, event_state) for event_state in event_states]
    return {"Events": events, **({"NextToken": token} if token else {})}


async def describe_cluster_event(call: ApiCall) -> Object:
    """DescribeClusterEvent."""
    stored = await _with_events(call)
    id = call.text("EventId")
    for event in stored.state.events:
        if event.id == id:
            details = {"EventDetails": {"EventMetadata": event.metadata}} if event.metadata else {}
            return {"EventDetails": {**_event(stored, event), **details}}
    raise not_found(f"Event '{id}' not found in cluster '{stored.spec.name}'")


async def _with_events(call: ApiCall) -> Stored:
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


async def list_cluster_operations(call: ApiCall) -> Object:
    """ListClusterOperations, newest first unless asked for otherwise."""
    body = call.body
    stored = await call.store.find(call.text("ClusterName"))
    chosen = [
        operation
        for operation in stored.state.operations
        if body.get("Status") in (None, operation.status.value)
        and body.get("Type") in (None, operation.type.value)
        and is_between(operation.created_at, body, "CreationTime")
    ]
    operation_states, token = page(
        chosen,
        lambda operation_state: (operation_state.created_at, operation_state.id),
        body,
        is_descending=body.get("SortOrder") != "Ascending",
    )
    summaries = [_operation(stored, operation_state) for operation_state in operation_states]
    return {"ClusterOperationSummaries": summaries, **({"NextToken": token} if token else {})}


async def describe_cluster_operation(call: ApiCall) -> Object:
    """DescribeClusterOperation."""
    stored = await call.store.find(call.text("ClusterName"))
    id = call.text("OperationId")
    operation_state = stored.state.operation(id)
    if operation_state is None:
        raise not_found(f"Operation '{id}' not found in cluster '{stored.spec.name}'")
    result = _operation(stored, operation_state)
    if operation_state.scaling:
        result["ScalingDetails"] = [
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
            for detail in operation_state.scaling
        ]
    if operation_state.checks:
        result["DeepHealthCheckDetails"] = [
            {
                "InstanceGroupName": check.group,
                "DeepHealthChecks": [kind.value for kind in check.kinds],
                **({"InstanceIds": list(check.instance_ids)} if check.instance_ids else {}),
            }
            for check in operation_state.checks
        ]
    return result


def _operation(stored: Stored, operation: OperationState) -> Object:
    return {
        "OperationId": operation.id,
        "ClusterArn": stored.arn,
        "Type": operation.type.value,
        "Status": operation.status.value,
        "CreationTime": operation.created_at,
    }


# --- checks on demand


async def start_cluster_health_check(call: ApiCall) -> Object:
    """StartClusterHealthCheck: one at a time."""
    name = call.text("ClusterName")
    result = await call.store.find(name)
    machines = {
        machine.name.removeprefix("hyperpod-"): machine.spec.instance_group
        for machine in await call.store.machines(result)
    }
    id = identifier(call.context.new_hex(32))

    def change(stored: Stored) -> ClusterState:
        require_settled(stored, "checked")
        for operation in stored.state.operations:
            if (
                operation.type is OperationType.DEEP_CHECK
                and operation.status is OperationStatus.IN_PROGRESS
            ):
                raise conflict(f"A deep health check of the cluster is under way: {operation.id}")
        checks = _requests(stored, call.body, machines)
        made = OperationState(id, OperationType.DEEP_CHECK, call.context.now(), checks=checks)
        return replace(stored.state, operations=(*stored.state.operations, made))

    stored = await call.store.change_state(name, change)
    return {"ClusterArn": stored.arn}


def _requests(
    stored: Stored, body: Mapping[str, Any], machines: Mapping[str, str]
) -> tuple[CheckRequest, ...]:
    """Requests by group; those that overlap are merged."""
    known = [item["InstanceGroupName"] for item in stored.spec.request["InstanceGroups"]]
    merged: dict[str, tuple[set[str], set[str] | None]] = {}
    for item in body["DeepHealthCheckConfigurations"]:
        group, ids = item["InstanceGroupName"], item.get("InstanceIds")
        if group not in known:
            raise not_found(f"No instance group '{group}' in cluster '{stored.spec.name}'")
        for id in ids or ():
            if machines.get(id) != group:
                raise not_found(f"No instance '{id}' in instance group '{group}'")
        kinds, before = merged.get(group, (set(), set()))
        chosen = None if ids is None or before is None else before | set(ids)
        merged[group] = (kinds | set(item["DeepHealthChecks"]), chosen)
    return tuple(
        CheckRequest(
            group,
            tuple(kind for kind in CheckKind if kind.value in kinds),
            tuple(sorted(ids or ())),
        )
        for group, (kinds, ids) in merged.items()
    )
