"""Choice of the pairs of nodes to test, so that a bad node is found without knowing a good one.
Pure.

A pair that works proves both of its nodes good. In the first round all nodes meet in pairs. Then
each node of a failed pair meets one that is proven good; only a node that fails again is bad. With
fewer bad nodes than half, a good pair is always found. Without a good pair no node is named: the
network, or the limit itself, is then at fault.

Nodes meet nodes of their own instance type if possible: a link is as slow as its slower end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

NodePair = tuple[str, str]
TWICE = 2
"""Failed pairs that prove a node bad, one of them with a node proven good: a single one may be due
to the link."""
TRIES = 2
"""Failed attempts to test a node in a pair, before it is left alone."""


class Link(Enum):
    """The result of a pair's test for one of its nodes."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"
    """The link could not be tested, or the other node may be the slow one."""


Tested = Mapping[NodePair, Link]
"""Results by (node, other): both orders of each pair that was tested."""


@dataclass(frozen=True, slots=True)
class PairsVerdict:
    """The verdict on the pairs."""

    good: frozenset[str]
    bad: frozenset[str]
    open: frozenset[str]
    """Nodes without a verdict."""


def edge(one: str, other: str) -> NodePair:
    """Return the pair of two nodes, in either order."""
    return (one, other) if one < other else (other, one)


def judge_pairs(nodes: Iterable[str], tested: Tested) -> PairsVerdict:
    """Return the nodes that are proven good, those that are bad, and those without a verdict."""
    everybody = frozenset(nodes)
    good = everybody & {node for (node, _), link in tested.items() if link is Link.GOOD}
    failed: dict[str, set[str]] = {name: set() for name in everybody - good}
    for (node, partner), link in tested.items():
        if link is Link.BAD and node in failed:
            failed[node].add(partner)
    bad = frozenset(
        node for node, partners in failed.items() if partners & good and len(partners) >= TWICE
    )
    return PairsVerdict(good, bad, everybody - good - bad)


def next_pairs(
    nodes: Iterable[str], tested: Tested, types: Mapping[str, str] | None = None
) -> list[NodePair]:
    """Return pairs to test at the same time now; none: no test would help.

    `types`: the instance type of each node, if known. Each node is in at most one pair: two tests
    at once would slow each other down.
    """
    names, kinds = sorted(set(nodes)), types or {}
    alike, mixed = _first(names, kinds)
    if not tested:
        return alike or mixed
    verdict = judge_pairs(names, tested)
    if verdict.good:
        return _meet(sorted(verdict.open), sorted(verdict.good), tested, kinds)
    if not any(pair in tested for pair in mixed):
        return mixed or _search(names, alike, tested)
    return _search(names, alike + mixed, tested)


def _first(names: Sequence[str], types: Mapping[str, str]) -> tuple[list[NodePair], list[NodePair]]:
    """Return pairs within each instance type, and pairs of the remaining nodes."""
    alike: list[NodePair] = []
    left: list[str] = []
    for _, group in groupby(sorted(names, key=lambda one: (types.get(one, ""), one)), types.get):
        members = list(group)
        alike += _by_twos(members)
        left += members[len(members) // 2 * 2 :]
    return alike, _by_twos(left)


def _by_twos(names: Sequence[str]) -> list[NodePair]:
    return [edge(one, other) for one, other in zip(names[::2], names[1::2], strict=False)]


def _search(names: Sequence[str], first: Sequence[NodePair], tested: Tested) -> list[NodePair]:
    """Return a pair that may be good, if the first rounds had none.

    If fewer than half of the nodes are bad, each failed pair has one bad node and one good. The
    node that was left over is then good, and works with one node of the first pair.
    """
    broken = [pair for pair in first if tested.get(pair) is Link.BAD]
    met = {node for pair in first for node in pair}
    left = [node for node in names if node not in met]
    if not left or not broken:
        return []
    return [pair for node in broken[0] if (pair := edge(left[0], node)) not in tested][:1]


def _meet(
    suspects: Sequence[str], good: Sequence[str], tested: Tested, types: Mapping[str, str]
) -> list[NodePair]:
    """Pair each suspect with a good node that it has not met, as far as good nodes are available.

    A good node of its own type is preferred, even if it has to be waited for.
    """
    tries = Counter(node for (node, _), link in tested.items() if link is Link.UNKNOWN)
    free = dict.fromkeys(good)
    alike: dict[str | None, list[str]] = {}
    for one in good:
        alike.setdefault(types.get(one), []).append(one)
    pairs = []
    for suspect in suspects:
        if tries[suspect] >= TRIES:
            continue
        own = [one for one in alike.get(types.get(suspect), ()) if (suspect, one) not in tested]
        partner = next(
            (one for one in own or free if one in free and (suspect, one) not in tested), None
        )
        if partner is not None:
            del free[partner]
            pairs.append(edge(suspect, partner))
    return pairs
