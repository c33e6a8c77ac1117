"""Which node keeps copies of whose snapshots, and who may have some of earlier attempts.

Each node rank has one other as its buddy: on another node of the cluster if there is any, each the
buddy of as few as can be, in another rack if that costs no balance.  In order of topology the one
that is half of the ranks away is furthest at every level: no other balanced choice shares fewer
racks.  What was chosen stays as long as it is as good as a new choice: copies would be made anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unbroken.core.job.events import PodUid
from unbroken.core.job.roster import Member, Roster, is_stock
from unbroken.wire.agent_bodies import HOLDERS_MAX

REPAIRED_MAX = 32
"""Ranks that are looked at one by one, where a choice has become worse."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node rank is."""

    host: str
    """Node of the cluster."""
    rack: tuple[str, ...] = ()
    """Values of its topology labels, widest first."""


class Copies(NamedTuple):
    """What one agent is told at a start."""

    buddy: str = ""
    """`host:port` of the agent that is given copies; empty: nobody is."""
    holders: tuple[str, ...] = ()
    """Agents that may have some, likeliest first."""


class Cost(NamedTuple):
    """What is wrong with a choice, worst first."""

    hosts: int
    """Ranks whose buddy is on their own node."""
    load: int
    """Copies on the node that keeps most."""
    racks: int


def assign(places: Mapping[int, NodePlace], before: Mapping[int, int]) -> dict[int, int]:
    """The buddy of each node rank; none where there is one rank only.

    `before`: what was chosen last; kept, or changed as little as can be, unless a new choice is
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
    """How bad a choice is."""
    loads = Counter(buddies.values())
    return Cost(
        sum(places[one].host == places[other].host for one, other in buddies.items()),
        max(loads.values(), default=0),
        sum(places[one].rack == places[other].rack for one, other in buddies.items()),
    )


def _fresh(places: Mapping[int, NodePlace]) -> dict[int, int]:
    order = sorted(places, key=lambda rank: (places[rank].rack, places[rank].host, rank))
    half = len(order) // 2
    found = dict(zip(order, order[half:] + order[:half], strict=True))
    # Only where one node has more than half of all ranks: the others share it.
    crowded = [rank for rank in order if places[rank].host == places[found[rank]].host]
    host = places[crowded[0]].host if crowded else ""
    others = [rank for rank in order if places[rank].host != host]
    if crowded and others:
        # All others are taken once by now.
        found |= {rank: others[i % len(others)] for i, rank in enumerate(crowded)}
    return found


def _repaired(places: Mapping[int, NodePlace], before: Mapping[int, int]) -> dict[int, int]:
    """The choice with some buddies exchanged, so that fewer are near."""
    found = dict(before)
    near = [rank for rank in found if _nearness(places, rank, found[rank])]
    for one in near[:REPAIRED_MAX]:
        had = _nearness(places, one, found[one])
        for other in found:
            old = had + _nearness(places, other, found[other])
            if one in (other, found[other]) or other == found[one]:
                continue
            new = _nearness(places, one, found[other]) + _nearness(places, other, found[one])
            if new < old:
                found[one], found[other] = found[other], found[one]
                break
    return found


def _nearness(places: Mapping[int, NodePlace], one: int, other: int) -> int:
    mine, its = places[one], places[other]
    # Together on a node weighs more than any two racks.
    return 3 * (mine.host == its.host) + (mine.rack == its.rack)


class _Keeper(NamedTuple):
    uid: PodUid
    agent: str


class Buddies:
    """The buddies of one job, over its attempts."""

    def __init__(self) -> None:
        self.is_on = True
        """As the job wishes; off: nobody is given copies, and those of before are still used."""
        self.is_whole = True
        """Every attempt of which somebody may have copies was started by this operator."""
        self._chosen: dict[int, int] = {}
        self._keepers: dict[int, list[_Keeper]] = {}
        """Keepers of each rank's copies, newest first."""

    def start(self, ranks: Mapping[PodUid, int], roster: Roster) -> dict[PodUid, Copies]:
        """What each agent of an attempt that is to start is told; the attempt counts as begun."""
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
        others = [one for one in self._keepers.get(rank, ()) if one.uid != buddy.uid]
        self._keepers[rank] = [_keeper(buddy), *others][:HOLDERS_MAX]

    def _holders(
        self, ours: Mapping[int, Member], guessed: Mapping[int, int], beside: Iterable[Member]
    ) -> dict[int, tuple[str, ...]]:
        """`guessed`: whom an operator of whom nothing is known would have chosen; `beside`: agents
        that have no rank any more."""
        alive = {member.uid: member for member in ours.values()}
        found: dict[int, dict[PodUid, Member]] = {}
        for rank in ours:
            kept = [one for one in self._keepers.get(rank, ()) if one.uid in alive]
            # Another process in the pod has only what was sent since it began: it comes last.
            kept.sort(key=lambda one: one != _keeper(alive[one.uid]))
            self._keepers[rank] = kept
            found[rank] = {one.uid: alive[one.uid] for one in kept}
        for member in (*ours.values(), *beside):
            for rank in member.report.copies if member.report else ():
                found.get(rank, {})[member.uid] = member
        order = list(ours)
        for index, rank in enumerate(order if guessed else ()):
            others = [guessed[rank], *order[index + 1 :], *order[:index]][: HOLDERS_MAX + 1]
            found[rank] |= {ours[one].uid: ours[one] for one in others}
        for rank, member in ours.items():
            found[rank].pop(member.uid, None)
        return {rank: _addresses(members.values()) for rank, members in found.items()}


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


def address_of(member: Member | None) -> str:
    """`host:port` of its agent; empty: there is none yet."""
    if member is None or member.view.address is None:
        return ""
    address = member.view.address
    return f"{f'[{address}]' if ':' in address else address}:{member.view.agent_port}"
