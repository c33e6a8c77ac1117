"""An incident as a trace: one span for the whole, and one for each stage.

Attribute names follow OpenTelemetry's semantic conventions where these have one. The ids are
derived from the incident's uid, so a trace that is sent twice is the same trace.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from unbroken.spec.job.incident import RECOVERED, Incident

from .timeline import lost_seconds, lost_steps, stages

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SLOWEST = {"stop": "stopped", "ready": "ready", "start": "started"}
"""Stage names under which the incident records the pod that was waited for last."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time.  `start`, `end`: seconds since the epoch."""

    id: int
    """64 bits."""
    name: str
    start: float
    end: float
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Trace:
    """One incident that has ended."""

    id: int
    """128 bits: the incident's uid."""
    whole: Span
    stages: tuple[Span, ...]
    """Stage spans in order, within the whole."""
    problem: str = ""
    """The outcome of an incident without a recovery; empty: it recovered."""


@dataclass(frozen=True, slots=True)
class IncidentName:
    """Name of an incident: its job and number."""

    uid: str
    name: str
    namespace: str
    job: str


def trace_of(incident: Incident, named: IncidentName) -> Trace:
    """Return the trace of an incident that has ended."""
    parts = []
    for stage, start, end in stages(incident):
        last = incident.slowest.get(_SLOWEST.get(stage, ""))
        told = _known({"unbroken.stage.last_pod": last})
        parts.append(Span(_span_id(named.uid, stage), stage, start, end, told))
    ends = [end for end in (incident.ended_at, incident.progress_at) if end is not None]
    whole = Span(
        _span_id(named.uid, ""),
        f"incident {incident.culprit.fault}",
        min(incident.culprit.at, incident.detected_at),
        max([incident.detected_at, *(one.end for one in parts), *ends]),
        _known(_attributes(incident, named)),
    )
    problem = "" if incident.outcome == RECOVERED else incident.outcome
    return Trace(_trace_id(named.uid), whole, tuple(parts), problem)


def _attributes(incident: Incident, named: IncidentName) -> dict[str, Value | None]:
    culprit = incident.culprit
    return {
        "k8s.namespace.name": named.namespace,
        "k8s.pod.name": culprit.pod,
        "k8s.node.name": culprit.node,
        "error.type": culprit.fault,
        "process.exit.code": culprit.exit_code,
        "unbroken.job.name": named.job,
        "unbroken.incident.name": named.name,
        "unbroken.incident.attempt": incident.attempt,
        "unbroken.incident.rank": culprit.rank,
        "unbroken.incident.cause": culprit.text,
        "unbroken.incident.blame": incident.blame,
        "unbroken.incident.confidence": incident.confidence,
        "unbroken.incident.trigger": incident.signals[0].fault if incident.signals else None,
        "unbroken.incident.signals": len(incident.signals),
        "unbroken.incident.remedy": incident.remedy.value,
        "unbroken.incident.reason": incident.reason,
        "unbroken.incident.outcome": incident.outcome,
        "unbroken.incident.lost_seconds": lost_seconds(incident),
        "unbroken.incident.lost_steps": lost_steps(incident),
        "unbroken.incident.resumed": incident.resumed,
    }


def _known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return the attributes without those that are not known."""
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


def _trace_id(uid: str) -> int:
    # As every API server makes it, it can be read in the trace.
    digits = uid.replace("-", "") if _UUID.fullmatch(uid) else _digest(uid)[:32]
    return int(digits, 16)


def _span_id(uid: str, name: str) -> int:
    return int(_digest(f"{uid}/{name}")[:16], 16)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
