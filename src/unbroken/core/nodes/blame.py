"""Blame of a node, over all jobs: points that halve every week.

The number of points of each kind is a judgement. Two faults that need a reboot, a relapse and a
failed check within days are reason enough to ask a person. A bug of a training script that happens
to end on the same node again and again is not. A person's appeal keeps the evidence, but entries
older than it no longer count.

Incidents are reported by programs of tenants, which control their exit codes and error texts. So an
incident weighs little unless the kernel, NVML or a check found the node at fault on the same day. A
job counts once a day, and a namespace can never fill the limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from unbroken.core.job.recovery.symptoms import NODE_FAULT, NODE_LOST
from unbroken.spec.job.incident import PLANNED_MOVE, Incident
from unbroken.spec.nodes.kinds import BLAME_MAX, BlameEntry, BlameKind, NodeRecordSpec
from unbroken.spec.nodes.values import Action
from unbroken.wire.agent import FaultKind

HALF_LIFE_SECONDS = 7 * 86400.0
"""Seconds after which points halve: a week (docs/design/nodes.md)."""
FORGOTTEN_SECONDS = 8 * HALF_LIFE_SECONDS
"""Age in seconds at which an entry is dropped: it has less than half a percent of its points."""
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
"""Points of a fault, by the action that it requires (judgement)."""
LOST_POINTS = 2.0
CHECK_POINTS = 4.0
RELAPSE_POINTS = 3.0
INCIDENT_POINTS = 2.0
LITTLE_POINTS = 0.2
"""Points of an incident caused by the program rather than the machine, known from the program
alone, or already counted (judgement)."""
SAME_SECONDS = 600.0
"""Seconds around a fault or a loss of the node within which an incident is its consequence."""
DAY_SECONDS = 86400.0
"""Seconds in which a job counts once. A fault or a failed check within it confirms an incident."""
SPACE_SHARE = 0.5
"""Largest share of the limit for the incidents of one namespace. The same share holds for the
incidents of all namespaces together that are known from programs only."""
WITNESSES = (BlameKind.FAULT, BlameKind.CHECK)
"""Findings of the node's daemon and of checks: no program can forge them."""
ALONE = "told by the program alone: "

SIGBUS_EXIT = 128 + 7
"""Exit code of SIGBUS.

The kernel ends a process with it that touches memory which cannot be corrected (Linux,
Documentation/mm/hwpoison.rst). A full /dev/shm, the other cause, has a class of its own.
"""
MACHINE_FAULTS = frozenset({NODE_LOST, NODE_FAULT, FaultKind.CUDA_ERROR.value})
"""Classes of an incident's culprit that are faults of the machine."""


def score(record: NodeRecordSpec, now: float, limit: float = LIMIT) -> float:
    """Return the node's points at `now`; `limit` is that of the quarantine."""
    return sum(points_at(record, now, limit))


def points_at(record: NodeRecordSpec, now: float, limit: float = LIMIT) -> list[float]:
    """Return the points of each entry at `now`, in the order of the record.

    An entry before an appeal has 0. An incident gets what its namespace has left.
    """
    since = -math.inf if record.cleared_at is None else record.cleared_at
    most = limit * SPACE_SHARE
    left: defaultdict[str, float] = defaultdict(lambda: most)
    alone_left, result = most, []
    for entry in record.blame:
        value = points(entry, now) if entry.at > since else 0.0
        if entry.kind is BlameKind.INCIDENT:
            space = entry.source.partition("/")[0]
            value = min(value, left[space])
            if entry.weight <= LITTLE_POINTS:
                value = min(value, alone_left)
                alone_left -= value
            left[space] -= value
        result.append(value)
    return result


def points(entry: BlameEntry, now: float) -> float:
    """Return the remaining points of an entry; one from the future counts as new."""
    return float(entry.weight * 0.5 ** (max(0.0, now - entry.at) / HALF_LIFE_SECONDS))


