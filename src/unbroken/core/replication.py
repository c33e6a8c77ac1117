"""Which of a node's snapshots go to its buddy, and when: counted in saves, without a clock.

Sharded state can be restored only from one step of all nodes, and agents do not ask each other
which.  They choose alike because they go by the same numbers.  Steps of a name are `stride` apart
(the greatest common divisor of what was seen); the step of which `step // stride` is a multiple of
`period`, a power of two, is sent by every rank of every node: a round.  Rounds that are late make
the period longer, until every round is over before the next begins.  Then a node is never more than
one round ahead of another, and with the newest two rounds at each buddy there is always a step of
all.

The period only grows in an attempt.  Each transfer tells the other side's (`told`), so that the
slowest node sets the pace of all whose buddies are linked in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

PERIOD_MAX = 1 << 16
PAUSE_MAX = 6
"""After so many failures in a row every 2**6th round is tried."""
LATE_ROUNDS = 8
"""A round is late that takes three quarters of the period: then one that takes a bit longer misses
nothing.  The second late one of so many makes the period as long as is needed; the first only
doubles it, since it may have been a hiccup; the very first of an attempt does nothing."""
KEPT = 2
"""Complete snapshots that a buddy keeps of a rank."""


class Item(NamedTuple):
    """One rank's part of a round."""

    name: str
    rank: int
    step: int


@dataclass(slots=True)
class _Row:
    """All of a name."""

    stride: int = 0
    """0: one save was seen."""
    period: int = 1
    newest: dict[int, int] = field(default_factory=dict)
    """Step by rank."""
    step: int | None = None
    """Of the newest round."""
    taken: set[int] = field(default_factory=set)
    """Ranks that take part in it."""
    open: set[int] = field(default_factory=set)
    """Those whose snapshot is not at the buddy yet."""
    is_whole: bool = True
    """No rank has left the round."""
    failures: int = 0
    rounds: int = 0
    """That are over, and were whole."""
    counted: int | None = None
    """The newest of them."""
    in_time: int = LATE_ROUNDS
    """Rounds since one was late."""

    def is_due(self, step: int) -> bool:
        """Whether a round begins with this step."""
        number = step // self.stride if self.stride else 0
        return number % (self.period << min(self.failures, PAUSE_MAX)) == 0

    def close(self) -> None:
        """The last rank of a round is done."""
        assert self.step is not None
        if not self.is_whole:
            return
        is_new = self.counted != self.step
        self.rounds += is_new
        self.counted = self.step
        late = (max(self.newest.values()) - self.step) // self.stride if self.stride else 0
        if 4 * late < 3 * self.period:
            self.in_time = min(LATE_ROUNDS, self.in_time + is_new)
            return
        if self.rounds > 1:
            is_second = self.in_time < LATE_ROUNDS
            wanted = 1 << (4 * late // 3).bit_length() if is_second else 2 * self.period
            self.period = min(PERIOD_MAX, wanted)
        self.in_time = 0


class Rounds:
    """Of one attempt."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self.copies_first = False
        """A snapshot was overwritten while it was sent: they are copied from now on."""

    def saved(self, item: Item) -> bool:
        """A rank has a whole snapshot; whether it is to be sent."""
        row = self._rows.setdefault(item.name, _Row())
        before = row.newest.get(item.rank)
        if before is not None:
            row.stride = gcd(row.stride, item.step - before)
        row.newest[item.rank] = max(item.step, before or 0)
        if row.step != item.step:
            is_older = row.step is not None and item.step < row.step
            if row.open or is_older or not row.is_due(item.step):
                return False
            row.step, row.is_whole = item.step, True
            row.taken.clear()
        if item.rank in row.taken or not row.is_whole:
            return False
        row.taken.add(item.rank)
        row.open.add(item.rank)
        return True

    def wants(self, item: Item) -> bool:
        """Whether it is still to be sent."""
        row = self._rows.get(item.name)
        return row is not None and row.step == item.step and item.rank in row.open

    def sent(self, item: Item) -> None:
        """It is at the buddy."""
        if self.wants(item):
            row = self._rows[item.name]
            row.failures = 0
            row.open.discard(item.rank)
            if not row.open:
                row.close()

    def overtaken(self, item: Item) -> None:
        """It was overwritten before it was sent: the round is over for all ranks."""
        if self.wants(item):
            self.copies_first = True
            self._give_up(self._rows[item.name])

    def failed(self, item: Item) -> None:
        """The buddy did not take it: the round is over, and the next are tried less often."""
        if self.wants(item):
            row = self._rows[item.name]
            row.failures += 1
            self._give_up(row)

    def period(self, name: str) -> int:
        """Of a name, in saves."""
        row = self._rows.get(name)
        return 1 if row is None else row.period

    def told(self, name: str, period: int) -> None:
        """That of another node."""
        row = self._rows.get(name)
        if row is not None:
            row.period = max(row.period, min(period, PERIOD_MAX))

    def is_settled(self, names: Sequence[str]) -> bool:
        """Whether two rounds of each name are over: then all nodes have finished one."""
        return all(name in self._rows and self._rows[name].rounds >= KEPT for name in names)

    def _give_up(self, row: _Row) -> None:
        row.open.clear()
        row.is_whole = False
