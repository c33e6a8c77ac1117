"""Choice of the step that all ranks return to, and of the ranks that send it; values in, values
out.

All ranks decide alike, because all decide by the reports of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.worker.typed_values import exchanged

Point = tuple[int, int]
"""Attempt and step. A newer attempt comes first: it continued from what it could restore."""
RANGES_CHARACTERS = 500


@exchanged
@dataclass(frozen=True)
class Shares:
    """Shares of a divided state that an agent has."""

    world_size: int
    """World size of the ranks that saved it."""
    ranks: tuple[int, ...]


@exchanged
@dataclass(frozen=True)
class Offer:
    """Points that a rank offers."""

    points: tuple[Point, ...]
    replicas: tuple[int, ...]
    """Ranks that hold the same state, itself among them."""
    has_asked: bool = True
    """True if the copies at its buddies are among the points."""
    shares: Mapping[Point, Shares] = field(default_factory=dict)
    """Shares of divided state, of any rank, that its agent has."""
    is_declared: bool = False
    """True if the script says which ranks are replicas; False: it is assumed of all, as nothing is
    sharded."""
    checksums: Mapping[Point, str] = field(default_factory=dict)
    """Checksums of its points, without each rank's own values, as far as they are known."""


def choose(offers: Sequence[Offer], bad: Collection[Point] = ()) -> Point | None:
    """Return the newest point that every rank, or a replica of it, has."""
    for point in sorted(_points(offers) - set(bad), reverse=True):
        if is_divided_otherwise(offers, point):
            if givers(offers, point):
                return point
        elif all(sources(offers, rank, point) for rank in range(len(offers))):
            return point
    return None


def is_divided_otherwise(offers: Sequence[Offer], point: Point) -> bool:
    """True if the point was saved by a different number of ranks."""
    return any(world != len(offers) for world in _worlds(offers, point))


def givers(offers: Sequence[Offer], point: Point) -> dict[int, int]:
    """Return, for each rank that saved its share, a rank whose agent has that share; empty: some
    are missing."""
    having: dict[int, list[int]] = {}
    for giver, offer in enumerate(offers):
        if point in offer.shares:
            for saver in offer.shares[point].ranks:
                having.setdefault(saver, []).append(giver)
    if {len(having)} != _worlds(offers, point) or max(having) >= len(having):
        return {}
    chosen = {}
    for saver, result in sorted(having.items()):
        # Shards lie in the order of ranks, before and after; ranks of one node take turns.
        likely = saver * len(offers) // len(having)
        chosen[saver] = likely if likely in result else result[saver % len(result)]
    return chosen


def lacking(offers: Sequence[Offer], point: Point) -> tuple[int, list[int]]:
    """Return the number of ranks that saved the point, and the ranks whose share is missing
    everywhere."""
    world = max(_worlds(offers, point))
    there = {
        saver for offer in offers if point in offer.shares for saver in offer.shares[point].ranks
    }
    return world, [saver for saver in range(world) if saver not in there]


def _worlds(offers: Sequence[Offer], point: Point) -> set[int]:
    return {offer.shares[point].world_size for offer in offers if point in offer.shares}


def asking(offers: Sequence[Offer], bad: Collection[Point] = ()) -> list[int]:
    """Return ranks that should ask the buddies now.

    First the ranks that lack the newest point anywhere, or would get it from ranks of which nobody
    has declared that they hold the same: a buddy has exactly what was lost. Then, if that has given
    no common step, all others.
    """
    # All remaining shares of other divisions are in the agents of these ranks.
    known = _points(offers) - set(bad)
    newest = max((one for one in known if not is_divided_otherwise(offers, one)), default=None)
    point = choose(offers, bad)
    everybody = range(len(offers))
    if point is not None and (newest is None or point >= newest):
        if is_divided_otherwise(offers, point):
            return []
        return [
            rank
            for rank in everybody
            if point not in offers[rank].points
            and not (offers[rank].has_asked or offers[rank].is_declared)
        ]
    poorer = [one for one in everybody if newest is None or not sources(offers, one, newest)]
    silent = [one for one in poorer if not offers[one].has_asked]
    if silent or point is not None:
        return silent
    return [one for one in everybody if not offers[one].has_asked]


def sources(offers: Sequence[Offer], rank: int, point: Point) -> list[int]:
    """Return the ranks that can send a point to a rank: the rank itself, if it has it."""
    if point in offers[rank].points:
        return [rank]
    # Both must declare it: a rank that is declared on one side alone may hold something else.
    found = [
        other
        for other in offers[rank].replicas
        if rank in offers[other].replicas and point in offers[other].points
    ]
    return [] if differing(offers, found, point) else found


def differing(offers: Sequence[Offer], ranks: Iterable[int], point: Point) -> list[int]:
    """Return the ranks that have a point, if not all have the same: then none can replace the state
    of another. Empty: all have the same, or the script has declared it."""
    having = [one for one in ranks if point in offers[one].points and not offers[one].is_declared]
    known = {offers[one].checksums.get(point, "") for one in having} - {""}
    return having if len(known) > 1 else []


def transfers(offers: Sequence[Offer], point: Point) -> list[tuple[int, int]]:
    """Return pairs of sender and receiver, in the order in which all carry it out; senders take
    turns."""
    result: list[tuple[int, int]] = []
    for rank in range(len(offers)):
        givers = sources(offers, rank, point)
        if givers != [rank]:
            result.append((givers[len(result) % len(givers)], rank))
    return result


def ranges(ranks: Iterable[int]) -> str:
    """Return ranges such as `0-2,5`; empty if it is a single one."""
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
