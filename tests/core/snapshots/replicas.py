"""Nodes that save, agree and send, in simulated time, and the steps that are left after a loss.

Saves are in lockstep, as all-reduces make them. All other durations are drawn, and messages and
transfers may be lost. A restore after a loss is judged by the remaining copies.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from unbroken.core.snapshots.replication import Agreement, Arrival, Item, NextRound, Rounds

NAME = "state"
REST_SECONDS = 200.0
"""Seconds after the last save."""


@dataclass
class Speeds:
    """Mean durations of a world in seconds; each duration is drawn around its mean."""

    save: float = 1.0
    """Seconds between two saves."""
    transfer: float = 0.5
    message: float = 0.01
    copy: float = 0.05
    pause: float = 0.0
    """Probability of a long pause of training after a save."""
    lost: float = 0.0
    """Probability that a message or a transfer is lost."""


@dataclass(eq=False)
class Node:
    """Two ranks, their slots, and the agent's copies of its own and at the buddy."""

    index: int
    slowness: float
    buddy: int
    rounds: Rounds = field(default_factory=Rounds)
    slots: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    own: dict[int, set[int]] = field(default_factory=lambda: {0: set(), 1: set()})
    """Steps copied in this agent's memory, by rank."""
    away: dict[int, set[int]] = field(default_factory=lambda: {0: set(), 1: set()})
    """Steps at the buddy, by rank."""
    queue: list[Item] = field(default_factory=list)
    is_sending: bool = False
    told: Arrival | None = None
    asked: int = 0
    """Number of messages; an answer to an older one does not count."""


