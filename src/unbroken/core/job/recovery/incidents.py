"""The incidents of one job: opened by the first sign, joined by later signs, closed by the end.

The culprit is the first cause by time. The loss of a peer is never the culprit. A worker that was
ordered to stop is none either while another cause is known. A rank that ended early takes
precedence over the errors of ranks that waited for it. An unreachable agent may only be the first
notice of its pod's deletion.
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
"""An operator that took over could not determine what runs, and started a new attempt."""
UNCHARGED = (RESTART_REQUESTED, OPERATOR_RESTARTED, PLANNED_MOVE)
"""Causes without a culprit: the restart costs no budget."""
_TERMINATED = (128 + 15, -15)
"""Exit codes of SIGTERM: the worker was ordered to stop, for a reason that another sign may
name."""
INCIDENTS_MAX = 50
"""Incidents that are kept for a job."""


def _weight(signal: Signal) -> tuple[int, float]:
    if signal.fault == PLANNED_MOVE:
        return (-1, signal.at)  # All later signs are consequences of the stop.
    if signal.fault in UNCHARGED:
        return (4, signal.at)
    if signal.fault == FaultKind.PEER_LOST.value:
        return (3, signal.at)
    if signal.exit_code in _TERMINATED:
        return (2, signal.at)
    return (0 if signal.fault == FaultKind.EARLY_EXIT.value else 1, signal.at)


def culprit(signals: Sequence[Signal]) -> Signal:
    """Return the first cause among the signs of one fault."""
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
        """Number of culprits that each node held."""
        self.last_request = 0.0
        """Time of the newest restart request that led to an incident."""
        self.closed: dict[int, Incident] = {}
        """Closed incidents that are kept, by number."""
        self._numbers = set[int]()
        self._seen: set[tuple[str, int | None, str]] = set()
        self._is_dirty = False

    @property
    def uncharged(self) -> int:
        """Number of kept incidents whose restart cost no budget; the ledger counts the others."""
        return sum(one.culprit.fault in UNCHARGED for one in self.closed.values())

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
        self, attempt: int, signals: Iterable[Signal], remedy: Remedy, reason: str, now: float
    ) -> Incident:
        """Open an incident; the open one must have been closed before."""
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

    def add_signs(self, signals: Iterable[Signal]) -> bool:
        """Add signs to the open incident; return True if any was new."""
        assert self.open is not None
        new = [s for s in signals if (s.pod, s.rank, s.fault) not in self._seen]
        if not new:
            return False
        self._seen |= {(s.pod, s.rank, s.fault) for s in new}
        kept = sorted((*self.open.signals, *new), key=lambda s: s.at)[:SIGNALS_MAX]
        first = culprit((self.open.culprit, *new))
        if first not in kept:
            kept[-1] = first
        # A mere addition is written with the next stage. A request must be written at once, lest an
        # operator that does not know it follows it again.
        is_asked = any(signal.fault == RESTART_REQUESTED for signal in new)
        self._is_dirty |= is_asked or first != self.open.culprit
        self.open = replace(self.open, culprit=first, signals=tuple(kept))
        return True

    def knows(self, signal: Signal) -> bool:
        """True if the open incident has such a sign already."""
        key = (signal.pod, signal.rank, signal.fault)
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
        fault, node = incident.culprit.fault, incident.culprit.node
        if node and fault not in UNCHARGED:
            self.offences[NodeName(node)] += 1

    def _note_requests(self, found: Iterable[Signal]) -> None:
        requests = [signal.at for signal in found if signal.fault == RESTART_REQUESTED]
        self.last_request = max([self.last_request, *requests])
