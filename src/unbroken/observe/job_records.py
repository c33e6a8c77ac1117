"""Data for the metrics of jobs: the present state of each job, and counts of its ended incidents.

Counters belong to a job's name: a job that is deleted and created again continues them. They stay
for a while after a deletion, so that their last values are still scraped, and then go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from unbroken.core.job.record.conditions import current_condition
from unbroken.core.job.record.timeline import Goodput, goodput
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import NAMES_MAX, OTHERS, Ledger
from unbroken.spec.job.types import JobStatus
from unbroken.spec.keys import ConditionType

BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Buckets in seconds: from a restart in place to the replacement of a node.

HyperPod's published recoveries took 94 to 149 s in all (reference, section 13).
"""
KEPT_SECONDS = 900.0
"""Seconds that counters of a deleted job are served: sixty scrapes of the documented 15 s."""
DELETED_MAX = 1000
"""Deleted jobs whose counters are kept; the oldest go first."""


class JobName(NamedTuple):
    """Name of the job that series belong to."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job in the API."""

    uid: str
    created_at: float
    status: JobStatus
    ledger: Ledger


@dataclass(slots=True)
class Latencies:
    """Durations, counted by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Return (upper bound as Prometheus writes it, number of durations not above it)."""
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            yield bound, total


@dataclass(slots=True)
class JobRecord:
    """The record of one job's name: its present state, and its counters."""

    name: JobName
    now: JobState | None = None
    """The present state; None: deleted."""
    deleted_at: float | None = None
    incidents: dict[int, Incident] = field(default_factory=dict)
    """Incidents of the job that exists now, as kept by the API."""
    created: int = 0
    deleted: int = 0
    ends: Counter[ConditionType] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Incidents that have ended, by class of the fault and remedy."""
    restarted: Counter[str] = field(default_factory=Counter)
    """Restarts after which all workers ran again, by class of the fault."""
    detection: Latencies = field(default_factory=Latencies)
    restart: Latencies = field(default_factory=Latencies)
    counted: set[int] = field(default_factory=set)
    """Numbers of incidents that are in the counters."""
    has_ended: bool = False

    def goodput(self, now: float) -> Goodput:
        """Return the time account of the existing job."""
        assert self.now is not None
        job = self.now
        return goodput(job.status, self.incidents.values(), job.ledger, now, job.created_at)

    def class_of(self, fault: str) -> str:
        """Return the class, or `others` if there have been too many different ones."""
        known = {name for name, _ in self.ended} | {OTHERS}
        return fault if fault in known or len(known) < NAMES_MAX else OTHERS


class JobRecords:
    """The records of all jobs; `on_ended` is called once for each incident that ends from `since`
    on."""

    def __init__(
        self, since: float, clock: Callable[[], float], on_ended: Callable[[Incident], None]
    ) -> None:
        self._since = since
        self._clock = clock
        self._on_ended = on_ended
        self._records: dict[JobName, JobRecord] = {}
        self._early: dict[str, dict[int, Incident]] = {}
        """Incidents that came before their job, by its uid."""

    def job(self, name: JobName, job: JobState) -> None:
        """Take the present state of a job."""
        record = self._records.setdefault(name, JobRecord(name))
        if record.now is None or record.now.uid != job.uid:
            self._begin(record, job)
        record.now = job
        stands = current_condition(job.status.conditions)
        is_end = stands in (ConditionType.COMPLETED, ConditionType.FAILED)
        if is_end and not record.has_ended:
            assert stands is not None
            record.ends[stands] += 1
        record.has_ended = is_end

    def job_gone(self, name: JobName) -> None:
        """Note that a job was deleted."""
        record = self._records.get(name)
        if record is None or record.now is None:
            return
        record.now, record.deleted_at = None, self._clock()
        record.deleted += 1
        record.incidents = {}
        self._forget_deleted()

    def incident(self, name: JobName, uid: str, incident: Incident) -> None:
        """Take the present state of an incident, of the job with this uid."""
        record = self._records.get(name)
        if record is None or record.now is None or record.now.uid != uid:
            self._early.setdefault(uid, {})[incident.number] = incident
            return
        record.incidents[incident.number] = incident
        is_over = bool(incident.outcome) and (incident.ended_at or 0.0) >= self._since
        if is_over and incident.number not in record.counted:
            record.counted.add(incident.number)
            _count(record, incident)
            self._on_ended(incident)

    def incident_gone(self, name: JobName, uid: str, number: int) -> None:
        """Note that an incident was deleted: there were too many, or its job is gone."""
        early = self._early.get(uid)
        if early is not None:
            early.pop(number, None)
            if not early:
                del self._early[uid]
        record = self._records.get(name)
        if record is not None and record.now is not None and record.now.uid == uid:
            record.incidents.pop(number, None)

    def all(self) -> list[JobRecord]:
        """Return every job, and those deleted recently, by name."""
        self._forget_deleted()
        return [self._records[name] for name in sorted(self._records)]

    def _begin(self, record: JobRecord, job: JobState) -> None:
        if record.now is not None:
            record.deleted += 1
        record.now, record.deleted_at = job, None
        record.created += 1
        record.has_ended = False
        record.incidents, record.counted = {}, set()
        for incident in self._early.pop(job.uid, {}).values():
            self.incident(record.name, job.uid, incident)

    def _forget_deleted(self) -> None:
        until = self._clock() - KEPT_SECONDS
        deleted = sorted(
            (record.deleted_at, name)
            for name, record in self._records.items()
            if record.deleted_at is not None
        )
        surplus = max(len(deleted) - DELETED_MAX, 0)
        for number, (at, name) in enumerate(deleted):
            if number < surplus or at < until:
                del self._records[name]


def _count(record: JobRecord, incident: Incident) -> None:
    fault = record.class_of(incident.culprit.fault)
    record.ended[fault, incident.remedy.value] += 1
    record.detection.add(max(incident.detected_at - incident.culprit.at, 0.0))
    if incident.started_at is not None:
        record.restarted[fault] += 1
        record.restart.add(max(incident.started_at - incident.detected_at, 0.0))
