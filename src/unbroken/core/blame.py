"""What is held against a node, over all jobs: points that halve every week.

The number of points of each kind is a judgement: two faults that need a reboot, a relapse and a
failed check within days are reason enough to ask a person; a bug of a training script that happens
to die on the same node again and again is not.  A person's appeal keeps the evidence: what is older
than it counts nothing any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from unbroken.spec.incident import Incident
from unbroken.spec.node_keys import Action
from unbroken.spec.node_record import BLAME_MAX, BlameEntry, BlameKind, NodeRecordSpec
from unbroken.wire.agent import FaultKind

from .signals import NODE_FAULT, NODE_LOST

HALF_LIFE_SECONDS = 7 * 86400.0
"""docs/design/nodes.md: points halve every week."""
FORGOTTEN_SECONDS = 8 * HALF_LIFE_SECONDS
"""An entry of less than half a percent of its points is dropped."""
LIMIT = 9.0
"""Points above which a node is quarantined (judgement)."""
TEXT_MAX = 300

FAULT_POINTS: Mapping[Action, float] = {
    Action.NONE: 0.0,
    Action.RESTART_JOB: 0.2,
    Action.RESET_GPU: 1.0,
    Action.REBOOT: 2.0,
    Action.REPLACE: 4.0,
}
"""Of a fault, by what it calls for (judgement)."""
LOST_POINTS = 2.0
CHECK_POINTS = 4.0
RELAPSE_POINTS = 3.0
INCIDENT_POINTS = 2.0
LITTLE_POINTS = 0.2
"""Of an incident that is the program's rather than the machine's, or told already (judgement)."""
SAME_SECONDS = 600.0
"""An incident so near to a fault or a loss of its node is the consequence of that."""

SIGBUS_EXIT = 128 + 7
"""The kernel ends a process so that meets memory which cannot be corrected (Linux,
Documentation/mm/hwpoison.rst); a full /dev/shm, the other cause, has a class of its own."""
MACHINE_FAULTS = frozenset({NODE_LOST, NODE_FAULT, FaultKind.CUDA_ERROR.value})
"""Classes of an incident's culprit that are the machine's."""


def score(record: NodeRecordSpec, now: float) -> float:
    """Points that are held against the node at `now`."""
    since = -math.inf if record.cleared_at is None else record.cleared_at
    return sum(points(entry, now) for entry in record.blame if entry.at > since)


def points(entry: BlameEntry, now: float) -> float:
    """What is left of an entry's points; one from the future counts as if it were new."""
    return float(entry.weight * 0.5 ** (max(0.0, now - entry.at) / HALF_LIFE_SECONDS))


def add(record: NodeRecordSpec, entry: BlameEntry, now: float) -> NodeRecordSpec:
    """The record with the entry; the same record where it is in already, or too old.

    One thing is known again by kind, source and time (within a millisecond, as times are written).
    """
    if entry.weight <= 0 or now - entry.at > FORGOTTEN_SECONDS:
        return record
    if any(_is_same(entry, known) for known in record.blame):
        return record
    entry = replace(entry, text=entry.text[:TEXT_MAX])
    kept = [known for known in record.blame if now - known.at <= FORGOTTEN_SECONDS]
    blame = tuple(sorted((*kept, entry), key=lambda one: one.at)[-BLAME_MAX:])
    return record if blame == record.blame else replace(record, blame=blame)


def _is_same(one: BlameEntry, other: BlameEntry) -> bool:
    return (one.kind, one.source) == (other.kind, other.source) and abs(one.at - other.at) < 0.001


def of_fault(at: float, reason: str, text: str, action: Action) -> BlameEntry:
    """The node's daemon saw a fault that calls for `action`."""
    return BlameEntry(at, BlameKind.FAULT, reason, text, FAULT_POINTS[action])


def of_loss(at: float, text: str) -> BlameEntry:
    """The node went silent."""
    return BlameEntry(at, BlameKind.LOST, "NotReady", text, LOST_POINTS)


def of_check(at: float, name: str, text: str) -> BlameEntry:
    """A check found the node at fault."""
    return BlameEntry(at, BlameKind.CHECK, name, text, CHECK_POINTS)


def of_relapse(at: float, reason: str, text: str) -> BlameEntry:
    """A fault came within the probation after a repair."""
    return BlameEntry(at, BlameKind.RELAPSE, reason, text, RELAPSE_POINTS)


def of_incident(incident: Incident, source: str) -> BlameEntry | None:
    """What an incident holds against its culprit's node; None: it is still open, or names none.

    `source` is `NAMESPACE/INCIDENT`.  An open incident may yet find another culprit.
    """
    culprit = incident.culprit
    if incident.ended_at is None or not culprit.node:
        return None
    is_machine = culprit.fault in MACHINE_FAULTS or culprit.exit_code == SIGBUS_EXIT
    is_sure = incident.confidence in ("", "certain", "likely")
    weight = INCIDENT_POINTS if is_machine and is_sure else LITTLE_POINTS
    text = f"{culprit.fault}: {culprit.text}"
    return BlameEntry(incident.detected_at, BlameKind.INCIDENT, source, text, weight)


def add_incident(record: NodeRecordSpec, entry: BlameEntry, now: float) -> NodeRecordSpec:
    """The record with an incident, which counts little beside the fault that has caused it."""
    causes = (BlameKind.FAULT, BlameKind.LOST)
    if any(one.kind in causes and abs(one.at - entry.at) <= SAME_SECONDS for one in record.blame):
        entry = replace(entry, weight=min(entry.weight, LITTLE_POINTS))
    return add(record, entry, now)
