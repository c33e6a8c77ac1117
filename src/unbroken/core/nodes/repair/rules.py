"""Rules of repair: the need of a node, the rung, and obstacles to its start. Functions of values.

The ladder is reset < reboot < replace. A rung that failed, and a fault that came back within the
probation, go one rung up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action, Health, NodeRecovery

from .events import RepairNode, RepairOrder, RepairSettings

LADDER = (Action.RESET_GPU, Action.REBOOT, Action.REPLACE)
ORDERS: Mapping[str, Action] = {
    "reset": Action.RESET_GPU,
    **{action.value: action for action in LADDER},
}
"""Values of the annotation `unbroken.dev/repair`, and their actions."""
PENDING = (Health.PENDING_REBOOT, Health.PENDING_REPLACEMENT)
PERSON = "annotation"
APPEAL = "clear"
LOST = "lost"
LOST_FAULT = "NotReady"
ACTIVE = (RepairState.DRAINING, RepairState.ACTING, RepairState.CHECKING)
MASS_COUNT, MASS_SHARE = 2, 0.55
"""Number and share of lost nodes above which a network or an API server is rather at fault.

As in kube-controller-manager's node lifecycle: --unhealthy-zone-threshold, and more than two nodes.
"""
BACKOFF_DOUBLINGS = 10
NAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class Need:
    """A repair that a node needs."""

    action: Action
    reason: str
    asked_by: str
    fault: str = ""


def need_of(
    node: RepairNode,
    record: NodeRecordSpec,
    recovery: NodeRecovery,
    settings: RepairSettings,
    now: float,
) -> Need | None:
    """Return the node's need at `now`.

    A person's order takes precedence. Without automatic recovery, in quarantine, and once the
    machine is gone, only such an order counts.
    """
    ordered = ORDERS.get(node.order)
    if ordered is not None:
        return Need(ordered, f"ordered: {node.order}", PERSON)
    if recovery is NodeRecovery.NONE or record.quarantined_at is not None or node.is_fenced:
        return None
    if node.health in PENDING:
        return _labelled(node)
    if now >= lost_at(node, settings):
        text = f"not ready for {now - node.ready_at:.0f} s"
        return Need(Action.REPLACE, text, LOST, LOST_FAULT)
    return None


def lost_at(node: RepairNode, settings: RepairSettings) -> float:
    """Return the time from which a node that is not ready counts as lost; inf: it is ready."""
    if node.is_ready:
        return math.inf
    is_urgent = node.is_silent and node.is_awaited
    return node.ready_at + (settings.awaited_seconds if is_urgent else settings.lost_seconds)


def _labelled(node: RepairNode) -> Need:
    action = action_of(node)
    fault = node.faults[0] if node.faults else None
    reason = node.fault_reason or (fault.reason if fault else "")
    if reason:
        # The daemon writes labels and condition one after another: either may be seen first.
        return Need(action, f"{reason}: {fault.text}" if fault else reason, "daemon", reason)
    text = f"labelled {node.health.value if node.health else ''}"
    if node.has_failed_check:
        return Need(action, f"{text}: its deep check failed", "check", "DeepHealthCheckFailed")
    return Need(action, text, "label")


def action_of(node: RepairNode) -> Action:
    """Return the entry rung of a node's label; `none`: it requires nothing."""
    if node.health is Health.PENDING_REPLACEMENT:
        return Action.REPLACE
    if node.health is not Health.PENDING_REBOOT:
        return Action.NONE
    return Action.RESET_GPU if node.advice == Action.RESET_GPU.value else Action.REBOOT


def is_still_needed(node: RepairNode, repair: RepairRecord, settings: RepairSettings) -> bool:
    """True if the reason of a repair that is not yet ordered still exists."""
    if repair.asked_by in (PERSON, APPEAL):
        return True
    if repair.asked_by == LOST:
        return not node.is_ready or bool(node.faults)
    return node.health in PENDING


def rung(action: Action) -> int:
    """Return the rung of the ladder, from 0; -1: nothing is done to the node."""
    return LADDER.index(action) if action in LADDER else -1


def rung_above(action: Action, supports: Collection[Action]) -> Action | None:
    """Return the next rung that the provider has; None: there is none."""
    return next((one for one in LADDER[rung(action) + 1 :] if one in supports), None)


def is_in_probation(record: NodeRecordSpec, now: float) -> bool:
    """True if a fault at `now` means that the last repair has failed."""
    return record.probation_until is not None and now < record.probation_until


