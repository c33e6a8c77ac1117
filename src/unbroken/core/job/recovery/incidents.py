"""The incidents of one job: opened by the first sign, joined by what follows, closed by the end.

The culprit is the first cause by time.  That a peer was lost never is one, nor that a worker was
told to stop while something else is known; a rank that ended early beats the errors of those who
waited for it.  That an agent cannot be reached may only be how the deletion of its pod was heard
first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unbroken.core.job.events import JobEffect, NodeName, WriteIncident
from unbroken.spec.job.incident import PLANNED_MOVE, Incident, Remedy, Signal
from unbroken.wire.agent import FaultKind

from .incident_bounds import SIGNALS_MAX, writable
from .signals import AGENT_LOST, POD_DELETED

RESTART_REQUESTED = "RestartRequested"
"""A person asked for the restart, for example with `unbroken restart`."""
OPERATOR_RESTARTED = "OperatorRestarted"
"""An operator that took over could not tell what runs, and started a new attempt."""
UNCHARGED = (RESTART_REQUESTED, OPERATOR_RESTARTED, PLANNED_MOVE)
"""Causes that are nobody's fault: the restart costs no budget."""
_TERMINATED = (128 + 15, -15)
"""SIGTERM: somebody was told to stop, for some reason that another sign may tell."""
INCIDENTS_MAX = 50
"""Kept of a job."""


def _weight(signal: Signal) -> tuple[int, float]:
    if signal.fault == PLANNED_MOVE:
        return (-1, signal.at)  # All that follows comes from the stop.
    if signal.fault in UNCHARGED:
        return (4, signal.at)
    if signal.fault == FaultKind.PEER_LOST.value:
        return (3, signal.at)
    if signal.exit_code in _TERMINATED:
        return (2, signal.at)
    return (0 if signal.fault == FaultKind.EARLY_EXIT.value else 1, signal.at)


def culprit(signals: Sequence[Signal]) -> Signal:
    """The first cause among signs of one fault."""
    first = min(signals, key=_weight)
    if first.fault != AGENT_LOST:
        return first
    deletions = [one for one in signals if (one.pod, one.fault) == (first.pod, POD_DELETED)]
    return min(deletions, key=_weight, default=first)


class Incidents:
    """All incidents of a job; at most one is open."""

    def __init__(self) -> None:
        self.open: Incident | None = None
        self.offences: Counter[NodeName] = Counter()
        """How often a node held the culprit."""
        self.uncharged = 0
        self.last_request = 0.0
        """Time of the newest restart request that led to an incident."""
        self.closed: dict[int, Incident] = {}
        """Closed incidents that are kept, by number."""
        self._numbers = set[int]()
        self._seen: set[tuple[str, int | None, str]] = set()
        self._is_dirty = False

    def remember(self, incident: Incident) -> None:
        """Take one that an earlier operator has written."""
        if incident.number in self._numbers:
            return
        if not incident.outcome and (self.open is None or incident.number > self.open.number):
            self.open = incident
        self._numbers.add(incident.number)
        self._note_requests(incident.signals)
        if incident.outcome:
            self._count(incident)

    def begin(
        self, attempt: int, signals: Iterable[Signal], remedy: Remedy, reason: str, now: float
    ) -> Incident:
        """Open one; the one that is open must have been closed."""
        assert self.open is None
        found = tuple(signals)
        assert found, "an incident has a sign"
        number = max(self._numbers, default=0) + 1
        self._numbers.add(number)
        self._seen = {(s.pod, s.rank, s.fault) for s in found}
        kept = sorted(found, key=lambda s: s.at)[:SIGNALS_MAX]
        first = culprit(found)
        self.open = Incident(number, attempt, first, tuple(kept), remedy, reason, detected_at=now)
        self._is_dirty = True
        return self.open

    def join(self, signals: Iterable[Signal]) -> bool:
        """Add signs to the open incident; whether there was a new one."""
        assert self.open is not None
        new = [s for s in signals if (s.pod, s.rank, s.fault) not in self._seen]
        if not new:
            return False
        self._seen |= {(s.pod, s.rank, s.fault) for s in new}
        kept = sorted((*self.open.signals, *new), key=lambda s: s.at)[:SIGNALS_MAX]
        first = culprit((self.open.culprit, *new))
        if first not in kept:
            kept[-1] = first
        # What only adds to the story is written with the next stage; a request must not be
        # followed again by an operator that does not know it.
        is_asked = any(signal.fault == RESTART_REQUESTED for signal in new)
        self._is_dirty |= is_asked or first != self.open.culprit
        self.open = replace(self.open, culprit=first, signals=tuple(kept))
        return True

    def knows(self, signal: Signal) -> bool:
        """True if the open incident has such a sign already."""
        key = (signal.pod, signal.rank, signal.fault)
        return self.open is not None and key in self._seen

    def change(self, **changes: object) -> None:
        """Set stages or the remedy of the open incident; without one, nothing."""
        if self.open is not None:
            self.open = replace(self.open, **changes)  # type: ignore[arg-type]
            self._is_dirty = True

    def amend(self, number: int, **changes: object) -> list[JobEffect]:
        """Change one that may have been closed by now; one that is not kept any more is left."""
        if self.open is not None and self.open.number == number:
            self.change(**changes)
        elif number in self.closed:
            amended = replace(self.closed[number], **changes)  # type: ignore[arg-type]
            if amended != self.closed[number]:
                self.closed[number] = amended
                return [WriteIncident(writable(amended))]
        return []

    def close(self, outcome: str, now: float) -> list[JobEffect]:
        """End the open incident; without one, nothing."""
        if self.open is None:
            return []
        ended = replace(self.open, outcome=outcome, ended_at=now)
        self._count(ended)
        self.open, self._is_dirty = None, False
        return [WriteIncident(writable(ended))]

    def writes(self) -> list[JobEffect]:
        """What has to be written of the open incident."""
        if not self._is_dirty or self.open is None:
            return []
        self._is_dirty = False
        return [WriteIncident(writable(self.open))]

    def retire(self) -> list[Incident]:
        """Let go of those that are too many: the oldest first, and last those that cost nothing,
        for without them a later operator would charge the job for them."""
        surplus = len(self.closed) + (self.open is not None) - INCIDENTS_MAX
        order = sorted(self.closed.values(), key=lambda o: (o.culprit.fault in UNCHARGED, o.number))
        return [self.closed.pop(one.number) for one in order[: max(surplus, 0)]]

    def _count(self, incident: Incident) -> None:
        self.closed[incident.number] = incident
        fault, node = incident.culprit.fault, incident.culprit.node
        self.uncharged += fault in UNCHARGED
        if node and fault not in UNCHARGED:
            self.offences[NodeName(node)] += 1

    def _note_requests(self, found: Iterable[Signal]) -> None:
        requests = [signal.at for signal in found if signal.fault == RESTART_REQUESTED]
        self.last_request = max([self.last_request, *requests])
