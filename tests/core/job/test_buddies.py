"""Buddies for copies of snapshots: rules for the choice, and the copies that agents are to have."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.job.drive_job import Script, running
from unbroken.core.job.events import (
    NodeName,
    NodeView,
    PodName,
    PodPhase,
    PodUid,
    PodView,
    StartWorkers,
)
from unbroken.core.job.roster import Roster
from unbroken.core.snapshots.buddies import Buddies, Copies, Cost, NodePlace, assign, cost
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.agent_bodies import HOLDERS_MAX


def placed(*hosts: str) -> dict[int, NodePlace]:
    """Return node ranks on hosts, each named `zone/rack/host`."""
    return {rank: NodePlace(text, tuple(text.split("/")[:-1])) for rank, text in enumerate(hosts)}


hosts = st.builds(
    lambda rack, host: f"{rack}/{host}", st.sampled_from("abc"), st.integers(0, 4).map(str)
)
jobs = st.lists(hosts, min_size=2, max_size=24).map(lambda names: placed(*names))


@given(jobs)
def test_a_buddy_is_another_rank_on_another_host_if_there_is_one(
    places: dict[int, NodePlace],
) -> None:
    found = assign(places, {})
    assert found.keys() == places.keys()
    assert all(one != other for one, other in found.items())
    if len({place.host for place in places.values()}) > 1:
        assert cost(places, found).hosts == 0


@given(jobs)
def test_nobody_is_the_buddy_of_more_than_must_be(places: dict[int, NodePlace]) -> None:
    largest = max(Counter(place.host for place in places.values()).values())
    others = len(places) - largest
    least = -(-largest // others) if others else 1
    assert cost(places, assign(places, {})).load == max(least, 1)


@given(st.lists(hosts, min_size=2, max_size=6).map(lambda names: placed(*names)))
def test_no_balanced_choice_shares_fewer_racks(places: dict[int, NodePlace]) -> None:
    found = cost(places, assign(places, {}))
    every = [cost(places, dict(zip(places, p, strict=True))) for p in permutations(places)]
    fit = [one for one in every if one.hosts == 0]
    if fit:
        assert found == min(fit)


@given(jobs, st.data())
def test_who_stays_keeps_the_buddy_where_one_node_is_replaced_in_its_rack(
    places: dict[int, NodePlace], data: st.DataObject
) -> None:
    before = assign(places, {})
    rank = data.draw(st.sampled_from(sorted(places)))
    after = {**places, rank: NodePlace("new", places[rank].rack)}
    found = assign(after, before)
    assert cost(after, found) <= cost(after, assign(after, {}))
    if cost(after, before) <= cost(after, assign(after, {})):
        assert found == before


@given(jobs, jobs)
def test_what_was_chosen_elsewhere_makes_no_choice_worse(
    places: dict[int, NodePlace], others: dict[int, NodePlace]
) -> None:
    found = assign(places, assign(others, {}))
    assert cost(places, found) <= cost(places, assign(places, {}))
    assert all(one != other for one, other in found.items())


def test_one_that_comes_too_near_costs_few_changes() -> None:
    places = placed(*(f"rack-{i}/{i}" for i in range(8)))
    before = assign(places, {})
    near = {**places, 0: NodePlace("0", places[before[0]].rack)}
    found = assign(near, before)
    assert cost(near, found).racks == 0
    # It and its buddy are each other's: both need another one, whose own they exchange.
    assert sum(found[rank] != before[rank] for rank in places) == 4


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], Cost(0, 0, 0)),
        (["a/0"], Cost(0, 0, 0)),
        (["a/0", "a/0"], Cost(2, 1, 2)),
        (["a/0", "a/1"], Cost(0, 1, 2)),
        (["a/0", "a/0", "a/0", "a/1"], Cost(0, 3, 4)),
        (["a/0", "a/1", "b/2", "b/3"], Cost(0, 1, 0)),
        (["a/0", "a/1", "a/2", "b/3"], Cost(0, 1, 2)),
    ],
)
def test_what_a_choice_costs(names: list[str], expected: Cost) -> None:
    places = placed(*names)
    assert cost(places, assign(places, {})) == expected


def test_a_thousand_nodes_are_chosen_for_in_no_time_even_if_all_racks_change() -> None:
    places = placed(*(f"rack-{i // 16}/{i}" for i in range(1000)))
    before = assign(places, {})
    moved = {rank: NodePlace(place.host, ("one",)) for rank, place in places.items()}
    assert assign(moved, before) == before
    assert cost(places, before).racks == 0


class Agents:
    """A roster of pods `w-0`..., each on a node of its own, with a living agent."""

    def __init__(self, count: int) -> None:
        self.roster = Roster()
        self.ranks: dict[PodUid, int] = {}
        for rank in range(count):
            self.put(rank, f"w-{rank}.0")

    def put(
        self, rank: int, uid: str, *, node: str = "", port: int = 8080, address: str | None = None
    ) -> None:
        """Give the rank to a new pod, on a node of its own or this one."""
        for old in [one for one, had in self.ranks.items() if had == rank]:
            del self.ranks[old]
            self.roster.remove_pod(old)
        name, pod = NodeName(node or f"n-{uid}"), PodUid(uid)
        self.roster.see_node(NodeView(name, is_ready=True))
        self.roster.see_pod(
            PodView(
                PodName(f"w-{rank}"), pod, "w", rank, PodPhase.RUNNING, name,
                address=address or f"ip-{uid}", agent_port=port,
            )
        )  # fmt: skip
        self.ranks[pod] = rank
        self.boot(rank, f"agent-{uid}")

    def boot(self, rank: int, agent: str, *, copies: tuple[int, ...] = ()) -> None:
        """Let a new process of the rank's agent report."""
        (pod,) = [one for one, had in self.ranks.items() if had == rank]
        report = AgentReport(agent, AgentState.READY, newest_attempt=0, nproc=1, copies=copies)
        self.roster.members[pod].accept(report)

    def start(self, buddies: Buddies) -> dict[int, Copies]:
        """Return the copies that each rank's agent is to send and to fetch."""
        found = buddies.start(self.ranks, self.roster)
        return {self.ranks[uid]: copies for uid, copies in found.items()}


