"""The incidents of one job: opened by the first sign, joined by later signs, closed by the end.

The culprit is the first cause by time. The loss of a peer is never the culprit. A worker that was
ordered to stop is none either while another cause is known. A rank that ended early takes
precedence over the errors of ranks that waited for it. An unreachable agent may only be the first
notice of its pod's deletion.

An incident is written without secrets, and smaller than the API's limit. etcd refuses objects above
1.5 MB, and a job has many incidents. One incident may take at most 256 KiB, whatever characters it
contains.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unbroken.core.job.events import JobEffect, NodeName, WriteIncident
from unbroken.core.job.record.redaction import clean_incident
from unbroken.spec.job.incident import PLANNED_MOVE, Incident, Remedy, Restored, StackGroup, Symptom
from unbroken.wire.agent import FaultKind

from .symptoms import AGENT_LOST, POD_DELETED, reason_of

SYMPTOMS_MAX = 64
"""Signals kept with an incident; an object of the API must not grow with the job's size."""
OBJECT_BYTES = 256 * 1024
TEXT_BYTES = 1024
NAME_BYTES = 256
CULPRIT_BYTES = 32 * 1024
EVIDENCE_BYTES = 48 * 1024
"""Bytes of all signals but the culprit."""
RESTORED_MAX = 32
STACKS_BYTES = 24 * 1024
UNKNOWN = "unknown"
"""Replacement for a required text that is empty.

Server-side apply of Kubernetes 1.20 turns an empty text into null, which the definition refuses:
the incident would never be written.
"""
_LETTER_BYTES = 12
"""Most bytes that one character takes in JSON: two escapes of six."""


def writable(incident: Incident) -> Incident:
    """Return the incident as it is to be written."""
    result = bounded(clean_incident(incident))
    return replace(result, fault=reason_of(result.culprit))


def bounded(incident: Incident) -> Incident:
    """Return the incident with less evidence if it would be too large; the culprit keeps most."""
    (culprit,) = _symptoms([incident.culprit], CULPRIT_BYTES)
    left, groups = STACKS_BYTES, []
    for group in incident.groups:
        found, left = _group(group, left)
        groups.append(found)
    return replace(
        incident,
        culprit=culprit,
        signals=_symptoms(incident.signals[:SYMPTOMS_MAX], EVIDENCE_BYTES),
        reason=_required(incident.reason, TEXT_BYTES),
        blame=cut(incident.blame, TEXT_BYTES),
        outcome=cut(incident.outcome, TEXT_BYTES),
        groups=tuple(groups[:16]),
        slowest={stage: pod for stage, pod in incident.slowest.items() if pod},
        restored=tuple(map(_restored, incident.restored[:RESTORED_MAX])),
        resumed=cut(incident.resumed, TEXT_BYTES),
    )


def _required(text: str, size: int) -> str:
    """Return a required text, cut to its size."""
    return cut(text, size) or UNKNOWN


