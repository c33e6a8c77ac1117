"""What is held against a node, over all jobs: points that halve every week.

The number of points of each kind is a judgement: two faults that need a reboot, a relapse and a
failed check within days are reason enough to ask a person; a bug of a training script that happens
to die on the same node again and again is not.  A person's appeal keeps the evidence: what is older
than it counts nothing any more.

Incidents are told by programs of tenants: an exit code and an error text are what the program makes
them.  So an incident weighs little unless the kernel, NVML or a check found the node at fault on
the same day, a job counts once a day, and a namespace can never fill the limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from unbroken.core.job.recovery.signals import NODE_FAULT, NODE_LOST
from unbroken.spec.job.incident import PLANNED_MOVE, Incident
from unbroken.spec.nodes.record import BLAME_MAX, BlameEntry, BlameKind, NodeRecordSpec
from unbroken.spec.nodes.values import Action
from unbroken.wire.agent import FaultKind

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
"""Points of a fault, by what it calls for (judgement)."""
LOST_POINTS = 2.0
CHECK_POINTS = 4.0
RELAPSE_POINTS = 3.0
INCIDENT_POINTS = 2.0
LITTLE_POINTS = 0.2
"""Points of an incident that is the program's rather than the machine's, that the program alone has
told, or that was told already (judgement)."""
SAME_SECONDS = 600.0
"""An incident so near to a fault or a loss of its node is the consequence of that."""
DAY_SECONDS = 86400.0
"""A job counts once in that time.  A fault or a failed check within it confirms an incident."""
SPACE_SHARE = 0.5
"""Share of the limit that the incidents of one namespace reach at most, and so do those of all
namespaces together that only programs have told."""
WITNESSES = (BlameKind.FAULT, BlameKind.CHECK)
"""What the node's daemon and checks found: no program can write it."""
ALONE = "told by the program alone: "

SIGBUS_EXIT = 128 + 7
"""The kernel ends a process so that meets memory which cannot be corrected (Linux,
Documentation/mm/hwpoison.rst); a full /dev/shm, the other cause, has a class of its own."""
MACHINE_FAULTS = frozenset({NODE_LOST, NODE_FAULT, FaultKind.CUDA_ERROR.value})
"""Classes of an incident's culprit that are the machine's."""


def score(record: NodeRecordSpec, now: float, limit: float = LIMIT) -> float:
    """Points that are held against the node at `now`; `limit` is that of the quarantine."""
    return sum(points_at(record, now, limit))


def points_at(record: NodeRecordSpec, now: float, limit: float = LIMIT) -> list[float]:
    """Points that each entry counts at `now`, in the order of the record: 0 before an appeal, and
    what its namespace has left for an incident."""
    since = -math.inf if record.cleared_at is None else record.cleared_at
    most = limit * SPACE_SHARE
    left: defaultdict[str, float] = defaultdict(lambda: most)
    alone_left, found = most, []
    for entry in record.blame:
        value = points(entry, now) if entry.at > since else 0.0
        if entry.kind is BlameKind.INCIDENT:
            space = entry.source.partition("/")[0]
            value = min(value, left[space])
            if entry.weight <= LITTLE_POINTS:
                value = min(value, alone_left)
                alone_left -= value
            left[space] -= value
        found.append(value)
    return found


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
    blame = _bounded(sorted((*kept, entry), key=lambda one: one.at))
    return record if blame == record.blame else replace(record, blame=blame)


def _bounded(entries: list[BlameEntry]) -> tuple[BlameEntry, ...]:
    """The newest entries; incidents go first, so that jobs cannot push out what was found."""
    surplus = len(entries) - BLAME_MAX
    incidents = [one for one in entries if one.kind is BlameKind.INCIDENT][: max(surplus, 0)]
    kept = [one for one in entries if one not in incidents]
    return tuple(kept[-BLAME_MAX:])


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
    """What an incident would hold against its culprit's node if the node were found at fault as
    well; None: it is still open, or names none.

    `source` is `NAMESPACE/JOB-NUMBER`.  An open incident may yet find another culprit.
    """
    culprit = incident.culprit
    if incident.ended_at is None or not culprit.node or culprit.fault == PLANNED_MOVE:
        return None
    is_machine = culprit.fault in MACHINE_FAULTS or culprit.exit_code == SIGBUS_EXIT
    is_sure = incident.confidence in ("", "certain", "likely")
    weight = INCIDENT_POINTS if is_machine and is_sure else LITTLE_POINTS
    text = f"{culprit.fault}: {culprit.text}"
    return BlameEntry(incident.detected_at, BlameKind.INCIDENT, source, text, weight)


def add_incident(record: NodeRecordSpec, entry: BlameEntry, now: float) -> NodeRecordSpec:
    """The record with an incident; the same record where the job has one of that day in it."""
    job = _job_of(entry)
    known = (one for one in record.blame if one.kind is BlameKind.INCIDENT)
    if any(_job_of(one) == job and abs(one.at - entry.at) < DAY_SECONDS for one in known):
        return record
    if entry.weight > LITTLE_POINTS:
        entry = _weighed(record, entry)
    return add(record, entry, now)


def _weighed(record: NodeRecordSpec, entry: BlameEntry) -> BlameEntry:
    """An incident of the machine counts in full where something else found the node at fault that
    day, and was not the very fault that caused it."""
    apart = [(one.kind, abs(one.at - entry.at)) for one in record.blame]
    causes = (BlameKind.FAULT, BlameKind.LOST)
    if any(kind in causes and seconds <= SAME_SECONDS for kind, seconds in apart):
        return replace(entry, weight=LITTLE_POINTS)
    if any(kind in WITNESSES and seconds <= DAY_SECONDS for kind, seconds in apart):
        return entry
    return replace(entry, weight=LITTLE_POINTS, text=ALONE + entry.text)


def _job_of(entry: BlameEntry) -> str:
    """`NAMESPACE/JOB` of an incident."""
    return entry.source.rpartition("-")[0]
