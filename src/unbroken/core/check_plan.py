"""Which nodes are to meet which, so that a bad one is named without knowing a good one.  Pure.

A pair that works proves both of its nodes good.  In the first round all nodes meet in pairs; then
each node of a pair that did not work meets one that is proven good: only a node that fails again
is bad.  With fewer bad nodes than half of all a good pair is always found; without one
nobody is named, for then the network, or what was expected of it, is at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Edge = tuple[str, str]
TWICE = 2
"""A bad node fails with so many others, one of them proven good: one alone may be the link's."""
TRIES = 2
"""Pairs of a node that could not be tested, before it is left alone."""


class Link(Enum):
    """How a pair did."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"
    """It could not be tested: nothing is known of either because of it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the pairs have shown."""

    good: frozenset[str]
    bad: frozenset[str]
    open: frozenset[str]
    """Nothing can be said of these."""


def edge(one: str, other: str) -> Edge:
    """The pair of two nodes, whoever is named first."""
    return (one, other) if one < other else (other, one)


def judge(nodes: Iterable[str], tested: Mapping[Edge, Link]) -> Verdict:
    """Who is proven good, who is bad, and of whom nothing is known."""
    everybody = frozenset(nodes)
    good = everybody & {node for pair, link in tested.items() if link is Link.GOOD for node in pair}
    failed: dict[str, set[str]] = {name: set() for name in everybody - good}
    for (one, other), link in tested.items():
        if link is Link.BAD:
            for node, partner in ((one, other), (other, one)):
                if node in failed:
                    failed[node].add(partner)
    bad = frozenset(
        node for node, partners in failed.items() if partners & good and len(partners) >= TWICE
    )
    return Verdict(good, bad, everybody - good - bad)


def next_pairs(nodes: Iterable[str], tested: Mapping[Edge, Link]) -> list[Edge]:
    """Pairs to test at the same time now; none: there is nothing more to learn.

    Each node is in one pair at most: two tests at once would slow each other down.
    """
    names = sorted(set(nodes))
    first = [edge(one, other) for one, other in zip(names[::2], names[1::2], strict=False)]
    if not tested:
        return first
    verdict = judge(names, tested)
    if verdict.good:
        return _meet(sorted(verdict.open), sorted(verdict.good), tested)
    return _search(names, first, tested)


def _search(names: Sequence[str], first: Sequence[Edge], tested: Mapping[Edge, Link]) -> list[Edge]:
    """Look for a good pair where the first round had none.

    If fewer than half of the nodes are bad, each of these pairs has one bad node and one good, and
    the node that was left over is good: it works with one of the first pair.
    """
    broken = [pair for pair in first if tested.get(pair) is Link.BAD]
    if len(names) % 2 == 0 or not broken:
        return []
    left = names[-1]
    return [edge(left, node) for node in broken[0] if edge(left, node) not in tested][:1]


def _meet(suspects: Sequence[str], good: Sequence[str], tested: Mapping[Edge, Link]) -> list[Edge]:
    """Each suspect with a good node that it has not met, as many as there are good ones."""
    free, pairs = list(good), []
    for suspect in suspects:
        tries = [link for pair, link in tested.items() if suspect in pair]
        if tries.count(Link.UNKNOWN) >= TRIES:
            continue
        partner = next((one for one in free if edge(suspect, one) not in tested), None)
        if partner is not None:
            free.remove(partner)
            pairs.append(edge(suspect, partner))
    return pairs
