"""Rules of a cluster: machines to make and delete, the phases of its groups and of itself.

`decide_cluster` is level-triggered: it compares the Cluster's request with the observed state. It
may be called with any true state, any number of times. Semantics: reference section 1.5.

Deep checks of a cluster's nodes, of new nodes before they take pods and on demand, are requested
and reported here. The checker alone (`operator/nodes/checks`) changes the labels and the taint of a
node that is checked, also of one that has joined as unschedulable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from unbroken.spec.nodes.kinds import MachinePhase
from unbroken.spec.nodes.values import DeepCheck

from . import operations as cluster_operations
from .draft import (
    CheckView,
    ClusterDecision,
    ClusterNode,
    Configure,
    CreateCheck,
    CreateMachine,
    DeleteMachine,
    Draft,
    GroupPlace,
    MachineView,
    ReleaseCluster,
    Retarget,
    World,
)
from .groups import InstanceGroup, machine_spec, node_config
from .operations import put_operation
from .state import (
    CheckRequest,
    ClusterPhase,
    ClusterState,
    GroupPhase,
    GroupState,
    InstancePhase,
    InstanceState,
    Level,
    OperationState,
    OperationStatus,
    OperationType,
    Resource,
    instance_id,
    node_name,
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


RETRY_SECONDS = 300.0
"""Seconds after which a machine that could not start is made again under continuous provisioning
(judgement: four attempts of a script took 18 min upstream, reference section 1.5)."""
MINIMUM_SECONDS = 3 * 3600.0
"""Seconds within which MinInstanceCount must be met: about 3 h (reference section 1.5)."""
UP = (InstancePhase.RUNNING, InstancePhase.DEEP_CHECK)
CHANGING = (GroupPhase.CREATING, GroupPhase.UPDATING, GroupPhase.DELETING, GroupPhase.FAILED)


def decide_cluster(world: World, state: ClusterState, now: float) -> ClusterDecision:
    """Return the writes and orders for the cluster at `now`, in seconds since the epoch."""
    draft = Draft(world, state, now)
    if world.is_deleting:
        _delete(draft)
        return draft.decision()
    cluster_operations.open_scaling(draft)
    _fill_places(draft)
    _configure(draft)
    check_new_nodes(draft)
    for group in draft.groups:
        _judge_group(draft, group)
    _forget_groups(draft)
    cluster_operations.close_scaling(draft)
    run_requests(draft)
    cluster_operations.update_software(draft)
    _judge_cluster(draft)
    return draft.decision()


def instance_phase(
    machine: MachineView | None, node: ClusterNode | None, was: InstanceState | None
) -> tuple[InstancePhase, str]:
    """Return the phase of an instance, and the reason. `was`: the earlier state of the same
    machine."""
    if machine is None:
        return InstancePhase.PENDING, "no instance yet"
    if machine.is_deleting or machine.phase is MachinePhase.STOPPING:
        return InstancePhase.SHUTTING_DOWN, machine.message
    if machine.phase is MachinePhase.FAILED:
        return InstancePhase.FAILURE, machine.message or "the instance cannot come up"
    if machine.phase is not MachinePhase.RUNNING:
        is_new = machine.phase is MachinePhase.PENDING
        return InstancePhase.PENDING, machine.message or ("" if is_new else machine.phase.value)
    if node is None or not node.is_ready:
        has_been_up = was is not None and was.phase not in (InstancePhase.PENDING,)
        lost = InstancePhase.FAILURE if has_been_up else InstancePhase.PENDING
        return lost, "its node is not ready"
    if node.deep_check == DeepCheck.IN_PROGRESS.value:
        return InstancePhase.DEEP_CHECK, ""
    return InstancePhase.RUNNING, machine.message


def _delete(draft: Draft) -> None:
    if draft.phase is not ClusterPhase.DELETING:
        draft.phase, draft.message = ClusterPhase.DELETING, ""
        draft.record_event(Resource.CLUSTER, f"Deleting cluster {draft.world.spec.name}")
    for machine in draft.world.machines:
        if not machine.is_deleting:
            draft.do(DeleteMachine(machine.name))
    if not draft.world.machines:
        draft.do(ReleaseCluster())


# --- machines


def _fill_places(draft: Draft) -> None:
    """Ensure that each place has one machine, and that there is no other machine."""
    by_place: dict[str, list[MachineView]] = {}
    for machine in draft.world.machines:
        by_place.setdefault(machine.logical_id, []).append(machine)
    known = {instance.logical_id: instance for instance in draft.state.instances}
    for group in draft.groups:
        for logical_id in group.logical_ids:
            was = known.get(logical_id)
            _fill_place(draft, group, logical_id, by_place.pop(logical_id, []), was)
    for machines in by_place.values():
        for machine in machines:
            if not machine.is_deleting:
                draft.do(DeleteMachine(machine.name))
    draft.state = replace(draft.state, instances=tuple(place.now for place in draft.places))


def _fill_place(
    draft: Draft,
    group: InstanceGroup,
    logical_id: str,
    machines: list[MachineView],
    was: InstanceState | None,
) -> None:
    previous = was.machine if was is not None else ""
    # A replacement is made before the old machine goes: for a moment there are two.
    machines.sort(key=lambda one: (one.is_deleting, -one.created_at, one.name == previous))
    machine = machines[0] if machines else None
    for surplus in machines[1:]:
        if not surplus.is_deleting:
            draft.do(DeleteMachine(surplus.name))
    if machine is None:
        name = node_name(draft.world.spec.cluster_id, logical_id, previous)
        draft.do(
            CreateMachine(name, machine_spec(draft.world.spec, draft.world.name, group, logical_id))
        )
    now = _instance(draft, group, logical_id, machine, was)
    draft.places.append(GroupPlace(group, logical_id, machine, was, now))
    _record_instance(draft, was, now, is_gone=machine is None)
    if now.phase is InstancePhase.FAILURE and draft.is_continuous and not now.has_run:
        _try_again(draft, now)


def _instance(
    draft: Draft,
    group: InstanceGroup,
    logical_id: str,
    machine: MachineView | None,
    was: InstanceState | None,
) -> InstanceState:
    if was is None:
        was = InstanceState(logical_id, group.name, since=draft.now)
    is_same = machine is None or machine.name == was.machine
    node = draft.world.nodes.get(machine.name) if machine is not None else None
    phase, message = instance_phase(machine, node, was if is_same else None)
    return InstanceState(
        logical_id,
        group.name,
        machine.name if machine is not None else was.machine,
        phase,
        message,
        was.since if is_same and phase is was.phase else draft.now,
        (is_same and was.has_run) or phase is InstancePhase.RUNNING,
        was.asked if is_same else "",
        was.concluded if is_same else "",
    )


def _record_instance(
    draft: Draft, was: InstanceState | None, now: InstanceState, *, is_gone: bool
) -> None:
    name = instance_id(now.machine)
    if not now.machine or (
        was is not None and (was.machine, was.phase) == (now.machine, now.phase)
    ):
        return
    level, detail = Level.INFO, f": {now.message}" if now.message else ""
    text = f"Instance {name} of group {now.group} is {now.phase.value}{detail}"
    if now.phase is InstancePhase.FAILURE:
        level = Level.ERROR
    elif is_gone:
        text = f"Instance {name} of group {now.group} is gone"
    elif was is not None and was.machine and was.machine != now.machine:
        level = Level.WARN
        text = f"Instance {name} takes the place of {instance_id(was.machine)} ({now.logical_id})"
    metadata = {"NodeLogicalId": now.logical_id}
    if now.phase is InstancePhase.FAILURE:
        metadata["FailureMessage"] = now.message
    draft.record_event(
        Resource.INSTANCE, text, level, group=now.group, instance=name, Instance=metadata
    )


def _try_again(draft: Draft, now: InstanceState) -> None:
    due = now.since + RETRY_SECONDS
    if draft.now >= due:
        draft.do(DeleteMachine(now.machine))
    else:
        draft.wake(due)


def _configure(draft: Draft) -> None:
    """Bring existing nodes to the present labels and taints of their group.

    A node that is still starting may register with the values from before: it waits.
    """
    world = draft.world
    for place in draft.places:
        machine = place.machine
        if machine is None or place.now.phase not in UP:
            continue
        spec = machine_spec(world.spec, world.name, place.group, place.logical_id)
        wanted = node_config(spec)
        if wanted != machine.config:
            draft.do(Configure(machine.name, machine.config, wanted))


# --- groups


def _judge_group(draft: Draft, group: InstanceGroup) -> None:
    places = draft.of(group.name)
    was = draft.state.group(group.name)
    assert was is not None, "open_scaling has put it there"
    up = sum(place.now.phase in UP for place in places)
    failed = [place.now for place in places if place.now.phase is InstancePhase.FAILURE]
    is_complete = all(place.now.phase is InstancePhase.RUNNING for place in places)
    used = [place.machine for place in places]
    is_complete = is_complete and not any(
        machine.group == group.name and machine not in used for machine in draft.world.machines
    )
    now = replace(was, current=up, minimum=group.minimum, message="")
    if is_complete:
        now = replace(now, phase=GroupPhase.IN_SERVICE, settled=group.logical_ids)
    elif was.phase in (GroupPhase.IN_SERVICE, GroupPhase.DEGRADED):
        is_short = up < len(places)
        now = replace(now, phase=GroupPhase.DEGRADED if is_short else GroupPhase.IN_SERVICE)
    elif failed and not draft.is_continuous:
        now = replace(now, phase=GroupPhase.FAILED)
    elif was.phase is GroupPhase.FAILED:
        now = replace(now, phase=GroupPhase.UPDATING)
    if failed and now.phase is not GroupPhase.IN_SERVICE:
        first = failed[0]
        now = replace(now, message=f"{instance_id(first.machine)}: {first.message}")
    now = _hold_minimum(draft, group, now)
    draft.put_group(now)
    _record_group(draft, was, now)


def _hold_minimum(draft: Draft, group: InstanceGroup, now: GroupState) -> GroupState:
    """Abandon a change that has not reached the minimum in time."""
    if not draft.is_continuous or now.current >= group.minimum:
        return replace(now, short_since=None)
    since = draft.now if now.short_since is None else now.short_since
    if draft.now < since + MINIMUM_SECONDS:
        draft.wake(since + MINIMUM_SECONDS)
        return replace(now, short_since=since)
    if now.settled == group.logical_ids:
        return replace(now, short_since=since)
    draft.do(Retarget({group.name: now.settled}))
    text = f"MinInstanceCount {group.minimum} was not met in {MINIMUM_SECONDS / 3600:.0f} h"
    return replace(now, short_since=None, phase=GroupPhase.FAILED, message=text)


def _record_group(draft: Draft, was: GroupState, now: GroupState) -> None:
    if was.phase is now.phase:
        return
    level = {GroupPhase.FAILED: Level.ERROR, GroupPhase.DEGRADED: Level.WARN}.get(
        now.phase, Level.INFO
    )
    detail = f": {now.message}" if now.message else ""
    text = f"Instance group {now.name} is {now.phase.value}{detail}"
    metadata = {"FailureMessage": now.message} if now.message else {}
    draft.record_event(Resource.GROUP, text, level, group=now.name, InstanceGroup=metadata)


def _forget_groups(draft: Draft) -> None:
    """Remove groups that are no longer requested, once their machines are gone."""
    wanted = {group.name for group in draft.groups}
    places = {place.logical_id for place in draft.places}
    left = {machine.logical_id for machine in draft.world.machines} - places
    for group in [
        group_state for group_state in draft.state.groups if group_state.name not in wanted
    ]:
        if left & set(group.target):
            draft.put_group(replace(group, phase=GroupPhase.DELETING))
            continue
        others = tuple(
            group_state for group_state in draft.state.groups if group_state.name != group.name
        )
        draft.state = replace(draft.state, groups=others)
        draft.record_event(Resource.GROUP, f"Instance group {group.name} is gone", group=group.name)


# --- the cluster


def _judge_cluster(draft: Draft) -> None:
    before = draft.phase
    failed = [group for group in draft.state.groups if group.phase is GroupPhase.FAILED]
    is_changing = any(group.phase in CHANGING for group in draft.state.groups)
    if draft.is_continuous:
        draft.phase = ClusterPhase.IN_SERVICE
    elif not is_changing:
        if draft.phase is ClusterPhase.FAILED:
            draft.message = ""
        draft.phase = ClusterPhase.IN_SERVICE
    elif failed:
        _fail(draft, failed)
    elif before in (ClusterPhase.IN_SERVICE, ClusterPhase.FAILED, ClusterPhase.SYSTEM_UPDATING):
        draft.phase, draft.message = ClusterPhase.UPDATING, ""
    if draft.state.update is not None and draft.phase is ClusterPhase.IN_SERVICE:
        draft.phase = ClusterPhase.SYSTEM_UPDATING
    if draft.phase is not before or not draft.was.sequence:
        is_bad = draft.phase in (ClusterPhase.FAILED, ClusterPhase.ROLLING_BACK)
        detail = f": {draft.message}" if draft.message else ""
        text = f"Cluster {draft.world.spec.name} is {draft.phase.value}{detail}"
        metadata = {"FailureMessage": draft.message} if draft.message else {}
        level = Level.ERROR if is_bad else Level.INFO
        draft.record_event(Resource.CLUSTER, text, level, Cluster=metadata)


def _fail(draft: Draft, failed: list[GroupState]) -> None:
    """All or nothing: revert the change; of a cluster that was never complete, remove
    everything."""
    draft.message = f"instance group {failed[0].name}: {failed[0].message}"
    if draft.phase in (ClusterPhase.CREATING, ClusterPhase.FAILED):
        draft.phase = ClusterPhase.FAILED
        return
    draft.phase = ClusterPhase.ROLLING_BACK
    draft.do(
        Retarget(
            {
                group_state.name: group_state.settled
                for group_state in failed
                if group_state.target != group_state.settled
            }
        )
    )
