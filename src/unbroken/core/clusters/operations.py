"""Operations on a cluster: scaling from request to completion, software updates."""

from __future__ import annotations

from dataclasses import replace

from .draft import Draft, ReplaceNode
from .groups import InstanceGroup
from .state import (
    GroupPhase,
    GroupState,
    InstancePhase,
    Level,
    OperationState,
    OperationStatus,
    OperationType,
    Resource,
    ScalingDetail,
)


def open_scaling(draft: Draft) -> None:
    """Record each group whose request has changed, as one operation."""
    details = [detail for group in draft.groups for detail in _changed(draft, group)]
    wanted = {group.name for group in draft.groups}
    for gone in [
        group_state for group_state in draft.state.groups if group_state.name not in wanted
    ]:
        if gone.phase is not GroupPhase.DELETING:
            draft.put_group(replace(gone, phase=GroupPhase.DELETING))
            details.append(_detail(gone, 0, 0))
    if not details:
        return
    _supersede(draft, {detail.group for detail in details})
    made = OperationState("", OperationType.SCALING, draft.now, scaling=tuple(details))
    draft.add_operation(made)
    for detail in details:
        text = (
            f"Instance group {detail.group} scales from {detail.original_target} "
            f"to {detail.desired_target}"
        )
        metadata = {
            "InstanceCount": detail.original_current,
            "TargetCount": detail.desired_target,
            "MinCount": detail.desired_minimum,
        }
        draft.record_event(Resource.GROUP, text, group=detail.group, InstanceGroupScaling=metadata)


def _changed(draft: Draft, group: InstanceGroup) -> list[ScalingDetail]:
    was = draft.state.group(group.name)
    if was is None:
        made = GroupState(group.name, target=group.logical_ids, minimum=group.minimum)
        draft.put_group(made)
        return [_detail(GroupState(group.name), len(group.logical_ids), group.minimum)]
    if was.target == group.logical_ids:
        return []
    is_new = was.phase is GroupPhase.CREATING
    phase = GroupPhase.CREATING if is_new else GroupPhase.UPDATING
    draft.put_group(replace(was, target=group.logical_ids, phase=phase, short_since=None))
    return [_detail(was, len(group.logical_ids), group.minimum)]


def _detail(was: GroupState, target: int, minimum: int) -> ScalingDetail:
    return ScalingDetail(
        was.name,
        original_current=was.current,
        original_target=len(was.target),
        original_minimum=was.minimum,
        desired_target=target,
        desired_minimum=minimum,
    )


def _supersede(draft: Draft, groups: set[str]) -> None:
    """Mark unfinished operations on these groups as superseded."""
    for operation in draft.state.operations:
        if (
            operation.type is OperationType.SCALING
            and operation.status is OperationStatus.IN_PROGRESS
        ):
            superseded = dict.fromkeys(groups, OperationStatus.SUPERSEDED)
            _settle(draft, operation, superseded)


def close_scaling(draft: Draft) -> None:
    """End the operations whose goal is reached."""
    phases = {group.name: group.phase for group in draft.state.groups}
    for operation in draft.state.operations:
        if (
            operation.type is OperationType.SCALING
            and operation.status is OperationStatus.IN_PROGRESS
        ):
            reached = {
                detail.group: OperationStatus.DONE
                for detail in operation.scaling
                if phases.get(detail.group) in (None, GroupPhase.IN_SERVICE, GroupPhase.DEGRADED)
            }
            _settle(draft, operation, reached)


def _settle(
    draft: Draft, operation_state: OperationState, ended: dict[str, OperationStatus]
) -> None:
    details = tuple(
        replace(detail, status=ended.get(detail.group, detail.status))
        if detail.status is OperationStatus.IN_PROGRESS
        else detail
        for detail in operation_state.scaling
    )
    statuses = {detail.status for detail in details}
    if OperationStatus.IN_PROGRESS in statuses:
        status = OperationStatus.IN_PROGRESS
    elif statuses == {OperationStatus.SUPERSEDED}:
        status = OperationStatus.SUPERSEDED
    else:
        status = OperationStatus.DONE
    put_operation(draft, replace(operation_state, scaling=details, status=status))


def put_operation(draft: Draft, operation: OperationState) -> None:
    """Set the state of an existing operation."""
    kept = tuple(
        operation if operation_state.id == operation.id else operation_state
        for operation_state in draft.state.operations
    )
    draft.state = replace(draft.state, operations=kept)


def update_software(draft: Draft) -> None:
    """Have the old machines replaced, at most one batch at once."""
    update = draft.state.update
    if update is None:
        return
    there = {place.machine.name for place in draft.places if place.machine is not None}
    pending = tuple(name for name in update.pending if name in there)
    ordered = tuple(name for name in update.ordered if name in there)
    places = [place for place in draft.places if place.group.name in update.groups]
    down = {place.now.machine for place in places if place.now.phase is not InstancePhase.RUNNING}
    free = update.batch - len(down | set(ordered))
    waiting = [name for name in pending if name not in ordered and name not in down]
    following = tuple(waiting[: max(0, free)])
    for name in following:
        draft.do(ReplaceNode(name))
    if not pending and not down:
        names = ", ".join(update.groups)
        draft.record_event(Resource.CLUSTER, f"Software of {names} is updated", Level.INFO)
        updated = tuple(sorted({*draft.state.updated, *update.groups}))
        draft.state = replace(draft.state, update=None, updated=updated)
        return
    now = replace(update, pending=pending, ordered=(*ordered, *following))
    draft.state = replace(draft.state, update=now)
