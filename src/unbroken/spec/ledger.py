"""What of a job's past its incidents no longer tell, kept in the annotation `unbroken.dev/ledger`.

Incidents are kept in a bounded number; what the deleted ones have cost stays here, as do the time
before a suspension and how often each detector was right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANNOTATION = "unbroken.dev/ledger"


@dataclass(frozen=True, slots=True)
class Record:
    """How a detector did on this job."""

    right: int = 0
    """Alarms after which the job did not go on by itself."""
    wrong: int = 0
    """Alarms after which it did."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sums over what is no longer kept."""

    incidents: int = 0
    """Deleted ones."""
    steps: int = 0
    """Lost in them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Lost in them, by class of the fault."""
    active_seconds: float = 0.0
    """From creation to suspension, over all suspensions before the present life."""
    startup_seconds: float = 0.0
    """Of those, before the first progress."""
    detectors: Mapping[str, Record] = field(default_factory=dict)
    """By name."""