def entry_rung(need: Need, record: NodeRecordSpec, now: float) -> tuple[Action, bool]:
    """Return the first rung, and whether it is raised because the same fault was repaired
    recently."""
    last = last_made(record)
    if need.asked_by == PERSON or last is None or not is_in_probation(record, now):
        return need.action, False
    if not need.fault or need.fault != last.fault:
        return need.action, False
    raised = LADDER[min(rung(last.action) + 1, len(LADDER) - 1)]
    return max(need.action, raised, key=rung), True


def last_made(record: NodeRecordSpec) -> RepairRecord | None:
    """Return the last repair that was carried out."""
    made = (
        repair_record
        for repair_record in reversed(record.history)
        if repair_record.acted_at is not None
    )
    return next(
        (repair_record for repair_record in made if repair_record.state is RepairState.DONE), None
    )


def supported(action: Action, supports: Collection[Action]) -> Action | None:
    """Return the lowest rung of at least `action` that the provider has."""
    return action if action in supports else rung_above(action, supports)


def retry_at(record: NodeRecordSpec, settings: RepairSettings) -> float:
    """Return the time before which the repair under way is not (re)tried: its back-off."""
    repair = record.repair
    if repair is None or (repair.asked_by == PERSON and not repair.tries):
        return 0.0
    failed = 0
    for repair_record in reversed(record.history):
        if repair_record.state is not RepairState.FAILED:
            break
        failed += 1
    since = repair.acted_at if repair.tries else record.history[-1].ended_at if failed else None
    if since is None:
        return 0.0
    doublings = min(repair.tries + failed - 1, BACKOFF_DOUBLINGS)
    return float(since + settings.backoff_seconds * 2**doublings)


def refused_seconds(times: int, settings: RepairSettings) -> float:
    """Return the seconds in which a provider is not asked again after `times` refusals in a row."""
    doublings = min(times - 1, BACKOFF_DOUBLINGS)
    return min(settings.refused_seconds * 2.0**doublings, settings.refused_seconds_max)


def obstacle(
    node: RepairNode,
    repair: RepairRecord,
    nodes: Mapping[str, RepairNode],
    active: Collection[str],
    out: Collection[str],
    settings: RepairSettings,
) -> str:
    """Return what a repair that may otherwise begin has to wait for; empty: nothing.

    `active` are the nodes under repair, `out` those and the ones in quarantine.

    A person's order is never held up: it names the node, and the person has considered the others.
    """
    if repair.asked_by in (PERSON, APPEAL):
        return ""
    lost = [repair_node.name for repair_node in nodes.values() if not repair_node.is_ready]
    is_mass = len(lost) > MASS_COUNT and len(lost) >= MASS_SHARE * len(nodes)
    if repair.asked_by == LOST and is_mass:
        return (
            f"waits for other nodes to come back: {len(lost)} of {len(nodes)} are not ready, "
            "which is rather a fault of the network or of the API server"
        )
    if full := is_full(node.name, out, len(nodes), settings):
        return f"waits for its turn: {full}"
    beside = [one for one in active if one in nodes and nodes[one].rack == node.rack]
    if settings.one_per_rack and node.rack and beside:
        return f"waits for {_names(beside)}, of the same rack, which is under repair"
    return ""


def is_full(name: str, out: Collection[str], count: int, settings: RepairSettings) -> str:
    """Return why no further node may be taken out of service, besides the node `name`; empty: one
    may.

    `out` are the nodes in quarantine or under repair, of `count`.
    """
    others, most = {*out} - {name}, max(1, int(settings.share * count))
    if len(others) < most:
        return ""
    return (
        f"{_names(others)} in quarantine or under repair, of {count} nodes; the limit is {most} "
        "(--repair-share)"
    )


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:NAMES_MAX])
    return shown + (f" and {len(ordered) - NAMES_MAX} more" if len(ordered) > NAMES_MAX else "")


def order_of(node: str, repair: RepairRecord) -> RepairOrder:
    """Return the order of a repair; the same after a restart of the repairer."""
    assert repair.acted_at is not None
    identity = f"{node}-{repair.action.value}-{round(repair.acted_at * 1000)}-{repair.tries}"
    return RepairOrder(node, repair.action, repair.boot_id, identity)


def limit_seconds(action: Action, settings: RepairSettings) -> float:
    """Return the seconds that an order may take until the node is back."""
    return settings.replace_seconds if action is Action.REPLACE else settings.act_seconds


def is_flapping(record: NodeRecordSpec, settings: RepairSettings, now: float) -> bool:
    """True if the node was repaired too often recently for another repair to be of use."""
    since = now - settings.flap_seconds
    if record.cleared_at is not None:
        since = max(since, record.cleared_at)
    made = [
        repair_record
        for repair_record in record.history
        if repair_record.acted_at is not None and repair_record.acted_at > since
    ]
    return (
        sum(1 for repair_record in made if repair_record.asked_by != PERSON) >= settings.flaps_max
    )
