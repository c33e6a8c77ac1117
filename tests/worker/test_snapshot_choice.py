"""Which step is taken, who is asked for it, and who gives it to whom."""

from __future__ import annotations

import itertools
import random

import pytest

from unbroken.worker.snapshot_choice import Offer, Point, asking, choose, ranges, transfers


def offers(*steps: str, replicas: bool = False, attempt: int = 0, asked: str = "") -> list[Offer]:
    """Each rank's steps as digits; who has asked its buddies, as digits."""
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
        (offers("34", "", replicas=True), []),
        (offers("34", ""), [1]),
        (offers("34", "3"), [1]),
        (offers("34", "3", asked="1"), []),
        # What the buddies of rank 1 have is older than what rank 0 has: it may have it there too.
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


def test_a_replica_that_is_declared_on_one_side_alone_gives_nothing() -> None:
    assert choose([Offer(((0, 4),), (0,)), Offer((), (0, 1))]) is None


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
