"""Which snapshots go to the buddy: nodes that do not talk choose the same steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from unbroken.core.replication import KEPT, PERIOD_MAX, Item, Rounds


def item(step: int, rank: int = 0) -> Item:
    return Item("state", rank, step)


def test_each_save_is_sent_while_transfers_keep_up() -> None:
    rounds = Rounds()
    for step in (3, 5, 7):
        assert rounds.saved(item(step))
        assert not rounds.saved(item(step)), "once"
        rounds.sent(item(step))
    assert rounds.period("state") == 1
    assert rounds.is_settled(["state"])


def test_late_rounds_make_the_period_longer_and_the_first_of_an_attempt_does_not() -> None:
    rounds = Rounds()
    periods = []
    for begin in (0, 10):
        assert rounds.saved(item(begin))
        for step in range(begin + 1, begin + 6):
            assert not rounds.saved(item(step)), "one round at a time"
        rounds.sent(item(begin))
        periods.append(rounds.period("state"))
    assert periods == [1, 8]
    assert [step for step in range(16, 40) if rounds.saved(item(step))] == [16]


def test_steps_are_counted_by_their_stride_wherever_they_begin() -> None:
    rounds = Rounds()
    rounds.saved(item(999))
    rounds.sent(item(999))
    rounds.saved(item(1999))
    rounds.sent(item(1999))
    rounds.told("state", 4)
    sent = []
    for step in range(2999, 17_000, 1000):
        if rounds.saved(item(step)):
            sent.append(step)
            rounds.sent(item(step))
    assert sent == [4999, 8999, 12999, 16999]


def test_a_buddy_that_fails_is_tried_less_often_and_a_success_ends_that() -> None:
    rounds = Rounds()
    tried = []
    for step in range(64):
        if rounds.saved(item(step)):
            tried.append(step)
            rounds.failed(item(step))
            assert not rounds.wants(item(step))
    assert tried == [0, 2, 4, 8, 16, 32]
    assert rounds.saved(item(64))
    rounds.sent(item(64))
    assert rounds.period("state") == 1
    assert rounds.saved(item(65))


def test_an_overtaken_round_ends_for_all_ranks_and_the_next_are_copied() -> None:
    rounds = Rounds()
    assert rounds.saved(item(4, 0))
    assert rounds.saved(item(4, 1))
    rounds.overtaken(item(4, 0))
    assert rounds.copies_first
    assert not rounds.wants(item(4, 1))
    assert not rounds.saved(item(4, 2)), "it is over"
    assert rounds.saved(item(5, 0))


def test_a_stranger_cannot_stop_it_for_good() -> None:
    rounds = Rounds()
    rounds.told("never saved", 99)
    rounds.saved(item(0))
    rounds.told("state", 10**8)
    assert rounds.period("state") == PERIOD_MAX


@dataclass
class Node:
    """A node of two ranks, its transfers, and what its buddy keeps."""

    seconds: float
    """For one rank's transfer."""
    rounds: Rounds = field(default_factory=Rounds)
    queue: list[Item] = field(default_factory=list)
    left: float = 0.0
    kept: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})

    def work(self, seconds: float) -> bool:
        """Send for so long; whether a transfer has ended."""
        has_sent = False
        while self.queue and seconds >= self.left:
            seconds -= self.left
            done = self.queue.pop(0)
            self.kept[done.rank] = (self.kept[done.rank] + [done.step])[-KEPT:]
            self.rounds.sent(done)
            has_sent, self.left = True, self.seconds
        if self.queue:
            self.left -= seconds
        return has_sent


@pytest.mark.parametrize("seed", range(20))
def test_buddies_of_a_ring_have_a_step_in_common_once_the_pace_is_found(seed: int) -> None:
    drawn = random.Random(seed)
    nodes = [Node(drawn.uniform(0.1, 6.0)) for _ in range(drawn.randint(2, 6))]
    stride, first = drawn.choice([1, 3, 1000]), drawn.randint(0, 5000)
    commons = []
    for number in range(600):
        for node in nodes:
            for rank in drawn.sample([0, 1], 2):
                new = Item("state", rank, first + number * stride)
                if node.rounds.saved(new):
                    if not node.queue:
                        node.left = node.seconds
                    node.queue.append(new)
        for index, node in enumerate(nodes):
            buddy = nodes[(index + 1) % len(nodes)]
            if node.work(drawn.uniform(0.8, 1.2)):
                buddy.rounds.told("state", node.rounds.period("state"))
                node.rounds.told("state", buddy.rounds.period("state"))
        kept = [set(steps) for node in nodes for steps in node.kept.values()]
        common = set.intersection(*kept)
        if number >= 300:
            commons.append(max(common, default=-1))
    assert len(set(commons)) > 3, "it goes on"
    # Where a round is late once more, and the period grows, there may be none for one period.
    assert commons.count(-1) <= 16
    slowest = max(node.seconds for node in nodes) * 2
    assert nodes[0].rounds.period("state") <= 4 * max(1, slowest)
