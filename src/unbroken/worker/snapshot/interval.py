"""The interval between two snapshots: the user's, or chosen by what a save costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from unbroken.errors import SpecError
from unbroken.log_lines import Log
from unbroken.worker import context
from unbroken.worker.checkpointing.peers import ALONE, world

SHARE = 0.03
"""Share of the time between two saves that a save may take."""
UNCOUNTED = 3
"""First saves of an attempt, which are not measured: slots are made, and code is compiled."""
MEASURED = 6
"""Saves after these by which the interval is chosen."""
EVERY_MAX = 10_000

log = Log(__name__, "unbroken.worker: ")


class Interval:
    """Counts the questions of one attempt, which all ranks ask at the same steps."""

    def __init__(self, every: int | None) -> None:
        """`every` None: choose. Raises SpecError: it is no whole number from 1 to 10,000."""
        is_number = isinstance(every, int) and not isinstance(every, bool)
        if every is not None and not (is_number and 1 <= every <= EVERY_MAX):
            raise SpecError(f"snapshot: every= is None or 1 to {EVERY_MAX:,}, not {every!r}")
        self._asked = every
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._chosen = 1
        """Number of questions of which one is answered with yes."""
        self._questions = 0
        self._times: list[tuple[float, float]] = []
        """Begin and end of each save until the choice, in seconds."""

    def is_due(self, step: int) -> bool:
        """True if this step is saved; all ranks get the same answer.

        The tenth question of an attempt is a collective of all ranks if the interval is chosen.
        """
        if self._asked is not None:
            return step % self._asked == 0
        if self._questions == UNCOUNTED + MEASURED:
            self._choose()
        self._questions += 1
        return (self._questions - 1) % self._chosen == 0

    def _choose(self) -> None:
        ranks = world() or (ALONE if context().world_size == 1 else None)
        if ranks is None:
            log.warning("each step is saved: without a process group ranks cannot agree")
            return
        # Where ranks differ, the dearest holds up the others.
        share = max(ranks.gather(cost_share(self._times[UNCOUNTED:])))
        self._chosen = interval(share)
        text = f"one step of {self._chosen} is saved: a save takes {share:.1%} of a step"
        log.info("interval of snapshots chosen", reason=text)

    def saved(self, began: float, ended: float) -> None:
        """Note when a save began and ended, in seconds of one clock."""
        if len(self._times) < UNCOUNTED + MEASURED:
            self._times.append((began, ended))


def cost_share(times: Sequence[tuple[float, float]]) -> float:
    """Return the median time of a save as a share of that between two; 0: too few are known."""
    between = sorted(later[0] - earlier[1] for earlier, later in zip(times, times[1:]))
    if not between:
        return 0.0
    saves = sorted(ended - began for began, ended in times)
    return saves[len(saves) // 2] / max(between[len(between) // 2], 1e-9)


def interval(share: float) -> int:
    """Return the number of steps of which one is saved, so that saves take at most `SHARE`."""
    return min(EVERY_MAX, max(1, ceil(share / SHARE - 1e-9)))