def test_the_first_attempt_has_buddies_and_nobody_to_ask() -> None:
    found = Agents(3).start(Buddies())
    assert sorted(one.buddy for one in found.values()) == [f"ip-w-{i}.0:8080" for i in range(3)]
    assert all(one.holders == () for one in found.values())


def test_who_was_a_buddy_and_lives_is_asked_by_the_new_pod_of_a_rank() -> None:
    agents, buddies = Agents(3), Buddies()
    before = agents.start(buddies)
    agents.put(2, "w-2.1")
    found = agents.start(buddies)
    assert found[2].holders == (before[2].buddy,)


def test_the_newest_buddy_is_asked_first_and_older_ones_after_it() -> None:
    agents, buddies = Agents(4), Buddies()
    first = agents.start(buddies)[0].buddy
    (near,) = [uid for uid in agents.ranks if first == f"ip-{uid}:8080"]
    # It shares its node with the rank's new pod, so that another one must be the buddy.
    agents.put(0, "w-0.1", node=agents.roster.members[near].view.node or "")
    second = agents.start(buddies)[0].buddy
    assert second != first
    assert agents.start(buddies)[0].holders == (second, first)
    # Another process has at most what was sent since it began.
    (rank,) = [rank for uid, rank in agents.ranks.items() if second == f"ip-{uid}:8080"]
    agents.boot(rank, "later")
    assert agents.start(buddies)[0].holders == (first, second)


def test_an_operator_that_does_not_know_who_was_asks_those_who_may_have_been() -> None:
    agents, later = Agents(12), Buddies()
    before = agents.start(Buddies())
    agents.put(5, "w-5.1")
    later.is_whole = False
    found = agents.start(later)
    for rank, (_, holders) in found.items():
        assert len(holders) == HOLDERS_MAX
        assert holders[0] == before[rank].buddy.replace("w-5.0", "w-5.1")
        assert not any(f"w-{rank}." in one for one in holders)


