"""Changes of a NodeRecord during a repair. Functions of values.

Times that are kept are rounded to milliseconds, so that they read back as they were written.
"""

from __future__ import annotations

from dataclasses import replace

from unbroken.core.nodes.blame import FORGOTTEN_SECONDS
from unbroken.spec import keys
from unbroken.spec.nodes.kinds import HISTORY_MAX, NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.notices import FAULT_LABELS
from unbroken.spec.nodes.values import Action, Health

from .events import PatchNode, RepairNode, RepairSettings
from .rules import APPEAL, PERSON, Need

TEXT_MAX = 500
FAULT_ANNOTATIONS = (keys.FAULT_DETAILS, keys.ADVICE)


def kept_time(now: float) -> float:
    """Return a moment as it is kept."""
    return round(now, 3)


def begun(record: NodeRecordSpec, need: Need, action: Action, now: float) -> NodeRecordSpec:
    """Return the record with a needed repair, which waits until it may begin."""
    repair = RepairRecord(
        action=action,
        reason=need.reason[:TEXT_MAX],
        asked_by=need.asked_by,
        state=RepairState.WAITING,
        began_at=kept_time(now),
        fault=need.fault,
    )
    return replace(record, repair=repair)


def with_message(record: NodeRecordSpec, text: str) -> NodeRecordSpec:
    """Return the record with the text of the repair under way: what it does or waits for."""
    assert record.repair is not None
    return replace(record, repair=replace(record.repair, message=text[:TEXT_MAX]))


def ended(
    record: NodeRecordSpec, state: RepairState, text: str, settings: RepairSettings, now: float
) -> NodeRecordSpec:
    """Return the record after its repair; probation begins if a fault caused it."""
    repair = record.repair
    assert repair is not None
    last = replace(repair, state=state, message=text[:TEXT_MAX], ended_at=kept_time(now))
    node_record = replace(record, repair=None, history=(*record.history, last)[-HISTORY_MAX:])
    is_of_a_fault = repair.asked_by not in (PERSON, APPEAL)
    if state is RepairState.DONE and repair.acted_at is not None and is_of_a_fault:
        return replace(node_record, probation_until=kept_time(now + settings.probation_seconds))
    return node_record


def is_forgotten(record: NodeRecordSpec, now: float) -> bool:
    """True if all entries of a node are so old that they no longer count."""
    times = [entry.at for entry in record.blame]
    times += [repair.ended_at or repair.began_at for repair in record.history]
    times += [record.cleared_at or 0.0, record.quarantined_at or 0.0]
    return record.repair is None and now - max(times) > FORGOTTEN_SECONDS


def quarantined(record: NodeRecordSpec, reason: str, now: float) -> NodeRecordSpec:
    """Return the record in quarantine: the node takes no pods until a person has cleared it."""
    return replace(record, quarantined_at=kept_time(now), quarantine_reason=reason[:TEXT_MAX])


def freed(record: NodeRecordSpec) -> NodeRecordSpec:
    """Return the record out of quarantine."""
    return replace(record, quarantined_at=None, quarantine_reason="")


def is_cleared(record: NodeRecordSpec) -> bool:
    """True if a person has granted the appeal of a node that is in quarantine."""
    since, cleared = record.quarantined_at, record.cleared_at
    return since is not None and cleared is not None and cleared > since


def other_machine(record: NodeRecordSpec, machine: str) -> str:
    """Return why a node that names this machine now is not repaired."""
    return (
        f"the node joined as machine {record.machine[:TEXT_MAX]!r} and now says that it is "
        f"{machine[:TEXT_MAX]!r}: it is not repaired. If that is right, delete its NodeRecord"
    )


def withdrawn(node: str, action: Action) -> PatchNode:
    """Take a node out of service before its repair; the jobs see the label and move."""
    health = Health.PENDING_REPLACEMENT if action is Action.REPLACE else Health.PENDING_REBOOT
    return PatchNode(node, {keys.HEALTH: health.value}, {keys.REPAIR: None}, taint=True)


def held_back(node: str) -> PatchNode:
    """Keep new pods off a node, and leave running pods there."""
    return PatchNode(node, {keys.HEALTH: Health.UNSCHEDULABLE.value}, taint=True)


def returned(node: RepairNode, verified: str, *, is_kept: bool) -> PatchNode:
    """Mark the node as verified, and remove all marks of its fault.

    `is_kept`: it goes into quarantine rather than into service.
    """
    labels: dict[str, str | None] = {key: None for key in FAULT_LABELS if key in node.marks}
    if keys.DEEP_CHECK in node.marks and node.has_failed_check:
        labels[keys.DEEP_CHECK] = None
    if is_kept or not node.is_in_deep_check:
        labels[keys.HEALTH] = (Health.UNSCHEDULABLE if is_kept else Health.SCHEDULABLE).value
    annotations: dict[str, str | None] = {
        key: None for key in FAULT_ANNOTATIONS if key in node.marks
    }
    annotations[keys.VERIFIED] = verified
    taint = None if node.is_in_deep_check and not is_kept else is_kept
    return PatchNode(node.name, labels, annotations, taint=taint)