def add(record: NodeRecordSpec, entry: BlameEntry, now: float) -> NodeRecordSpec:
    """Return the record with the entry; the same record if it has it already, or it is too old.

    Entries are equal if kind, source and time are (within a millisecond, as times are written).
    """
    if entry.weight <= 0 or now - entry.at > FORGOTTEN_SECONDS:
        return record
    if any(_is_same(entry, known) for known in record.blame):
        return record
    entry = replace(entry, text=entry.text[:TEXT_MAX])
    kept = [known for known in record.blame if now - known.at <= FORGOTTEN_SECONDS]
    blame = _bounded(sorted((*kept, entry), key=lambda blame_entry: blame_entry.at))
    return record if blame == record.blame else replace(record, blame=blame)


def _bounded(entries: list[BlameEntry]) -> tuple[BlameEntry, ...]:
    """Return the newest entries; incidents are dropped first, so that jobs cannot displace
    findings."""
    surplus = len(entries) - BLAME_MAX
    incidents = [entry for entry in entries if entry.kind is BlameKind.INCIDENT][: max(surplus, 0)]
    kept = [entry for entry in entries if entry not in incidents]
    return tuple(kept[-BLAME_MAX:])


def _is_same(blame_entry: BlameEntry, other: BlameEntry) -> bool:
    return (blame_entry.kind, blame_entry.source) == (other.kind, other.source) and abs(
        blame_entry.at - other.at
    ) < 0.001


def of_fault(at: float, reason: str, text: str, action: Action) -> BlameEntry:
    """Return the entry for a fault that the node's daemon saw, and that requires `action`."""
    return BlameEntry(at, BlameKind.FAULT, reason, text, FAULT_POINTS[action])


def of_loss(at: float, text: str) -> BlameEntry:
    """Return the entry for a node that went silent."""
    return BlameEntry(at, BlameKind.LOST, "NotReady", text, LOST_POINTS)


def of_check(at: float, name: str, text: str) -> BlameEntry:
    """Return the entry for a check that found the node at fault."""
    return BlameEntry(at, BlameKind.CHECK, name, text, CHECK_POINTS)


def of_relapse(at: float, reason: str, text: str) -> BlameEntry:
    """Return the entry for a fault within the probation after a repair."""
    return BlameEntry(at, BlameKind.RELAPSE, reason, text, RELAPSE_POINTS)


def of_incident(incident: Incident, source: str) -> BlameEntry | None:
    """Return an incident's entry for its culprit's node, with the weight that it has if the node is
    found at fault as well.

    None: it is still open, or names no node. `source` is `NAMESPACE/JOB-NUMBER`. An open incident
    may yet find another culprit.
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
    """Return the record with an incident; the same record if the job has one of that day in it."""
    job = _job_of(entry)
    known = (blame_entry for blame_entry in record.blame if blame_entry.kind is BlameKind.INCIDENT)
    if any(
        _job_of(blame_entry) == job and abs(blame_entry.at - entry.at) < DAY_SECONDS
        for blame_entry in known
    ):
        return record
    if entry.weight > LITTLE_POINTS:
        entry = _weighed(record, entry)
    return add(record, entry, now)


def _weighed(record: NodeRecordSpec, entry: BlameEntry) -> BlameEntry:
    """Return the incident's entry with its weight. It has full weight if something else found the
    node at fault that day, other than the fault that caused the incident."""
    apart = [(blame_entry.kind, abs(blame_entry.at - entry.at)) for blame_entry in record.blame]
    causes = (BlameKind.FAULT, BlameKind.LOST)
    if any(kind in causes and seconds <= SAME_SECONDS for kind, seconds in apart):
        return replace(entry, weight=LITTLE_POINTS)
    if any(kind in WITNESSES and seconds <= DAY_SECONDS for kind, seconds in apart):
        return entry
    return replace(entry, weight=LITTLE_POINTS, text=ALONE + entry.text)


def _job_of(entry: BlameEntry) -> str:
    """Return `NAMESPACE/JOB` of an incident."""
    return entry.source.rpartition("-")[0]
