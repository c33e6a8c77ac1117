"""Which snapshots go to the buddies, and which are kept, so that all nodes have a step in common.

Sharded state can be restored only from one step of all nodes.  Nodes therefore send the same steps:
a round at a time, each of one step.  Between two rounds every node says to the agent of node rank 0
what it holds, that is, has in its own memory and at its buddy (`Arrival`).  When all have, that
agent knows the newest step that all hold, and which saves the next round is of (`NextRound`).  A
node lets go of what it holds only when it has heard a decision, and then keeps that step.  So there
is a step that all hold from the first round on, whatever is slow, fails or is lost on its way: what
was common before a decision is let go of only after it, and what is common by it was held by all
before.  A node holds two states at most, and while it waits begins no other.

A round is of the newest save, which still lies in its slot: the last save before a pause goes too.
Where saves follow one another faster than nodes hear of rounds, it is of one to come (`margin`),
and of the last again where that does not come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Annotated, NamedTuple

from unbroken.wire.codec import Limits

MARGIN_MAX = 64
"""In saves."""
CALM_ROUNDS = 16
"""Rounds in a row that nobody was late for, after which the margin is halved."""
FAILURES_MAX = 3
"""A buddy that fails so often in a row is no reason to hold up all others: what this node has in
its own memory counts then, and the buddy is tried again each 2, 4, 8... 64 rounds."""
PAUSE_MAX = 6
HELD_MAX = 16
"""Steps that a node says it holds."""
KEPT = 2
"""Complete snapshots of a rank at its buddy, if the sender does not say which it needs."""


class Item(NamedTuple):
    """One rank's part of a round."""

    name: str
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a node says between two rounds of a name."""

    known: int
    """Number of the decision that it has heard last; 0: none."""
    newest: int
    """Step of its newest save."""
    stride: int
    """Between two saves; 0: not known."""
    held: Annotated[tuple[int, ...], Limits(HELD_MAX)]
    is_late: bool = False
    """It has heard of the last round too late to take part."""
    is_idle: bool = False
    """Nothing was saved any more, and so the last round has not begun."""


@dataclass(frozen=True, slots=True)
class NextRound:
    """What all nodes do next."""

    number: int
    common: int | None
    """The newest step that all hold; None: there is none."""
    begin: int
    """The next round is of the first save from this step on."""


NOTHING = NextRound(0, None, -1)
"""Before the first."""


class Agreement:
    """Agreement of all nodes of an attempt about one name, at the agent of node rank 0."""

    def __init__(self, nodes: int) -> None:
        self._nodes, self._margin, self._calm = nodes, 0, 0
        self._arrived: dict[int, Arrival] = {}
        self._members: set[int] = set()
        self._is_gathered = False
        self._decision = NOTHING

    def arrive(self, node: int, arrival: Arrival) -> NextRound | None:
        """What it has not heard yet, or what comes next; None: not known yet."""
        self._members.add(node)
        if arrival.known < self._decision.number:
            return self._decision
        self._arrived[node] = arrival
        return self._decide()

    def gathered(self) -> NextRound | None:
        """Nodes that have said nothing so far do not save this name: do not wait for them."""
        self._is_gathered = True
        return self._decide()

    def _decide(self) -> NextRound | None:
        is_complete = self._is_gathered or len(self._members) == self._nodes
        if not is_complete or not self._arrived or self._members - self._arrived.keys():
            return None
        told = list(self._arrived.values())
        held = set.intersection(*(set(one.held) for one in told))
        common = max(held, default=None)
        newest, last = max(one.newest for one in told), self._decision.begin
        is_idle = all(one.is_idle for one in told)
        is_new = newest > last or (is_idle and newest < last)
        if not is_new or (common is not None and newest <= common):
            return None
        self._pace(any(one.is_late for one in told))
        ahead = 0 if is_idle else self._margin * max(one.stride for one in told)
        self._decision = NextRound(self._decision.number + 1, common, newest + ahead)
        self._arrived.clear()
        return self._decision

    def _pace(self, is_late: bool) -> None:
        self._calm = 0 if is_late else self._calm + 1
        if is_late:
            self._margin = min(MARGIN_MAX, max(1, 2 * self._margin))
        elif self._calm == CALM_ROUNDS:
            self._margin, self._calm = self._margin // 2, 0


@dataclass(slots=True)
class _Row:
    """All of a name, on one node."""

    newest: dict[int, int] = field(default_factory=dict)
    """Step by rank."""
    before: dict[int, int] = field(default_factory=dict)
    """The save before that."""
    stride: int = 0
    decision: NextRound = NOTHING
    is_round: bool = False
    """True if one is under way, or about to begin."""
    step: int | None = None
    """Step of the round."""
    taken: set[int] = field(default_factory=set)
    """Ranks that take part in it."""
    open: set[int] = field(default_factory=set)
    """Node ranks whose snapshot is not at the buddy yet."""
    has_failed: bool = False
    """The buddy has not taken all of it."""
    held: set[int] = field(default_factory=set)
    is_late: bool = False
    is_idle: bool = False
    failures: int = 0

    def take(self, rank: int, step: int) -> bool:
        """Let a rank's save be part of the round, if it is."""
        if not self.is_round or rank in self.taken or step < self.decision.begin:
            return False
        self.step = step if self.step is None else self.step
        if step != self.step:
            # This rank, or the first, has saved what the round is of before it was known.
            self.end(is_late=True)
            return False
        self.taken.add(rank)
        self.open.add(rank)
        return True

    def close(self) -> None:
        """End the round if all ranks have been sent."""
        if self.open or self.taken < self.newest.keys():
            return
        assert self.step is not None
        self.failures = self.failures + 1 if self.has_failed else 0
        if not self.has_failed or self.failures >= FAILURES_MAX:
            self.held.add(self.step)
        self.end()

    def end(self, *, is_late: bool = False) -> None:
        """Nothing more of it."""
        self.is_round, self.is_late = False, self.is_late or is_late
        self.open.clear()


