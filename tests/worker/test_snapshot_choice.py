"""Choice of the step to restore, of its sources, and of their receivers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from unbroken.worker.snapshot.choice import (
    Offer,
    Point,
    Shares,
    asking,
    choose,
    differing,
    givers,
    lacking,
    ranges,
    transfers,
)


def offers(*steps: str, replicas: bool = False, attempt: int = 0, asked: str = "") -> list[Offer]:
    """Return offers with each rank's steps as digits; `asked` are ranks that asked buddies."""
    everybody = tuple(range(len(steps)))
    return [
        Offer(
            tuple((attempt, int(step)) for step in own),
            everybody if replicas else (rank,),
            str(rank) in asked,
        )
        for rank, own in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (offers("34", "34"), 4),
        (offers("34", "45"), 4),
        (offers("34", "56"), None),
        (offers("34", ""), None),
        (offers("34", "", replicas=True), 4),
        (offers("", "", replicas=True), None),
    ],
)
def test_the_newest_that_all_can_produce_is_taken(given: list[Offer], expected: int | None) -> None:
    point = choose(given)
    assert (point[1] if point else None) == expected


def test_a_newer_attempt_comes_before_a_later_step() -> None:
    both = [Offer(((0, 9), (1, 3)), (0,))]
    assert choose(both) == (1, 3)
    assert choose(both, bad={(1, 3)}) == (0, 9)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (offers("34", "34"), []),
        (offers("34", "", replicas=True), [1]),
        (offers("34", "", replicas=True, asked="1"), []),
        ([replace(one, is_declared=True) for one in offers("34", "", replicas=True)], []),
        (offers("34", ""), [1]),
        (offers("34", "3"), [1]),
        (offers("34", "3", asked="1"), []),
        # The buddies of rank 1 have a step older than rank 0's: rank 0's buddies may have it, too.
        (offers("34", "2", asked="1"), [0]),
        (offers("34", "2", asked="01"), []),
        (offers("", "", replicas=True), [0, 1]),
        (offers("", "", asked="01"), []),
    ],
)
def test_buddies_are_asked_where_that_may_help(given: list[Offer], expected: list[int]) -> None:
    assert asking(given) == expected


def test_every_rank_is_asked_once_at_most_and_ends_with_the_best() -> None:
    """Whatever ranks and buddies have, what is chosen is no older than what all have at hand."""
    drawn = random.Random(3)
    for _ in range(500):
        own: list[set[Point]] = [_some(drawn) for _ in range(3)]
        buddies = [_some(drawn) for _ in range(3)]
        has_asked = [False] * 3
        before = choose(_offers(own, has_asked))
        while ranks := asking(_offers(own, has_asked)):
            for rank in ranks:
                assert not has_asked[rank]
                has_asked[rank], own[rank] = True, own[rank] | buddies[rank]
        after = choose(_offers(own, has_asked))
        assert before is None or (after is not None and after >= before)
        everything = [one | other for one, other in zip(own, buddies, strict=True)]
        assert after is not None or choose(_offers(everything, has_asked)) is None


def _some(drawn: random.Random) -> set[Point]:
    return {(0, step) for step in range(4) if drawn.random() < 0.4}


def _offers(own: list[set[Point]], has_asked: list[bool]) -> list[Offer]:
    return [
        Offer(tuple(points), (rank,), asked)
        for rank, (points, asked) in enumerate(zip(own, has_asked, strict=True))
    ]


def test_those_who_have_it_take_turns_in_giving_it() -> None:
    given = offers("4", "", "4", "", "", replicas=True)
    assert transfers(given, (0, 4)) == [(0, 1), (2, 3), (0, 4)]


def test_ranks_with_different_states_do_not_replace_each_other() -> None:
    """Three ranks, all with step 3, two with step 4; of both steps the checksums are known."""
    alike = [
        replace(one, checksums=dict.fromkeys(one.points, "a"))
        for one in offers("34", "34", "3", replicas=True, asked="012")
    ]
    assert choose(alike) == (0, 4)
    assert transfers(alike, (0, 4)) == [(0, 2)]
    other = replace(alike[1], checksums={(0, 3): "b", (0, 4): "b"})
    assert differing([alike[0], other], range(2), (0, 4)) == [0, 1]
    assert choose([alike[0], other, alike[2]]) == (0, 3), "each rank has its own of it"
    declared = [replace(one, is_declared=True) for one in (alike[0], other, alike[2])]
    assert choose(declared) == (0, 4)


def test_a_replica_that_is_declared_on_one_side_alone_gives_nothing() -> None:
    assert choose([Offer(((0, 4),), (0,)), Offer((), (0, 1))]) is None


def shared(*ranks: str, world: int, steps: str = "34") -> list[Offer]:
    """Return offers whose agents have these steps of these ranks, in a world of that size."""
    return [
        Offer((), (one,), False, {(0, int(step)): _shares(world, own) for step in steps})
        for one, own in enumerate(ranks)
    ]


def _shares(world: int, ranks: str) -> Shares:
    return Shares(world, tuple(map(int, ranks)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (shared("01", "23", world=4), 4),
        (shared("01", "13", world=4), None),
        (shared("0123", "0123", world=4), 4),
        (shared("0", "", "", world=1), 4),
        (shared("012", "", world=2), None),
        (shared("01", "01", world=2), None),
    ],
)
def test_what_other_ranks_divided_is_taken_where_all_of_them_are_there(
    given: list[Offer], expected: int | None
) -> None:
    point = choose(given)
    assert (point[1] if point else None) == expected


def test_an_older_step_is_taken_of_which_all_shares_are_there() -> None:
    one, other = shared("01", "2", world=4), shared("01", "23", world=4, steps="3")
    both = [replace(a, shares={**a.shares, **b.shares}) for a, b in zip(one, other, strict=True)]
    assert choose(both) == (0, 3)
    assert lacking(both, (0, 4)) == (4, [3])
    assert asking(both) == [], "no buddy has what no agent here has"


def test_what_is_as_these_ranks_divide_it_comes_first_if_it_is_newer() -> None:
    given = shared("01", "23", world=4)
    newer = [replace(one, points=((1, 0),)) for one in given]
    assert choose(newer) == (1, 0)
    lost = [newer[0], given[1]]
    assert asking(lost) == [1]
    assert choose(lost) == (0, 4)


def test_a_buddy_s_copy_at_hand_does_not_pass_for_another_division() -> None:
    """A share of as many ranks as there are is found by whose it is."""
    given = shared("01", "01", world=2)
    assert asking(given) == [0, 1]
    assert choose([replace(one, points=((0, 4),)) for one in given]) == (0, 4)


def test_shares_are_given_by_who_needs_them_or_in_turns() -> None:
    assert givers(shared("0123", "0123", world=4), (0, 4)) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert givers(shared("", "0123", "0123", "", world=4), (0, 4)) == {0: 1, 1: 1, 2: 2, 3: 2}


def test_ranges_name_each_rank_once() -> None:
    subsets = [itertools.combinations(range(5), count) for count in range(2, 6)]
    for ranks in itertools.chain.from_iterable(subsets):
        found: list[int] = []
        for text in ranges(ranks).split(","):
            first, _, last = text.partition("-")
            found += range(int(first), int(last or first) + 1)
        assert tuple(found) == ranks


def test_one_rank_has_no_replicas_and_many_are_cut() -> None:
    assert ranges([3]) == ""
    assert ranges(range(0, 4000, 2)).endswith("...")
