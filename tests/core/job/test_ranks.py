"""Ranks of pods."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.job.events import NodeName, NodeView, PodName, PodPhase, PodUid, PodView
from unbroken.core.job.roster import Member, Ranks, Roster
from unbroken.spec.job.types import ReplicaSpec


def roster(*nodes: str) -> Roster:
    """Nodes written `name:spine`."""
    found = Roster()
    for node in nodes:
        name, _, spine = node.partition(":")
        found.see_node(NodeView(NodeName(name), is_ready=True, topology=(spine,)))
    return found


def pod(text: str) -> Member:
    """`spec-index@node`."""
    name, _, node = text.partition("@")
    spec, _, index = name.partition("-")
    place = NodeName(node) if node else None
    view = PodView(PodName(name), PodUid(name), spec, int(index), PodPhase.RUNNING, place)
    return Member(view, -1)


def assigned(shape: Sequence[ReplicaSpec], pods: Sequence[Member], where: Roster) -> list[str]:
    """Pods by rank."""
    ranks = Ranks()
    ranks.reset(shape)
    ranks.fill(pods, where)
    return [ranks.pod_of[rank] for rank in sorted(ranks.pod_of)]


def test_topology_comes_before_spec_and_spec_before_index() -> None:
    shape = (ReplicaSpec("b", {}, 2), ReplicaSpec("a", {}, 1))
    pods = [pod("b-0@n2"), pod("b-1@n1"), pod("a-0@n1")]
    assert assigned(shape, pods, roster("n1:s1", "n2:s2")) == ["b-1", "a-0", "b-0"]


def test_spares_are_the_last_of_their_own_spec() -> None:
    shape = (ReplicaSpec("a", {}, 1, 1), ReplicaSpec("b", {}, 1))
    pods = [pod("a-1@n1"), pod("a-0@n2"), pod("b-0@n2")]
    assert assigned(shape, pods, roster("n1:s1", "n2:s2")) == ["a-1", "b-0"]


def test_free_rank_goes_to_a_pod_of_the_same_spec_and_the_others_keep_theirs() -> None:
    ranks, where = Ranks(), roster()
    ranks.reset((ReplicaSpec("a", {}, 2, 1), ReplicaSpec("b", {}, 1, 1)))
    ranks.fill([pod("a-0"), pod("a-1"), pod("b-0")], where)
    assert ranks.release(PodUid("a-0")) == 0
    ranks.fill([pod("b-1")], where)
    assert not ranks.is_full
    ranks.fill([pod("b-1"), pod("a-2")], where)
    assert ranks.pod_of == {0: "a-2", 1: "a-1", 2: "b-0"}


def test_told_rank_is_kept_unless_it_is_taken_or_impossible() -> None:
    ranks = Ranks()
    ranks.reset((ReplicaSpec("a", {}, 2),))
    assert ranks.restore(pod("a-1"), 0)
    assert not ranks.restore(pod("a-0"), 0)
    assert not ranks.restore(pod("a-0"), 2)
    assert not ranks.restore(pod("a-0"), -1)
    assert not ranks.restore(pod("z-0"), 1)
    assert not ranks.restore(pod("a-1"), 1)
    ranks.fill([pod("a-0")], roster())
    assert ranks.pod_of == {0: "a-1", 1: "a-0"}


@given(st.lists(st.sampled_from(["a", "b"]), max_size=12), st.data())
def test_ranks_stay_whole_whatever_goes(specs: list[str], data: st.DataObject) -> None:
    shape = (ReplicaSpec("a", {}, 2, 1), ReplicaSpec("b", {}, 2, 1))
    ranks, where = Ranks(), roster()
    ranks.reset(shape)
    kept: dict[str, int] = {}
    for number, spec in enumerate(specs):
        member = pod(f"{spec}-{number}")
        ranks.fill([member], where)
        assert all(ranks.rank_of.get(PodUid(uid)) == rank for uid, rank in kept.items())
        kept = {str(uid): rank for uid, rank in ranks.rank_of.items()}
        if kept and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(kept)))
            ranks.release(PodUid(gone))
            del kept[gone]
    assert len(set(ranks.rank_of.values())) == len(ranks.rank_of) == len(ranks.pod_of)
    assert all(0 <= rank < 4 for rank in ranks.pod_of)