def test_who_says_that_it_has_copies_is_asked() -> None:
    agents = Agents(4)
    agents.boot(1, "agent-w-1.0", copies=(2, 1, 99))
    found = agents.start(Buddies())
    assert [found[i].holders for i in range(4)] == [(), (), ("ip-w-1.0:8080",), ()]


def test_without_buddies_those_of_before_are_still_asked() -> None:
    agents, buddies = Agents(2), Buddies()
    agents.start(buddies)
    buddies.is_on = False
    assert agents.start(buddies)[0] == Copies("", ("ip-w-1.0:8080",))
    later = Buddies()
    later.is_on = later.is_whole = False
    assert agents.start(later)[0] == Copies()


def test_stock_agents_take_no_part() -> None:
    agents = Agents(3)
    (pod,) = [uid for uid, rank in agents.ranks.items() if rank == 1]
    agents.roster.members[pod].report = AgentReport("stock", AgentState.READY)
    found = agents.start(Buddies())
    assert {rank: one.buddy for rank, one in found.items()} == {
        0: "ip-w-2.0:8080",
        2: "ip-w-0.0:8080",
    }


def test_an_address_is_the_pods_and_the_port_its_agents() -> None:
    agents = Agents(2)
    agents.put(1, "w-1.1", port=9000, address="fd00::1")
    assert agents.start(Buddies())[0].buddy == "[fd00::1]:9000"


def copies(script: Script, attempt: int) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return buddy and holders in each pod's start of an attempt."""
    starts = [e for e in script.effects if isinstance(e, StartWorkers)]
    told = [(e.pod, e.command) for e in starts if e.command.attempt == attempt]
    return {uid: (command.buddy, command.holders) for uid, command in told}


ADDRESSES = ("10.0.0.0:8080", "10.0.0.1:8080", "10.0.0.2:8080")


def test_a_job_whose_pod_is_lost_asks_the_buddy_for_what_it_had() -> None:
    script = running(3)
    assert [one for one, _ in copies(script, 0).values()] == [ADDRESSES[i] for i in (1, 2, 0)]
    script.run("10 gone w-2")
    script.run("11 pod w-2 uid=w-2.1 node=n9")
    script.run("12 ready w-0 0\n12 ready w-1 0\n13 ready w-2 0 agent=later")
    found = copies(script, 1)
    assert found["w-2.1"] == (ADDRESSES[0], (ADDRESSES[0],))
    assert found["w-0.0"] == (ADDRESSES[1], (ADDRESSES[1],))
    assert found["w-1.0"] == (ADDRESSES[2], ())


def test_a_new_operator_names_everybody_who_may_have_copies() -> None:
    script = running(3)
    later = script.successor(20.0)
    for name in ("w-0", "w-1", "w-2"):
        later.run(f"20 runs {name} 0 rank={name[-1]} master=10.0.0.0 port=29000")
    later.run("21 synced\n30 failed w-1 0\n31 ready w-0 0\n31 ready w-1 0\n31 ready w-2 0")
    found = copies(later, 1)
    assert found["w-1.0"] == (ADDRESSES[2], (ADDRESSES[2], ADDRESSES[0]))


@pytest.mark.parametrize(("option", "buddy"), [("on", ADDRESSES[1]), ("off", "")])
def test_a_job_may_have_no_buddies(option: str, buddy: str) -> None:
    script = Script()
    script.run(f"0 job buddy={option}\n0 synced\n0 pod w-0 node=n0\n0 pod w-1 node=n1")
    script.run("1 ready w-0\n1 ready w-1")
    assert copies(script, 0)["w-0.0"] == (buddy, ())


def test_one_node_has_no_buddy() -> None:
    script = running(1)
    assert copies(script, 0) == {"w-0.0": ("", ())}
