"""Choice of the snapshots to copy to buddies and to keep, so that all nodes have a step in common.

Sharded state can be restored only from one step of all nodes. Nodes therefore send the same steps,
in rounds of one step each. Between two rounds every node reports to the agent of node rank 0 what
it holds: in its own memory and at its buddy (`Arrival`). Once all have reported, that agent knows
the newest step that all hold, and decides on the saves of the next round (`NextRound`).

A node releases what it holds only after it has received a decision, and then keeps the common step.
So from the first round on there is always a step that all nodes hold, whatever is slow, fails or is
lost. The common step before a decision is released only after it, and the common step of the
decision was held by all before. A node holds at most two states, and begins no other while it
waits.

A round is for the newest save, which still lies in its slot: the last save before a pause is copied
too. If saves are faster than the news of rounds, the round is for a future save (`margin`). It is
for the last save again if that future save does not come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Annotated, NamedTuple

from msgspec import Meta

from unbroken.wire.codec import Natural

MARGIN_MAX = 64
"""Largest margin, in saves."""
CALM_ROUNDS = 16
"""Rounds in a row without a late node after which the margin is halved."""
FAILURES_MAX = 3
"""Failures in a row after which a buddy no longer holds up the other nodes.

Then this node's own memory counts alone. The buddy is tried again every 2, 4, 8... 64 rounds.
"""
PAUSE_MAX = 6
HELD_MAX = 16
"""Held steps that a node reports at most."""
KEPT = 2
"""Complete snapshots of a rank kept at its buddy, if the sender does not name those it needs."""


class Item(NamedTuple):
    """One rank's part of a round."""

    name: str
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A node's report between two rounds of a name."""

    known: Natural
    """Number of the newest decision that the node has received; 0: none."""
    newest: Natural
    """Step of its newest save."""
    stride: Natural
    """Steps between two saves; 0: not known."""
    held: Annotated[tuple[Natural, ...], Meta(max_length=HELD_MAX)]
    is_late: bool = False
    """True if it received the last round too late to take part."""
    is_idle: bool = False
    """Saving has paused, and so the last round has not begun."""


@dataclass(frozen=True, slots=True)
class NextRound:
    """The next round, for all nodes."""

    number: Natural
    common: Natural | None
    """The newest step that all nodes hold; None: there is none."""
    begin: Natural
    """The next round is for the first save from this step on."""


NOTHING = NextRound(0, None, -1)
"""The decision before the first round."""


class Agreement:
    """Agreement of all nodes of an attempt about one name, at the agent of node rank 0."""

    def __init__(self, nodes: int) -> None:
        self._nodes, self._margin, self._calm = nodes, 0, 0
        self._arrived: dict[int, Arrival] = {}
        self._members: set[int] = set()
        self._is_gathered = False
        self._decision = NOTHING

    def arrive(self, node: int, arrival: Arrival) -> NextRound | None:
        """Return the decision that the node has not received yet, or the next one; None: not known
        yet."""
        self._members.add(node)
        if arrival.known < self._decision.number:
            return self._decision
        self._arrived[node] = arrival
        return self._decide()

    def gathered(self) -> NextRound | None:
        """Stop waiting for nodes that have not reported so far: they do not save this name."""
        self._is_gathered = True
        return self._decide()

    def _decide(self) -> NextRound | None:
        is_complete = self._is_gathered or len(self._members) == self._nodes
        if not is_complete or not self._arrived or self._members - self._arrived.keys():
            return None
        told = list(self._arrived.values())
        held = set.intersection(*(set(arrival.held) for arrival in told))
        common = max(held, default=None)
        newest, last = max(arrival.newest for arrival in told), self._decision.begin
        is_idle = all(arrival.is_idle for arrival in told)
        is_new = newest > last or (is_idle and newest < last)
        if not is_new or (common is not None and newest <= common):
            return None
        self._pace(any(arrival.is_late for arrival in told))
        ahead = 0 if is_idle else self._margin * max(arrival.stride for arrival in told)
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
    """The state of one name, on one node."""

    newest: dict[int, int] = field(default_factory=dict)
    """Newest step by rank."""
    before: dict[int, int] = field(default_factory=dict)
    """Step of the save before the newest, by rank."""
    stride: int = 0
    decision: NextRound = NOTHING
    is_round: bool = False
    """True if a round is under way, or about to begin."""
    step: int | None = None
    """Step of the round."""
    taken: set[int] = field(default_factory=set)
    """Ranks that take part in it."""
    open: set[int] = field(default_factory=set)
    """Node ranks whose snapshot is not at the buddy yet."""
    has_failed: bool = False
    """The buddy has not accepted all of it."""
    held: set[int] = field(default_factory=set)
    is_late: bool = False
    is_idle: bool = False
    failures: int = 0

    def take(self, rank: int, step: int) -> bool:
        """Include a rank's save in the round, if it belongs to it."""
        if not self.is_round or rank in self.taken or step < self.decision.begin:
            return False
        self.step = step if self.step is None else self.step
        if step != self.step:
            # This rank, or the first, had saved the round's step before the round was known.
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
        """End the round without further copies."""
        self.is_round, self.is_late = False, self.is_late or is_late
        self.open.clear()


