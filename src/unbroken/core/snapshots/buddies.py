"""Choice of the agents that keep copies of snapshots, and of those that may hold older copies.

Each node rank has one other node rank as its buddy. The buddy is on another node of the cluster if
there is any, and each node is the buddy of as few ranks as possible. It is in another rack if that
costs no balance. In order of topology, the node rank half of all ranks away is furthest at every
level: no other balanced choice shares fewer racks. A choice is kept as long as it is as good as a
new one: a new choice needs new copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unbroken.core.job.events import PodUid
from unbroken.core.job.roster import Member, Roster, address_of, is_stock
from unbroken.wire.agent_bodies import HOLDERS_MAX

REPAIRED_MAX = 32
"""Ranks that are examined one by one if a choice has become worse."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The location of a node rank."""

    host: str
    """Name of the node of the cluster."""
    rack: tuple[str, ...] = ()
    """Values of its topology labels, widest first."""


class Copies(NamedTuple):
    """Copy orders for one agent at a start."""

    buddy: str = ""
    """`host:port` of the agent that receives the copies; empty: none does."""
    holders: tuple[str, ...] = ()
    """Agents that may hold copies, likeliest first."""


class Cost(NamedTuple):
    """Cost of a choice, worst defect first."""

    hosts: int
    """Ranks whose buddy is on their own node."""
    load: int
    """Copies on the node that keeps most."""
    racks: int


def assign(places: Mapping[int, NodePlace], before: Mapping[int, int]) -> dict[int, int]:
    """Return the buddy of each node rank; empty if there is only one rank.

    `before`: the last choice. It is kept, or changed as little as possible, unless a new choice is
    better.
    """
    if len(places) < 2:
        return {}
    fresh = _fresh(places)
    if before.keys() != places.keys() or not places.keys() >= set(before.values()):
        return fresh
    best = cost(places, fresh)
    kept = dict(before) if cost(places, before) <= best else _repaired(places, before)
    return kept if cost(places, kept) <= best else fresh


def cost(places: Mapping[int, NodePlace], buddies: Mapping[int, int]) -> Cost:
    """Return the cost of a choice."""
    loads = Counter(buddies.values())
    return Cost(
        sum(places[one].host == places[other].host for one, other in buddies.items()),
        max(loads.values(), default=0),
        sum(places[one].rack == places[other].rack for one, other in buddies.items()),
    )


def _fresh(places: Mapping[int, NodePlace]) -> dict[int, int]:
    order = sorted(places, key=lambda rank: (places[rank].rack, places[rank].host, rank))
    half = len(order) // 2
    result = dict(zip(order, order[half:] + order[:half], strict=True))
    # Only if one node has more than half of all ranks: the other nodes share it.
    crowded = [rank for rank in order if places[rank].host == places[result[rank]].host]
    host = places[crowded[0]].host if crowded else ""
    others = [rank for rank in order if places[rank].host != host]
    if crowded and others:
        # Every other node is taken once by now.
        result |= {rank: others[i % len(others)] for i, rank in enumerate(crowded)}
    return result


def _repaired(places: Mapping[int, NodePlace], before: Mapping[int, int]) -> dict[int, int]:
    """Return the choice with some buddies exchanged, so that fewer are near."""
    result = dict(before)
    near = [rank for rank in result if _nearness(places, rank, result[rank])]
    for one in near[:REPAIRED_MAX]:
        had = _nearness(places, one, result[one])
        for other in result:
            old = had + _nearness(places, other, result[other])
            if one in (other, result[other]) or other == result[one]:
                continue
            new = _nearness(places, one, result[other]) + _nearness(places, other, result[one])
            if new < old:
                result[one], result[other] = result[other], result[one]
                break
    return result


def _nearness(places: Mapping[int, NodePlace], one: int, other: int) -> int:
    mine, its = places[one], places[other]
    # Being together on a node weighs more than any two racks.
    return 3 * (mine.host == its.host) + (mine.rack == its.rack)


class _Keeper(NamedTuple):
    uid: PodUid
    agent: str


class Buddies:
    """The buddies of one job, over its attempts."""

    def __init__(self) -> None:
        self.is_on = True
        """True if the job wants copies; False: none are made, and earlier ones are still used."""
        self.is_whole = True
        """Every attempt with copies anywhere was started by this operator."""
        self._chosen: dict[int, int] = {}
        self._keepers: dict[int, list[_Keeper]] = {}
        """Keepers of each rank's copies, newest first."""

    def start(self, ranks: Mapping[PodUid, int], roster: Roster) -> dict[PodUid, Copies]:
        """Return the copy orders of an attempt that is to start; the attempt counts as begun."""
        members = {rank: roster.members[uid] for uid, rank in ranks.items()}
        ours = {r: m for r, m in members.items() if m.report and not is_stock(m.report)}
        places = {rank: _place(member, roster) for rank, member in ours.items()}
        guessed = assign(places, {}) if self.is_on and not self.is_whole else {}
        beside = [m for m in roster.members.values() if m.uid not in ranks and _answers(m)]
        holders = self._holders(ours, guessed, beside)
        self._chosen = assign(places, self._chosen) if self.is_on else {}
        for rank, buddy in self._chosen.items():
            self._note(rank, ours[buddy])
        return {
            member.uid: Copies(address_of(ours.get(self._chosen.get(rank, -1))), holders[rank])
            for rank, member in ours.items()
        }

    def _note(self, rank: int, buddy: Member) -> None:
        others = [keeper for keeper in self._keepers.get(rank, ()) if keeper.uid != buddy.uid]
        self._keepers[rank] = [_keeper(buddy), *others][:HOLDERS_MAX]

    def _holders(
        self, ours: Mapping[int, Member], guessed: Mapping[int, int], beside: Iterable[Member]
    ) -> dict[int, tuple[str, ...]]:
        """Return the agents that may hold copies of each rank.

        `guessed`: the choice of an unknown earlier operator; `beside`: agents that no longer have a
        rank.
        """
        alive = {member.uid: member for member in ours.values()}
        result: dict[int, dict[PodUid, Member]] = {}
        for rank in ours:
            kept = [keeper for keeper in self._keepers.get(rank, ()) if keeper.uid in alive]
            # Another process in the pod has only copies sent since it began: it comes last.
            kept.sort(key=lambda one: one != _keeper(alive[one.uid]))
            self._keepers[rank] = kept
            result[rank] = {one.uid: alive[one.uid] for one in kept}
        for member in (*ours.values(), *beside):
            for rank in member.report.copies if member.report else ():
                result.get(rank, {})[member.uid] = member
        order = list(ours)
        for index, rank in enumerate(order if guessed else ()):
            others = [guessed[rank], *order[index + 1 :], *order[:index]][: HOLDERS_MAX + 1]
            result[rank] |= {ours[other].uid: ours[other] for other in others}
        for rank, member in ours.items():
            result[rank].pop(member.uid, None)
        return {rank: _addresses(members.values()) for rank, members in result.items()}


def _answers(member: Member) -> bool:
    report = member.report
    is_there = not (member.lost_why or member.condemned or member.view.is_deleting)
    return is_there and report is not None and not is_stock(report)


def _keeper(member: Member) -> _Keeper:
    assert member.report is not None
    return _Keeper(member.uid, member.report.agent_id)


def _place(member: Member, roster: Roster) -> NodePlace:
    name = member.view.node
    node = None if name is None else roster.nodes.get(name)
    return NodePlace(member.uid if name is None else name, node.topology if node else ())


def _addresses(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(filter(None, map(address_of, members)))[:HOLDERS_MAX]
