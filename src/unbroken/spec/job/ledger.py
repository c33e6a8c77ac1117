"""The part of a job's past that is no longer in its incidents, in the annotation
`unbroken.dev/ledger`.

The number of incidents is bounded. The cost of deleted ones stays here, with the time before a
suspension and how often each detector was right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.spec.keys import LEDGER
from unbroken.spec.problems import Report

NAMES_MAX = 24
"""Causes, and detectors, that are written by name; the cheapest causes beyond this number become
one."""
NAME_CHARACTERS = 63
CHARACTERS_MAX = 32_768
"""Characters of the annotation at most; a longer one was not written by the operator."""
OTHERS = "others"
PROVEN, UNPROVEN = "proven", "unproven"
"""An agent has proven the job's key at a start; none of them has, and they were served."""
NUMBER_MAX = 1e12
"""Greatest number of seconds and counts: 30,000 years; more is an error that must not spread."""


@dataclass(frozen=True, slots=True)
class DetectorRecord:
    """Accuracy of a detector on this job."""

    right: int = 0
    """Alarms after which the job did not continue by itself."""
    wrong: int = 0
    """Alarms after which the job continued by itself."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sums over incidents that are no longer kept."""

    incidents: int = 0
    """Number of deleted incidents."""
    steps: int = 0
    """Steps lost in them."""
    uncharged: int = 0
    """Attempts that cost no restart of the budget: those after deleted incidents without a culprit,
    and attempt numbers that were skipped."""
    lease_seconds: float = 0.0
    """Lease of the workers of the newest attempt, in seconds; 0: they have none, or `nnodes` is
    0."""
    nnodes: int = 0
    """Number of nodes of that attempt, from before it is ordered to start; 0: none was."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds lost in them, by class of the fault."""
    active_seconds: float = 0.0
    """Seconds from creation to suspension, over all suspensions before the present life."""
    startup_seconds: float = 0.0
    """Active seconds before the first progress."""
    detectors: Mapping[str, DetectorRecord] = field(default_factory=dict)
    """Accuracy by name of the detector."""
    agents: str = ""
    """`PROVEN`, `UNPROVEN`, or empty: no attempt has started, or the job has no key."""
    progress_at: float | None = None
    """First progress of the present life, in seconds since the epoch; None: none yet."""

    @property
    def start(self) -> tuple[float, int]:
        """Lease and number of nodes of the newest attempt."""
        return self.lease_seconds, self.nnodes


def read_ledger(text: str, report: Report | None = None) -> Ledger:
    """Return the ledger in an annotation; malformed parts are ignored, and added to `report`."""
    told = report or Report()
    if not text:
        return Ledger()
    try:
        result = json.loads(text) if len(text) <= CHARACTERS_MAX else None
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, Mapping):
        told.invalid(LEDGER, text, "must be the JSON object that the operator wrote")
        return Ledger()
    progress_at = _number(result, "progressAt", told)
    records = _mapping(result, "detectors", told)
    return Ledger(
        incidents=int(_number(result, "incidents", told)),
        steps=int(_number(result, "steps", told)),
        uncharged=int(_number(result, "uncharged", told)),
        lease_seconds=_number(result, "leaseSeconds", told),
        nnodes=int(_number(result, "nnodes", told)),
        seconds=_numbers(result, "seconds", told),
        active_seconds=_number(result, "activeSeconds", told),
        startup_seconds=_number(result, "startupSeconds", told),
        detectors={name: _record(records, name, told) for name in records},
        agents=_agents(result, told),
        progress_at=progress_at or None,
    )


def write_ledger(ledger: Ledger) -> str:
    """Return a ledger as an annotation; empty: it has no content."""
    records = list(ledger.detectors.items())[:NAMES_MAX]
    values = {
        "incidents": _whole(ledger.incidents),
        "steps": _whole(ledger.steps),
        "uncharged": _whole(ledger.uncharged),
        "leaseSeconds": _rounded(ledger.lease_seconds),
        "nnodes": _whole(ledger.nnodes),
        "seconds": _costliest(ledger.seconds),
        "activeSeconds": _rounded(ledger.active_seconds),
        "startupSeconds": _rounded(ledger.startup_seconds),
        "detectors": {
            name[:NAME_CHARACTERS]: {"right": _whole(record.right), "wrong": _whole(record.wrong)}
            for name, record in records
        },
        "agents": ledger.agents,
        "progressAt": _rounded(ledger.progress_at or 0.0),
    }
    kept = {key: value for key, value in values.items() if value}
    return json.dumps(kept, separators=(",", ":")) if kept else ""


def _costliest(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the costliest causes by name, the rest as one."""
    ordered = sorted(seconds.items(), key=lambda one: (-_rounded(one[1]), one[0]))
    kept: dict[str, float] = {}
    for name, value in ordered:
        key = name[:NAME_CHARACTERS] if name in kept or len(kept) < NAMES_MAX - 1 else OTHERS
        kept[key] = _rounded(kept.get(key, 0.0) + _rounded(value))
    return kept


def _rounded(value: float) -> float:
    return round(min(max(value, 0.0), NUMBER_MAX), 3) if math.isfinite(value) else 0.0


def _whole(value: int) -> int:
    return min(max(value, 0), int(NUMBER_MAX))


def _mapping(given: Mapping[str, Any], key: str, report: Report) -> Mapping[str, Any]:
    result = given.get(key)
    if isinstance(result, Mapping):
        return dict(list(result.items())[:NAMES_MAX])
    if result is not None:
        report.invalid(f"{LEDGER}.{key}", result, "must be an object")
    return {}


def _agents(given: Mapping[str, Any], report: Report) -> str:
    value = given.get("agents", "")
    if isinstance(value, str) and value in ("", PROVEN, UNPROVEN):
        return value
    report.invalid(f"{LEDGER}.agents", value, f"must be {PROVEN} or {UNPROVEN}")
    return ""


def _number(given: Mapping[str, Any], key: str, report: Report, path: str = LEDGER) -> float:
    value = given.get(key, 0)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= NUMBER_MAX:
        return value
    report.invalid(f"{path}.{key}", value, "must be a number from 0")
    return 0


def _numbers(given: Mapping[str, Any], key: str, report: Report) -> dict[str, float]:
    result, path = _mapping(given, key, report), f"{LEDGER}.{key}"
    return {name: value for name in result if (value := _number(result, name, report, path))}


def _record(given: Mapping[str, Any], name: str, report: Report) -> DetectorRecord:
    path, result = f"{LEDGER}.detectors.{name}", given[name]
    if not isinstance(result, Mapping):
        report.invalid(path, result, "must be an object")
        return DetectorRecord()
    right, wrong = (int(_number(result, key, report, path)) for key in ("right", "wrong"))
    return DetectorRecord(right, wrong)
