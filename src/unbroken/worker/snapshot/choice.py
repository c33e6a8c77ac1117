"""Which step all ranks go back to, and who gives it to whom; values in, values out.

All ranks decide alike, because all decide by what all have said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.worker.typed_values import exchanged

Point = tuple[int, int]
"""Attempt and step.  A newer attempt comes first: it went on from what it could restore."""
RANGES_CHARACTERS = 500


@exchanged
@dataclass(frozen=True)
class Shares:
    """Shares that an agent has of a state that is divided among ranks."""

    world_size: int
    """World size of the ranks that saved it."""
    ranks: tuple[int, ...]


@exchanged
@dataclass(frozen=True)
class Offer:
    """Points that a rank offers."""

    points: tuple[Point, ...]
    replicas: tuple[int, ...]
    """Ranks that hold the same state as it, itself among them."""
    has_asked: bool = True
    """True if what its buddies keep is among the points."""
    shares: Mapping[Point, Shares] = field(default_factory=dict)
    """Shares of divided state that its agent has of any rank."""


def choose(offers: Sequence[Offer], bad: Collection[Point] = ()) -> Point | None:
    """The newest that every rank has, or a replica of it."""
    for point in sorted(_points(offers) - set(bad), reverse=True):
        if is_divided_otherwise(offers, point):
            if givers(offers, point):
                return point
        elif all(sources(offers, rank, point) for rank in range(len(offers))):
            return point
    return None


def is_divided_otherwise(offers: Sequence[Offer], point: Point) -> bool:
    """True if it was saved by ranks of another number than these."""
    return any(world != len(offers) for world in _worlds(offers, point))


def givers(offers: Sequence[Offer], point: Point) -> dict[int, int]:
    """For each rank that saved its share of it, a rank whose agent has that; empty: not all are
    there."""
    having: dict[int, list[int]] = {}
    for giver, offer in enumerate(offers):
        if point in offer.shares:
            for saver in offer.shares[point].ranks:
                having.setdefault(saver, []).append(giver)
    if {len(having)} != _worlds(offers, point) or max(having) >= len(having):
        return {}
    chosen = {}
    for saver, found in sorted(having.items()):
        # Shards lie in the order of ranks, before and after; ranks of one node take turns.
        likely = saver * len(offers) // len(having)
        chosen[saver] = likely if likely in found else found[saver % len(found)]
    return chosen


def lacking(offers: Sequence[Offer], point: Point) -> tuple[int, list[int]]:
    """How many ranks saved it, and which of them nobody has."""
    world = max(_worlds(offers, point))
    there = {saver for one in offers if point in one.shares for saver in one.shares[point].ranks}
    return world, [saver for saver in range(world) if saver not in there]


def _worlds(offers: Sequence[Offer], point: Point) -> set[int]:
    return {offer.shares[point].world_size for offer in offers if point in offer.shares}


def asking(offers: Sequence[Offer], bad: Collection[Point] = ()) -> list[int]:
    """Ranks that should ask the buddies now: those that lack the newest point there is; then, where
    that has given no common step, all others."""
    # Of what was divided otherwise, all that is left is in the agents of these ranks.
    known = _points(offers) - set(bad)
    newest = max((one for one in known if not is_divided_otherwise(offers, one)), default=None)
    point = choose(offers, bad)
    if point is not None and (newest is None or point >= newest):
        return []
    everybody = range(len(offers))
    poorer = [one for one in everybody if newest is None or not sources(offers, one, newest)]
    silent = [one for one in poorer if not offers[one].has_asked]
    if silent or point is not None:
        return silent
    return [one for one in everybody if not offers[one].has_asked]


def sources(offers: Sequence[Offer], rank: int, point: Point) -> list[int]:
    """Ranks that can give a point to a rank: the rank itself, if it has it."""
    if point in offers[rank].points:
        return [rank]
    # Both must say so: a rank that is declared on one side alone may hold something else.
    return [
        other
        for other in offers[rank].replicas
        if rank in offers[other].replicas and point in offers[other].points
    ]


def transfers(offers: Sequence[Offer], point: Point) -> list[tuple[int, int]]:
    """Pairs of sender and receiver, in the order in which all carry it out; senders take turns."""
    found: list[tuple[int, int]] = []
    for rank in range(len(offers)):
        givers = sources(offers, rank, point)
        if givers != [rank]:
            found.append((givers[len(found) % len(givers)], rank))
    return found


def ranges(ranks: Iterable[int]) -> str:
    """As `0-2,5`; empty where it is one alone."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return ""
    text = ",".join(str(one) if one == other else f"{one}-{other}" for one, other in spans)
    return text if len(text) <= RANGES_CHARACTERS else text[:RANGES_CHARACTERS] + "..."


def _points(offers: Sequence[Offer]) -> set[Point]:
    return {point for offer in offers for point in (*offer.points, *offer.shares)}
