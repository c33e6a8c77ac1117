"""Snapshots that go to the buddies: after any loss, all nodes have a step in common."""

from __future__ import annotations

import pytest

from tests.core.snapshots.replicas import NAME, Speeds, World
from unbroken.core.snapshots.replication import (
    CALM_ROUNDS,
    FAILURES_MAX,
    MARGIN_MAX,
    Agreement,
    Arrival,
    Item,
    NextRound,
    Rounds,
)

STORM = [pytest.mark.heavy, pytest.mark.timeout(1200)]
SEEDS = [*range(4), pytest.param(range(4, 100), marks=STORM)]
SPEEDS = {
    "fast": Speeds(transfer=0.1),
    "about as slow as saves": Speeds(),
    "slow": Speeds(transfer=5.0),
    "with pauses": Speeds(transfer=3.0, pause=0.05),
    "saves outrun messages": Speeds(save=0.02, message=0.03, copy=0.002, pause=0.02),
    "lossy": Speeds(transfer=2.0, pause=0.02, lost=0.05),
}
SAVES = {kind: 400 if kind == "saves outrun messages" else 80 for kind in SPEEDS}


def item(step: int, rank: int = 0) -> Item:
    return Item(NAME, rank, step)


def seeds(found: object) -> list[int]:
    return [found] if isinstance(found, int) else list(found)  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", SPEEDS)
