"""Deep checks of a cluster's nodes: of new nodes before they take pods, and on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from unbroken.spec.keys import DEEP_CHECK, HEALTH
from unbroken.spec.nodes.check import CheckPhase
from unbroken.spec.nodes.values import DeepCheck, Health

from .draft import CheckView, ClusterNode, CreateCheck, Draft, GroupPlace, LabelNode
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
    """Have new nodes checked if their group requires it, and label them by the result."""
    for group in draft.groups:
        if not group.checks:
            continue
        new = [
            group_place
            for group_place in draft.of(group.name)
            if group_place.now.phase is InstancePhase.DEEP_CHECK and not group_place.now.has_run
        ]
        unchecked = []
        for place in new:
            check = _covering(draft, group, place.now.machine)
            if check is None:
                unchecked.append(place)
            elif check.has_ended:
                _conclude(draft, place, check)
        if unchecked:
            _ask(draft, group, unchecked)


def _covering(draft: Draft, group: InstanceGroup, node: str) -> CheckView | None:
    checks = [
        check
        for check in draft.world.checks
        if node in check.nodes and set(group.checks) <= set(check.kinds)
    ]
    # A check that still runs takes precedence over one that has ended.
    return min(checks, key=lambda check: (check.has_ended, check.name), default=None)


def _ask(draft: Draft, group: InstanceGroup, unchecked: list[GroupPlace]) -> None:
    are_others_coming = any(
        place.now.phase is InstancePhase.PENDING for place in draft.of(group.name)
    )
    due = min(place.now.since for place in unchecked) + GATHER_SECONDS
    if are_others_coming and draft.now < due:
        draft.wake(due)
        return
    nodes = tuple(sorted(place.now.machine for place in unchecked))
    digest = hashlib.sha256("/".join(nodes).encode()).hexdigest()[:8]
    name = f"{draft.world.name}-{group.name.lower()}-start-{digest}"
    reason = f"OnStartDeepHealthChecks of {draft.world.spec.name}/{group.name}"
    draft.do(CreateCheck(name, nodes, group.checks, reason))
    kinds = ", ".join(kind.value for kind in group.checks)
    for place in unchecked:
        if place.now.asked != name:
            draft.put_place(place, replace(place.now, asked=name))
            _record(draft, place, f"is checked before it takes pods: {kinds}")


def _conclude(draft: Draft, place: GroupPlace, check: CheckView) -> None:
    name = place.now.machine
    node = draft.world.nodes.get(name)
    if node is None or node.deep_check != DeepCheck.IN_PROGRESS.value:
        return
    is_news = place.now.concluded != check.name
    draft.put_place(place, replace(place.now, concluded=check.name))
    is_well = check.phase in (CheckPhase.PASSED, CheckPhase.FAILED)
    if name in check.faulty:
        labels = {DEEP_CHECK: DeepCheck.FAILED.value, HEALTH: Health.PENDING_REPLACEMENT.value}
        draft.do(LabelNode(name, labels))
        text, level = f"failed its deep check: {check.message}", Level.ERROR
    elif is_well:
        draft.do(_returned(node, DeepCheck.PASSED.value))
        text, level = "passed its deep check", Level.INFO
    else:
        # A check that could not be made is nobody's fault: the node takes pods, but is not Passed.
        draft.do(_returned(node, None))
        text, level = f"could not be checked: {check.message}", Level.WARN
    if is_news:
        _record(draft, place, text, level)


def _returned(node: ClusterNode, deep_check: str | None) -> LabelNode:
    if node.health != Health.UNSCHEDULABLE.value:
        # If a fault was seen meanwhile, or the checker has set the label, the label stays.
        return LabelNode(node.name, {DEEP_CHECK: deep_check})
    labels = {DEEP_CHECK: deep_check, HEALTH: Health.SCHEDULABLE.value}
    return LabelNode(node.name, labels, untaint=True)


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
