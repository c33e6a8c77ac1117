"""Limits for late ranks: when a look at all ranks is due, and when it may act.

Lateness is no alarm.  It begins much earlier than a silence that is judged by time alone, since
what the look shows decides (`core.job.watch.still_ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.wire.observation import Bound

from .rhythm import REGULAR_FACTOR, Rhythm

START_SECONDS = 600.0
"""Silence of a rank that still starts or learns, at most; one that works shows signs."""
START_SPIN_SECONDS = 1800.0
PHASE_SECONDS = 1800.0
"""The same in a reported phase that is new: the first checkpoint may take ten minutes and more."""
STEPS_MIN, GAPS_MIN = 15, 3
"""Steps, and looks with steps in them, from which on the usual step is known."""
STEP_SECONDS, STEP_FACTOR = 2.5, 2.5
"""Late after so many seconds, and so many usual steps."""
PAUSE_FACTOR = 1.25
"""Multiple of the longest gap so far: a certain look acts no earlier."""
PAUSE_SECONDS = 10.0
"""Longer gaps of the past make nobody late later than this."""
LINES_MIN, LINES_SECONDS = 5, 25.0
"""Gaps between lines, in a history of so many seconds, that make output regular."""
LINE_SECONDS, LINE_FACTOR = 10.0, 3.0
LINE_ACT_SECONDS = 15.0
SPIN_SECONDS = 60.0
"""A rank that reports and prints nothing and spins so long is worth a look."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of a rank's silence."""

    bound: Bound
    look_seconds: float
    act_seconds: float


def by_steps(rhythm: Rhythm, longest: float, steps: int, usual: float | None) -> Patience | None:
    """Return the limits of a rank that reports steps of `usual` seconds; None: too few so far."""
    if steps < STEPS_MIN or rhythm.gaps < GAPS_MIN or usual is None:
        return None
    pause = PAUSE_FACTOR * longest * (1 + rhythm.mistakes / 2)
    look = max(STEP_SECONDS, STEP_FACTOR * usual, min(pause, PAUSE_SECONDS))
    return Patience(Bound.STEPS, look, max(look, pause))


def by_output(rhythm: Rhythm, longest: float) -> Patience | None:
    """For a rank that only prints; None: not regularly so far."""
    is_long = rhythm.history_seconds >= max(LINES_SECONDS, REGULAR_FACTOR * longest)
    if rhythm.gaps < LINES_MIN or not is_long:
        return None
    look = max(LINE_SECONDS, LINE_FACTOR * longest * (1 + rhythm.mistakes / 2))
    return Patience(Bound.OUTPUT, look, max(look, LINE_ACT_SECONDS))


class Lateness:
    """Lateness of one rank."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None
        """Last sign of life of a rank that is late; None: it is not."""

    def see(self, patience: Patience | None, sign_at: float, now: float) -> bool:
        """Judge it by its last sign of life; whether that changes anything."""
        before = self.since
        is_late = patience is not None and now - sign_at >= patience.look_seconds
        self.since = sign_at if is_late else None
        return (before is None) != (self.since is None)