def test_any_node_may_be_lost_at_any_moment_after_the_first_round(kind: str, seed: object) -> None:
    for number in seeds(seed):
        nodes = 2 + number % 5
        world = World(number, nodes, SPEEDS[kind], copies=True)
        common = None
        for _ in world.run(SAVES[kind]):
            common = world.decisions[-1].common if world.decisions else None
            for lost in range(nodes) if common is not None else ():
                assert max(world.left(lost), default=-1) >= common, (number, world.now, lost)
        assert common is not None, number
        if kind != "lossy":
            assert all(SAVES[kind] in world.left(lost) for lost in range(nodes)), (
                "the last one is there"
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_alone_do_where_rounds_end_before_the_next_save(
    seed: object,
) -> None:
    for number in seeds(seed):
        world = World(number, 4, Speeds(transfer=0.02, copy=0.01), copies=False)
        for _ in world.run(120):
            if any(one.common is not None for one in world.decisions):
                assert all(world.left(lost) for lost in range(4)), (number, world.now)


def arrival(known: int, newest: int, *held: int, **changes: bool) -> Arrival:
    return Arrival(known, newest, 10, held, **changes)


def test_a_round_begins_when_all_have_said_what_they_hold() -> None:
    all_nodes = Agreement(2)
    assert all_nodes.arrive(0, arrival(0, 10)) is None
    assert all_nodes.arrive(1, arrival(0, 20)) == NextRound(1, None, 20)
    assert all_nodes.arrive(0, arrival(0, 20)) == NextRound(1, None, 20), "it had not heard"
    assert all_nodes.arrive(0, arrival(1, 30, 20)) is None
    assert all_nodes.arrive(1, arrival(1, 20, 20)) == NextRound(2, 20, 30)


def test_nothing_begins_without_a_newer_save() -> None:
    alone = Agreement(1)
    assert alone.arrive(0, arrival(0, 10)) == NextRound(1, None, 10)
    assert alone.arrive(0, arrival(1, 10)) is None, "it has failed, and is not tried again"
    assert alone.arrive(0, arrival(1, 10, 10)) is None
    assert alone.arrive(0, arrival(1, 20, 10)) == NextRound(2, 10, 20)


def test_who_never_saves_a_name_is_not_waited_for_and_may_join() -> None:
    some = Agreement(3)
    assert some.gathered() is None
    assert some.arrive(2, arrival(0, 10)) == NextRound(1, None, 10)
    assert some.arrive(1, arrival(0, 20)) == NextRound(1, None, 10)
    assert some.arrive(2, arrival(1, 20, 10)) is None, "it waits for who has joined"
    assert some.arrive(1, arrival(1, 20, is_late=True)) == NextRound(2, None, 30)


def test_the_margin_grows_while_nodes_are_late_and_shrinks_when_they_are_not() -> None:
    alone, ahead, newest = Agreement(1), [], 10_000
    for number in range(10 + 8 * CALM_ROUNDS):
        decision = alone.arrive(0, arrival(number, newest, is_late=number < 10))
        assert decision is not None
        ahead.append((decision.begin - newest) // 10)
        newest = decision.begin + 10
    assert ahead[:10] == [1, 2, 4, 8, 16, 32, *[MARGIN_MAX] * 4]
    assert ahead[-1] == 0


def test_the_last_save_before_a_pause_is_sent_if_the_round_waits_for_one_to_come() -> None:
    alone, rounds = Agreement(1), Rounds()
    rounds.nproc = 1
    assert alone.arrive(0, arrival(0, 10, is_late=True)) == NextRound(1, None, 20)
    rounds.saved(item(10))
    assert rounds.decided(NAME, NextRound(1, None, 20)) == []
    assert rounds.arrival(NAME) is None
    rounds.paused(NAME)
    told = rounds.arrival(NAME)
    assert told is not None
    decision = alone.arrive(0, told)
    assert decision == NextRound(2, None, 10)
    assert rounds.decided(NAME, decision) == [item(10)]


def ready(*steps: int, ranks: int = 1) -> Rounds:
    """A node that has saved these steps, and is in its first round."""
    rounds = Rounds()
    rounds.nproc = ranks
    for step in steps:
        for rank in range(ranks):
            assert not rounds.saved(item(step, rank))
    assert rounds.decided(NAME, NextRound(1, None, 4)) == []
    return rounds


def test_a_round_is_over_when_all_ranks_are_at_the_buddy() -> None:
    rounds = ready(3, ranks=2)
    assert rounds.saved(item(4, 0))
    assert not rounds.saved(item(5, 0)), "one at a time"
    rounds.sent(item(4, 0))
    assert rounds.arrival(NAME) is None
    assert rounds.saved(item(4, 1))
    rounds.sent(item(4, 1))
    assert rounds.arrival(NAME) == Arrival(1, 5, 1, (4,))


def test_what_was_overtaken_is_no_part_of_it_for_all_ranks_and_they_were_late() -> None:
    rounds = ready(3, ranks=2)
    assert rounds.saved(item(4, 0))
    assert rounds.saved(item(4, 1))
    rounds.overtaken(item(4, 1))
    assert not rounds.wants(item(4, 0))
    assert rounds.arrival(NAME) == Arrival(1, 4, 1, (), is_late=True)


def test_what_is_held_stays_until_a_decision_names_a_newer_one() -> None:
    rounds = ready(3)
    rounds.saved(item(4))
    rounds.sent(item(4))
    assert rounds.needs(NAME) == {4}
    assert rounds.decided(NAME, NextRound(2, 4, 5)) == []
    assert rounds.saved(item(5))
    assert rounds.needs(NAME) == {4, 5}
    rounds.sent(item(5))
    assert rounds.decided(NAME, NextRound(2, 4, 5)) == [], "heard twice"
    assert rounds.needs(NAME) == {4, 5}
    rounds.decided(NAME, NextRound(3, 5, 6))
    assert rounds.needs(NAME) == {5}
    assert rounds.common(NAME) == 5


def test_a_buddy_that_fails_holds_up_others_for_a_while_only() -> None:
    rounds, held, tried = ready(3), [], []
    for number in range(2, 40):
        step = 2 + number
        assert rounds.saved(item(step))
        tried.append(rounds.tries(NAME))
        rounds.failed(item(step))
        held.append(rounds.needs(NAME) != set())
        rounds.decided(NAME, NextRound(number, max(rounds.needs(NAME), default=None), step + 1))
    assert held == [False] * (FAILURES_MAX - 1) + [True] * (len(held) - FAILURES_MAX + 1)
    assert tried[:FAILURES_MAX] == [True] * FAILURES_MAX
    assert 0 < sum(tried[FAILURES_MAX:]) < 8
    assert rounds.saved(item(60))
    rounds.sent(item(60))
    assert rounds.tries(NAME)


def test_who_has_saved_too_much_to_know_its_part_says_that_it_is_late() -> None:
    rounds = Rounds()
    for step in (3, 4, 5):
        rounds.saved(item(step))
    rounds.decided(NAME, NextRound(1, None, 3))
    rounds.overtaken(item(4))
    told = rounds.arrival(NAME)
    assert told is not None
    assert told.is_late
