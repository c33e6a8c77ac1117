"""Deep checks of a cluster's nodes: of new nodes before they take pods, and on demand.

Checks are requested and reported here. The checker alone (`operator/nodes/checks`) changes the
labels and the taint of a node that is checked, also of one that has joined as unschedulable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from unbroken.spec.nodes.values import DeepCheck

from .draft import CheckView, CreateCheck, Draft, GroupPlace
from .groups import InstanceGroup
from .operations import put_operation
from .state import (
    CheckRequest,
    InstancePhase,
    Level,
    OperationState,
    OperationStatus,
    OperationType,
    Resource,
    instance_id,
)

GATHER_SECONDS = 60.0
"""Seconds that the first new nodes of a group wait for others that are starting (judgement).

They are checked together, because pairs find more.
"""


def check_new_nodes(draft: Draft) -> None:
    """Have new nodes checked if their group requires it, and report the results."""
    checks = {check.name: check for check in draft.world.checks}
    for group in draft.groups:
        for place in draft.of(group.name):
            check = checks.get(place.now.asked)
            if check is not None and check.has_ended:
                _report(draft, place, check)
        unchecked = [
            place
            for place in draft.of(group.name)
            if group.checks
            and place.now.phase is InstancePhase.DEEP_CHECK
            and not draft.world.nodes[place.now.machine].is_held
            and not _is_covered(draft, group, place.now.machine)
        ]
        if unchecked:
            _ask(draft, group, unchecked)


def _is_covered(draft: Draft, group: InstanceGroup, node: str) -> bool:
    """True if a check that has not ended makes all tests of the group on the node."""
    return any(
        node in check.nodes and set(group.checks) <= set(check.kinds) and not check.has_ended
        for check in draft.world.checks
    )


def _ask(draft: Draft, group: InstanceGroup, unchecked: list[GroupPlace]) -> None:
    are_others_coming = any(
        place.now.phase is InstancePhase.PENDING for place in draft.of(group.name)
    )
    due = min(place.now.since for place in unchecked) + GATHER_SECONDS
    if are_others_coming and draft.now < due:
        draft.wake(due)
        return
    nodes = tuple(sorted(place.now.machine for place in unchecked))
    # A node that has joined anew is checked anew: an ended check keeps its name for a while.
    ended = sorted(
        check.name for check in draft.world.checks if check.has_ended and {*nodes} & {*check.nodes}
    )
    digest = hashlib.sha256("/".join((*nodes, *ended)).encode()).hexdigest()[:8]
    name = f"{draft.world.name}-{group.name.lower()}-start-{digest}"
    reason = f"OnStartDeepHealthChecks of {draft.world.spec.name}/{group.name}"
    draft.do(CreateCheck(name, nodes, group.checks, reason))
    kinds = ", ".join(kind.value for kind in group.checks)
    for place in unchecked:
        if place.now.asked != name:
            draft.put_place(place, replace(place.now, asked=name))
            _record(draft, place, f"is checked before it takes pods: {kinds}")


def _report(draft: Draft, place: GroupPlace, check: CheckView) -> None:
    """Record the result of the check of a new node, once, when the node shows it."""
    name = place.now.machine
    node = draft.world.nodes.get(name)
    is_known = place.now.concluded == check.name
    if is_known or node is None or node.is_held or node.deep_check == DeepCheck.IN_PROGRESS.value:
        return
    draft.put_place(place, replace(place.now, concluded=check.name))
    if name in check.faulty:
        text, level = f"failed its deep check: {check.message}", Level.ERROR
    elif node.deep_check == DeepCheck.PASSED.value:
        text, level = "passed its deep check", Level.INFO
    else:
        # A check that could not be made is nobody's fault: the node takes pods, but is not Passed.
        text, level = f"could not be checked: {check.message}", Level.WARN
    _record(draft, place, text, level)


def _record(draft: Draft, place: GroupPlace, text: str, level: Level = Level.INFO) -> None:
    name, group = instance_id(place.now.machine), place.group.name
    metadata = {"NodeLogicalId": place.logical_id}
    draft.record_event(
        Resource.INSTANCE,
        f"Instance {name} {text}",
        level,
        group=group,
        instance=name,
        Instance=metadata,
    )


# --- on demand


def run_requests(draft: Draft) -> None:
    """Make the checks that StartClusterHealthCheck has requested, and end the request with them."""
    for operation in draft.state.operations:
        if (
            operation.type is OperationType.DEEP_CHECK
            and operation.status is OperationStatus.IN_PROGRESS
        ):
            _run_request(draft, operation)


def _run_request(draft: Draft, operation: OperationState) -> None:
    known = {check.name: check for check in draft.world.checks}
    ended: list[CheckView] = []
    is_open = False
    for number, request in enumerate(operation.checks):
        name = f"{draft.world.name}-{operation.id[:8]}-{number}"
        check = known.get(name)
        if check is not None:
            is_open = is_open or not check.has_ended
            ended.append(check)
            continue
        nodes = _asked_for(draft, request)
        if not nodes:
            continue
        is_open = True
        reason = f"StartClusterHealthCheck of {draft.world.spec.name}/{request.group}"
        draft.do(CreateCheck(name, nodes, request.kinds, reason))
    if not is_open:
        put_operation(draft, replace(operation, status=OperationStatus.DONE))
        _record_result(draft, ended)


def _asked_for(draft: Draft, request: CheckRequest) -> tuple[str, ...]:
    return tuple(
        sorted(
            place.now.machine
            for place in draft.of(request.group)
            if place.now.phase is InstancePhase.RUNNING
            and (not request.instance_ids or instance_id(place.now.machine) in request.instance_ids)
        )
    )


def _record_result(draft: Draft, checks: Iterable[CheckView]) -> None:
    results = [f"{check.name} {check.phase.value}" for check in checks]
    faulty = sorted(instance_id(node) for check in checks for node in check.faulty)
    text = f"Deep health check has ended: {', '.join(results) or 'nothing to check'}"
    if faulty:
        text += f"; faulty: {', '.join(faulty)}"
    draft.record_event(Resource.CLUSTER, text, Level.ERROR if faulty else Level.INFO)