class Rounds:
    """The rounds of one node in one attempt."""

    def __init__(self) -> None:
        self.nproc = 1
        """Ranks of this node."""
        self._rows: dict[str, _Row] = {}

    def saved(self, item: Item) -> bool:
        """Note that a rank has a whole snapshot; return whether to send it."""
        row = self._rows.setdefault(item.name, _Row())
        had = row.newest.get(item.rank)
        if had is not None and item.step > had:
            row.before[item.rank] = had
            row.stride = gcd(row.stride, item.step - had)
        row.newest[item.rank] = max(item.step, had or 0)
        row.is_idle = False
        return row.take(item.rank, item.step)

    def arrival(self, name: str) -> Arrival | None:
        """Return the report to send now; None: none, as a round is under way or no rank is
        ready."""
        row = self._rows.get(name)
        if row is None or row.is_round or not self._is_ready(row):
            return None
        newest = max(row.newest.values())
        held = tuple(sorted(row.held))
        return Arrival(row.decision.number, newest, row.stride, held, row.is_late, row.is_idle)

    def is_stale(self, name: str, told: Arrival) -> bool:
        """True if the sent report no longer suffices for a decision, and a better one can be
        sent."""
        row = self._rows[name]
        has_news = told.newest > max([row.decision.begin, *told.held])
        return not has_news and self.arrival(name) not in (None, told)

    def decided(self, name: str, decision: NextRound) -> list[Item]:
        """Release what is not needed, begin the next round, and return what to send now."""
        row = self._rows[name]
        if decision.number <= row.decision.number:
            return []
        row.decision = decision
        row.held = {step for step in row.held if step == decision.common}
        row.is_round, row.step = True, None
        row.is_late = row.is_idle = row.has_failed = False
        row.taken.clear()
        # A rank with a save beyond the first cannot be sure which one came first.
        row.is_late = any(step > decision.begin for step in row.before.values())
        result = []
        for rank in sorted(row.newest):
            steps = sorted({row.before.get(rank, row.newest[rank]), row.newest[rank]})
            wanted = [step for step in steps if step >= decision.begin]
            if wanted and row.take(rank, wanted[0]):
                result.append(Item(name, rank, wanted[0]))
        return [item for item in result if self.wants(item)]

    def paused(self, name: str) -> None:
        """Note that saving has paused: a round that has not begun will not."""
        if self.is_expecting(name):
            self._rows[name].is_idle = True
            self._rows[name].end()

    def is_expecting(self, name: str) -> bool:
        """True if a round waits for a save that has not been made."""
        row = self._rows.get(name)
        return row is not None and row.is_round and not row.taken

    def wants(self, item: Item) -> bool:
        """True if the snapshot is still to be sent."""
        row = self._rows.get(item.name)
        return row is not None and row.step == item.step and item.rank in row.open

    def tries(self, name: str) -> bool:
        """True if this round is to be sent to the buddy."""
        row = self._rows[name]
        if row.failures < FAILURES_MAX:
            return True
        return row.decision.number % (1 << min(row.failures - 1, PAUSE_MAX)) == 0

    def sent(self, item: Item) -> None:
        """Note that the snapshot is at the buddy."""
        if self.wants(item):
            row = self._rows[item.name]
            row.open.discard(item.rank)
            row.close()

    def failed(self, item: Item) -> None:
        """Note that the buddy did not accept the snapshot, or was not tried."""
        if self.wants(item):
            row = self._rows[item.name]
            row.has_failed = True
            row.open.discard(item.rank)
            row.close()

    def overtaken(self, item: Item) -> None:
        """Note that the snapshot was overwritten before it was sent: the round is over for all
        ranks."""
        if self.wants(item):
            # There was no time even to copy it.
            self._rows[item.name].end(is_late=True)

    def needs(self, name: str) -> set[int]:
        """Return the steps of this attempt that must not be released."""
        row = self._rows.get(name)
        if row is None:
            return set()
        return row.held | ({row.step} if row.is_round and row.step is not None else set())

    def common(self, name: str) -> int | None:
        """Return the newest step that all nodes are known to hold."""
        row = self._rows.get(name)
        return None if row is None else row.decision.common

    def _is_ready(self, row: _Row) -> bool:
        """True if all saving ranks have saved: once one saves again, all others have."""
        return len(row.newest) == self.nproc or any(rank in row.before for rank in row.newest)
