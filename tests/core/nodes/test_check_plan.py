"""Pairs name exactly the bad nodes as long as they are fewer than half, and never a good one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.nodes.checks.plan import (
    Link,
    NodePair,
    PairsVerdict,
    edge,
    judge_pairs,
    next_pairs,
)

ROUNDS_MAX = 60


def play(
    nodes: Collection[str], link: Callable[[NodePair], Link], types: Mapping[str, str] | None = None
) -> tuple[PairsVerdict, list[list[NodePair]]]:
    """Test what is planned until nothing is; who was found, and the rounds."""
    tested: dict[NodePair, Link] = {}
    rounds = []
    while pairs := next_pairs(nodes, tested, types):
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)), "a node in two pairs at once"
        assert not tested.keys() & set(pairs), "a pair that was tested already"
        tested |= {both: link(pair) for pair in pairs for both in (pair, pair[::-1])}
        rounds.append(pairs)
        assert len(rounds) < ROUNDS_MAX
    return judge_pairs(nodes, tested), rounds


def spoiled_by(bad: Collection[str]) -> Callable[[NodePair], Link]:
    return lambda pair: Link.BAD if set(pair) & set(bad) else Link.GOOD


def named(count: int) -> list[str]:
    return [f"node-{number:02}" for number in range(count)]


@given(st.integers(3, 25), st.data())
def test_any_bad_set_below_half_is_named_exactly(count: int, data: st.DataObject) -> None:
    nodes = named(count)
    bad = data.draw(st.sets(st.sampled_from(nodes), max_size=(count - 1) // 2))
    verdict, _ = play(nodes, spoiled_by(bad))
    assert verdict == PairsVerdict(frozenset(nodes) - bad, frozenset(bad), frozenset())


@given(st.integers(1, 25), st.data())
def test_no_good_node_is_named_however_many_are_bad(count: int, data: st.DataObject) -> None:
    nodes = named(count)
    bad = data.draw(st.sets(st.sampled_from(nodes)))
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=3))

    def link(pair: NodePair) -> Link:
        return Link.UNKNOWN if set(pair) & lost else spoiled_by(bad)(pair)

    verdict, _ = play(nodes, link)
    assert verdict.bad <= bad
    assert not verdict.good & bad
    assert verdict.good | verdict.bad | verdict.open == frozenset(nodes)


@given(st.integers(3, 40), st.data())
def test_one_bad_node_takes_two_rounds_three_with_an_odd_one(
    count: int, data: st.DataObject
) -> None:
    nodes = named(count)
    bad = data.draw(st.sampled_from(nodes))
    verdict, rounds = play(nodes, spoiled_by([bad]))
    assert verdict.bad == {bad}
    assert len(rounds) <= 2 + count % 2


@given(st.lists(st.sampled_from("ABC"), min_size=3, max_size=15), st.data())
def test_instance_types_change_nothing_of_who_is_named(
    kinds: list[str], data: st.DataObject
) -> None:
    nodes = named(len(kinds))
    types = dict(zip(nodes, kinds, strict=True))
    bad = data.draw(st.sets(st.sampled_from(nodes), max_size=(len(nodes) - 1) // 2))
    verdict, _ = play(nodes, spoiled_by(bad), types)
    assert verdict == PairsVerdict(frozenset(nodes) - bad, frozenset(bad), frozenset())


@given(st.lists(st.sampled_from("ABC"), min_size=2, max_size=15))
def test_nodes_meet_those_of_their_own_type_where_there_is_another(kinds: list[str]) -> None:
    nodes = named(len(kinds))
    types = dict(zip(nodes, kinds, strict=True))
    _, rounds = play(nodes, spoiled_by([]), types)
    met = {both for pairs in rounds for pair in pairs for both in (pair, pair[::-1])}
    for node in nodes:
        if kinds.count(types[node]) > 1:
            others = {other for name, other in met if name == node}
            assert types[node] in {types[other] for other in others}


def test_two_nodes_of_which_one_is_bad_name_nobody() -> None:
    verdict, rounds = play(["a", "b"], spoiled_by(["b"]))
    assert verdict == PairsVerdict(frozenset(), frozenset(), frozenset({"a", "b"}))
    assert rounds == [[("a", "b")]]


def test_one_node_alone_meets_nobody() -> None:
    verdict, rounds = play(["a"], spoiled_by([]))
    assert (verdict.open, rounds) == (frozenset({"a"}), [])


def test_a_link_that_fails_between_two_good_nodes_names_neither() -> None:
    broken = edge("node-00", "node-01")
    verdict, _ = play(named(4), lambda pair: Link.BAD if pair == broken else Link.GOOD)
    assert verdict == PairsVerdict(frozenset(named(4)), frozenset(), frozenset())


@pytest.mark.parametrize("count", [4, 5, 9])
def test_a_network_that_is_broken_everywhere_names_nobody(count: int) -> None:
    verdict, rounds = play(named(count), lambda pair: Link.BAD)
    assert (verdict.good, verdict.bad) == (frozenset(), frozenset())
    assert len(rounds) <= 3


def test_a_node_that_cannot_be_tested_is_tried_twice() -> None:
    verdict, rounds = play(named(6), lambda pair: Link.UNKNOWN if "node-05" in pair else Link.GOOD)
    assert verdict.open == {"node-05"}
    assert sum("node-05" in pair for pairs in rounds for pair in pairs) == 2