def cut(text: str, size: int) -> str:
    """Return the beginning of a text that takes at most this many bytes in JSON."""
    while len(text) * _LETTER_BYTES > size and _size(text) > size:
        text = text[: max(size // _LETTER_BYTES, len(text) * size // _size(text))]
    return text


def _size(text: str) -> int:
    return len(json.dumps(text))


def _symptoms(symptoms: Sequence[Symptom], left: int) -> tuple[Symptom, ...]:
    found = []
    for symptom in symptoms:
        evidence, left = _last(symptom.evidence, left)
        found.append(
            replace(
                symptom,
                fault=_required(symptom.fault, NAME_BYTES),
                text=_required(symptom.text, TEXT_BYTES),
                pod=cut(symptom.pod, NAME_BYTES),
                node=cut(symptom.node, NAME_BYTES),
                evidence=evidence,
                fingerprint=cut(symptom.fingerprint, NAME_BYTES),
                rule=cut(symptom.rule, NAME_BYTES),
            )
        )
    return tuple(found)


def _restored(one: Restored) -> Restored:
    return replace(
        one,
        ranks=_required(one.ranks, NAME_BYTES),
        source=_required(one.source, NAME_BYTES // 2),
        checksum=cut(one.checksum, NAME_BYTES // 2),
        name=cut(one.name, NAME_BYTES // 2),
    )


def _group(group: StackGroup, left: int) -> tuple[StackGroup, int]:
    # The innermost frames, which come first, are the most useful.
    stack, left = _last(group.stack[::-1], left)
    words = _required(group.doing, TEXT_BYTES)
    ranks = _required(group.ranks, TEXT_BYTES)
    return replace(group, ranks=ranks, doing=words, stack=stack[::-1]), left


def _last(lines: Sequence[str], left: int) -> tuple[tuple[str, ...], int]:
    """Return the last lines that fit; an empty line becomes a space, as an empty text cannot be
    applied."""
    kept: list[str] = []
    for line in reversed(lines):
        if (size := _size(line)) > left:
            break
        kept.append(line or " ")
        left -= size
    return tuple(reversed(kept)), left


RESTART_REQUESTED = "RestartRequested"
"""A person asked for the restart, for example with `unbroken restart`."""
OPERATOR_RESTARTED = "OperatorRestarted"
"""An operator that took over could not determine what runs, and started a new attempt."""
UNCHARGED = (RESTART_REQUESTED, OPERATOR_RESTARTED, PLANNED_MOVE)
"""Causes without a culprit: the restart costs no budget."""
_TERMINATED = (128 + 15, -15)
"""Exit codes of SIGTERM: the worker was ordered to stop, for a reason that another sign may
name."""
INCIDENTS_MAX = 50
"""Incidents that are kept for a job."""


def _weight(symptom: Symptom) -> tuple[int, float]:
    if symptom.fault == PLANNED_MOVE:
        return (-1, symptom.at)  # All later signs are consequences of the stop.
    if symptom.fault in UNCHARGED:
        return (4, symptom.at)
    if symptom.fault == FaultKind.PEER_LOST.value:
        return (3, symptom.at)
    if symptom.exit_code in _TERMINATED:
        return (2, symptom.at)
    return (0 if symptom.fault == FaultKind.EARLY_EXIT.value else 1, symptom.at)


def culprit(symptoms: Sequence[Symptom]) -> Symptom:
    """Return the first cause among the signs of one fault."""
    first = min(symptoms, key=_weight)
    if first.fault != AGENT_LOST:
        return first
    deletions = [one for one in symptoms if (one.pod, one.fault) == (first.pod, POD_DELETED)]
    return min(deletions, key=_weight, default=first)


class Incidents:
    """All incidents of a job; at most one is open."""

    def __init__(self) -> None:
        self.open: Incident | None = None
        self.offences: Counter[NodeName] = Counter()
        """Number of culprits that each node held."""
        self.last_request = 0.0
        """Time of the newest restart request that led to an incident."""
        self.closed: dict[int, Incident] = {}
        """Closed incidents that are kept, by number."""
        self.revision = 0
        """Raised by each change of a closed incident."""
        self._numbers = set[int]()
        self._seen: set[tuple[str, int | None, str]] = set()
        self._is_dirty = False

    @property
    def uncharged(self) -> int:
        """Number of kept incidents whose restart cost no budget; the ledger counts the others."""
        return sum(one.culprit.fault in UNCHARGED for one in self.closed.values())

    @property
    def kept(self) -> list[Incident]:
        """The closed incidents that are kept, and the open one."""
        return [*self.closed.values(), *([self.open] if self.open else [])]

    def remember(self, incident: Incident) -> None:
        """Take over an incident that an earlier operator has written."""
        if incident.number in self._numbers:
            return
        if not incident.outcome and (self.open is None or incident.number > self.open.number):
            self.open = incident
        self._numbers.add(incident.number)
        self._note_requests(incident.signals)
        if incident.outcome:
            self._count(incident)

    def open_incident(
        self, attempt: int, symptoms: Iterable[Symptom], remedy: Remedy, reason: str, now: float
    ) -> Incident:
        """Open an incident; the open one must have been closed before."""
        assert self.open is None
        found = tuple(symptoms)
        assert found, "an incident has a sign"
        number = max(self._numbers, default=0) + 1
        self._numbers.add(number)
        self._seen = {(s.pod, s.rank, s.fault) for s in found}
        kept = sorted(found, key=lambda s: s.at)[:SYMPTOMS_MAX]
        first = culprit(found)
        self.open = Incident(number, attempt, first, tuple(kept), remedy, reason, detected_at=now)
        self._is_dirty = True
        return self.open

    def add_signs(self, symptoms: Iterable[Symptom]) -> bool:
        """Add signs to the open incident; return True if any was new."""
        assert self.open is not None
        new = [s for s in symptoms if (s.pod, s.rank, s.fault) not in self._seen]
        if not new:
            return False
        self._seen |= {(s.pod, s.rank, s.fault) for s in new}
        kept = sorted((*self.open.signals, *new), key=lambda s: s.at)[:SYMPTOMS_MAX]
        first = culprit((self.open.culprit, *new))
        if first not in kept:
            kept[-1] = first
        # A mere addition is written with the next stage. A request must be written at once, lest an
        # operator that does not know it follows it again.
        is_asked = any(symptom.fault == RESTART_REQUESTED for symptom in new)
        self._is_dirty |= is_asked or first != self.open.culprit
        self.open = replace(self.open, culprit=first, signals=tuple(kept))
        return True

    def knows(self, symptom: Symptom) -> bool:
        """True if the open incident has such a sign already."""
        key = (symptom.pod, symptom.rank, symptom.fault)
        return self.open is not None and key in self._seen

    def change(self, **changes: object) -> None:
        """Set stages or the remedy of the open incident; without an open one, do nothing."""
        if self.open is not None:
            self.open = replace(self.open, **changes)  # type: ignore[arg-type]
            self._is_dirty = True

    def amend(self, number: int, **changes: object) -> list[JobEffect]:
        """Change an incident that may be closed by now; one that is no longer kept stays as it
        is."""
        if self.open is not None and self.open.number == number:
            self.change(**changes)
        elif number in self.closed:
            amended = replace(self.closed[number], **changes)  # type: ignore[arg-type]
            if amended != self.closed[number]:
                self.closed[number] = amended
                self.revision += 1
                return [WriteIncident(writable(amended))]
        return []

    def close(self, outcome: str, now: float) -> list[JobEffect]:
        """End the open incident; without one, do nothing."""
        if self.open is None:
            return []
        ended = replace(self.open, outcome=outcome, ended_at=now)
        self._count(ended)
        self.open, self._is_dirty = None, False
        return [WriteIncident(writable(ended))]

    def writes(self) -> list[JobEffect]:
        """Return the orders to write the open incident, if it has changed."""
        if not self._is_dirty or self.open is None:
            return []
        self._is_dirty = False
        return [WriteIncident(writable(self.open))]

    def retire(self) -> list[Incident]:
        """Remove surplus incidents, the oldest first."""
        surplus = len(self.closed) + (self.open is not None) - INCIDENTS_MAX
        return [self.closed.pop(number) for number in sorted(self.closed)[: max(surplus, 0)]]

    def _count(self, incident: Incident) -> None:
        self.closed[incident.number] = incident
        self.revision += 1
        fault, node = incident.culprit.fault, incident.culprit.node
        if node and fault not in UNCHARGED:
            self.offences[NodeName(node)] += 1

    def _note_requests(self, found: Iterable[Symptom]) -> None:
        requests = [symptom.at for symptom in found if symptom.fault == RESTART_REQUESTED]
        self.last_request = max([self.last_request, *requests])
