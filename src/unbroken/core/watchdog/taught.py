"""Knowledge of a rank from one attempt, for the next attempt of the same job.

A hang soon after a restart, often the same one again, would not be found otherwise: every attempt
would learn from the start, and silence itself teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .late import PHASE_SECONDS, START_SECONDS, START_SPIN_SECONDS
from .rhythm import Allowed, Rhythm

START_FACTOR, START_FLOOR_SECONDS = 5.0, 120.0
"""Multiple of the longest start-up: one that resumes has a checkpoint to read, which the first had
not."""
EARLY_SIGNS = 5
"""In a visit of a phase: from then on silence has a bound, however little was learned."""
EARLY_FACTOR, EARLY_FLOOR_SECONDS = 10.0, 120.0
"""Multiple of the longest gap."""
SPIN_FACTOR = 3.0
_NEVER = float("inf")
START = Allowed(START_SECONDS, START_SPIN_SECONDS, _NEVER)
"""Silence of a rank of which nothing is known yet."""
NEW_PHASE = Allowed(PHASE_SECONDS, PHASE_SECONDS, _NEVER)
"""Silence in a new phase that the script has reported: it may be a long checkpoint."""


@dataclass(frozen=True, slots=True)
class Taught:
    """By the attempts before; nothing, in the first."""

    phases: Mapping[str, Rhythm] = field(default_factory=dict)
    output: Rhythm = field(default_factory=Rhythm)
    start_seconds: float = 0.0
    """The longest start-up: until the steps, or else the output, were in their rhythm; 0: it never
    came to its end."""
    reports_steps: bool = False

    def start(self) -> Allowed | None:
        """Silence in a start-up.  One that works may take as long as it likes."""
        return _patient(START_FACTOR * self.start_seconds, START_FLOOR_SECONDS, self.start_seconds)


def early(gap_seconds: float, signs: int) -> Allowed | None:
    """Silence while still learning, after so many signs; None: too few."""
    return _patient(EARLY_FACTOR * gap_seconds, EARLY_FLOOR_SECONDS, signs >= EARLY_SIGNS)


def _patient(seconds: float, floor: float, is_known: float) -> Allowed | None:
    if not is_known:
        return None
    idle = max(floor, seconds)
    return Allowed(idle, SPIN_FACTOR * idle, _NEVER)