class World:
    """All nodes; `run` yields at each moment at which something has changed."""

    def __init__(self, seed: int, nodes: int, speeds: Speeds, *, copies: bool) -> None:
        self._random, self.speeds, self.copies = random.Random(seed), speeds, copies
        self.now, self._events, self._count = 0.0, [], 0  # type: ignore[var-annotated]
        shift = self._random.randrange(1, nodes)
        self.nodes = [
            Node(one, self._random.uniform(0.5, 3), (one + shift) % nodes) for one in range(nodes)
        ]
        for node in self.nodes:
            node.rounds.nproc = 2
        self.agreement = Agreement(nodes)
        self.waiting: dict[int, int] = {}
        self.decisions: list[NextRound] = []
        self.ends = float("inf")

    def after(self, seconds: float, call: Callable[..., None], *values: object) -> None:
        """Schedule a call in simulated time."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call, values))

    def around(self, seconds: float) -> float:
        """Draw a duration around `seconds`."""
        return seconds * self._random.uniform(0.3, 1.7)

    def chance(self, probability: float) -> bool:
        """Draw whether an event with this probability happens."""
        return self._random.random() < probability

    def run(self, saves: int) -> Iterator[None]:
        """Run until `saves` saves are done and nothing is in progress; yield after each change."""
        self.after(0, self._save, 0, saves)
        while self._events and self.now < self.ends + REST_SECONDS:
            self.now, _, call, values = heapq.heappop(self._events)
            call(*values)
            yield

    # Training.

    def _save(self, step: int, last: int) -> None:
        for node in self.nodes:
            for rank in (0, 1):
                begins = self.around(0.2 * self.speeds.save)
                self.after(begins, self._overwrite, node, rank)
                self.after(begins + 0.05 * self.speeds.save, self._saved, node, rank, step)
        is_pause = self.chance(self.speeds.pause)
        if step < last:
            length = self.speeds.save * self._random.uniform(0.6, 1.6)
            self.after(50.0 if is_pause else length, self._save, step + 1, last)
        if step == last:
            self.ends = self.now
        if is_pause or step == last:
            for node in self.nodes:
                self.after(10.0, self._pause, node, step)

    def _overwrite(self, node: Node, rank: int) -> None:
        del node.slots[rank][:-1]

    def _saved(self, node: Node, rank: int, step: int) -> None:
        node.slots[rank].append(step)
        item = Item(NAME, rank, step)
        if node.rounds.saved(item):
            self._begin(node, item)
        self._tell(node)

    def _pause(self, node: Node, step: int) -> None:
        if node.slots[0][-1] == step:
            node.rounds.paused(NAME)
            self._tell(node)

    # The agreement.

    def _tell(self, node: Node) -> None:
        arrival = node.rounds.arrival(NAME)
        if arrival is None or (node.told and not node.rounds.is_stale(NAME, node.told)):
            return
        node.told = arrival
        node.asked += 1
        self.after(5.0, self._again, node, node.asked)
        if not self.chance(self.speeds.lost):
            delay = self.around(self.speeds.message)
            self.after(delay, self._arrive, node, node.asked, arrival)

    def _again(self, node: Node, number: int) -> None:
        if node.told is not None and node.asked == number:
            node.told = None
            self._tell(node)

    def _arrive(self, node: Node, number: int, arrival: Arrival) -> None:
        self.waiting[node.index] = number
        decision = self.agreement.arrive(node.index, arrival)
        if decision is None:
            return
        if decision not in self.decisions:
            self.decisions.append(decision)
            told, self.waiting = self.waiting, {}
        else:
            told = {node.index: self.waiting.pop(node.index)}
        for index, asked in told.items():
            if not self.chance(self.speeds.lost):
                delay = self.around(self.speeds.message)
                self.after(delay, self._hear, self.nodes[index], asked, decision)

    def _hear(self, node: Node, asked: int, decision: NextRound) -> None:
        if node.told is None or node.asked != asked:
            return
        node.told = None
        begun = node.rounds.decided(NAME, decision)
        for own in node.own.values():
            own &= set(node.rounds.needs(NAME))
        for item in begun:
            self._begin(node, item)
        self._tell(node)

    # Transfers.

    def _begin(self, node: Node, item: Item) -> None:
        if self.copies:
            self.after(self.around(self.speeds.copy), self._copied, node, item)
        else:
            self._enqueue(node, item)

    def _copied(self, node: Node, item: Item) -> None:
        if item.step not in node.slots[item.rank]:
            node.rounds.overtaken(item)
            self._tell(node)
        elif node.rounds.wants(item):
            node.own[item.rank].add(item.step)
            self._enqueue(node, item)

    def _enqueue(self, node: Node, item: Item) -> None:
        node.queue.append(item)
        if not node.is_sending:
            self._send_next(node)

    def _send_next(self, node: Node) -> None:
        node.is_sending = False
        while node.queue and not node.rounds.wants(node.queue[0]):
            node.queue.pop(0)
        if not node.queue:
            return
        item, node.is_sending = node.queue.pop(0), True
        node.away[item.rank] &= {node.rounds.common(NAME)}
        seconds = self.around(self.speeds.transfer * node.slowness)
        self.after(seconds, self._sent, node, item)

    def _sent(self, node: Node, item: Item) -> None:
        has_copy = item.step in node.own[item.rank]
        # Never in two rounds in a row: a buddy that always fails is not waited for.
        may_fail = len(self.decisions) % 2 == 0
        if (may_fail and self.chance(self.speeds.lost)) or not node.rounds.tries(NAME):
            node.rounds.failed(item)
        elif not has_copy and item.step not in node.slots[item.rank]:
            node.rounds.overtaken(item)
        else:
            node.away[item.rank].add(item.step)
            node.rounds.sent(item)
        self._send_next(node)
        self._tell(node)

    # Steps that would be left.

    def left(self, lost: int) -> set[int]:
        """Return the steps that every rank could produce if a node were lost now."""
        found = []
        for node in self.nodes:
            for rank in (0, 1):
                away = node.away[rank] if node.buddy != lost else set()
                here = set(node.slots[rank]) | node.own[rank] if node.index != lost else set()
                found.append(away | here)
        return set.intersection(*found)