class Rounds:
    """One node's, of one attempt."""

    def __init__(self) -> None:
        self.nproc = 1
        """Ranks of this node."""
        self._rows: dict[str, _Row] = {}

    def saved(self, item: Item) -> bool:
        """A rank has a whole snapshot; whether it is to be sent."""
        row = self._rows.setdefault(item.name, _Row())
        had = row.newest.get(item.rank)
        if had is not None and item.step > had:
            row.before[item.rank] = had
            row.stride = gcd(row.stride, item.step - had)
        row.newest[item.rank] = max(item.step, had or 0)
        row.is_idle = False
        return row.take(item.rank, item.step)

    def arrival(self, name: str) -> Arrival | None:
        """What is to be said now; None: nothing, a round is under way or no rank is ready."""
        row = self._rows.get(name)
        if row is None or row.is_round or not self._is_ready(row):
            return None
        newest = max(row.newest.values())
        held = tuple(sorted(row.held))
        return Arrival(row.decision.number, newest, row.stride, held, row.is_late, row.is_idle)

    def is_stale(self, name: str, told: Arrival) -> bool:
        """True if what was said is not enough for a decision any more, and more can be said."""
        row = self._rows[name]
        has_news = told.newest > max([row.decision.begin, *told.held])
        return not has_news and self.arrival(name) not in (None, told)

    def decided(self, name: str, decision: NextRound) -> list[Item]:
        """Let go of what is not needed, and begin the next round: what of it is to be sent now."""
        row = self._rows[name]
        if decision.number <= row.decision.number:
            return []
        row.decision = decision
        row.held = {step for step in row.held if step == decision.common}
        row.is_round, row.step = True, None
        row.is_late = row.is_idle = row.has_failed = False
        row.taken.clear()
        # Who has saved one beyond the first is not sure which came first.
        row.is_late = any(step > decision.begin for step in row.before.values())
        found = []
        for rank in sorted(row.newest):
            steps = sorted({row.before.get(rank, row.newest[rank]), row.newest[rank]})
            wanted = [step for step in steps if step >= decision.begin]
            if wanted and row.take(rank, wanted[0]):
                found.append(Item(name, rank, wanted[0]))
        return [item for item in found if self.wants(item)]

    def paused(self, name: str) -> None:
        """Nothing has been saved for long: a round that has not begun does not."""
        if self.is_expecting(name):
            self._rows[name].is_idle = True
            self._rows[name].end()

    def is_expecting(self, name: str) -> bool:
        """True if a round is to be of a save that has not been made."""
        row = self._rows.get(name)
        return row is not None and row.is_round and not row.taken

    def wants(self, item: Item) -> bool:
        """True if it is still to be sent."""
        row = self._rows.get(item.name)
        return row is not None and row.step == item.step and item.rank in row.open

    def tries(self, name: str) -> bool:
        """True if the buddy is to be given this round."""
        row = self._rows[name]
        if row.failures < FAILURES_MAX:
            return True
        return row.decision.number % (1 << min(row.failures - 1, PAUSE_MAX)) == 0

    def sent(self, item: Item) -> None:
        """It is at the buddy."""
        if self.wants(item):
            row = self._rows[item.name]
            row.open.discard(item.rank)
            row.close()

    def failed(self, item: Item) -> None:
        """The buddy did not take it, or was not tried."""
        if self.wants(item):
            row = self._rows[item.name]
            row.has_failed = True
            row.open.discard(item.rank)
            row.close()

    def overtaken(self, item: Item) -> None:
        """It was overwritten before it was sent: the round is over for all ranks."""
        if self.wants(item):
            # There was no time even to copy it.
            self._rows[item.name].end(is_late=True)

    def needs(self, name: str) -> set[int]:
        """Steps of this attempt that are not to be let go of."""
        row = self._rows.get(name)
        if row is None:
            return set()
        return row.held | ({row.step} if row.is_round and row.step is not None else set())

    def common(self, name: str) -> int | None:
        """The newest step that all nodes are known to hold."""
        row = self._rows.get(name)
        return None if row is None else row.decision.common

    def _is_ready(self, row: _Row) -> bool:
        """True if all ranks that will save have: where one saves again, all others have."""
        return len(row.newest) == self.nproc or any(rank in row.before for rank in row.newest)
