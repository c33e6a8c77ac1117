"""The links that node checks have measured, as a matrix of bounded size.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unbroken.core.nodes.checks.plan import Measured, measured_pairs
from unbroken.spec.nodes.kinds import CheckResult

NODES_MAX = 64
"""Nodes of a matrix: those with the slowest links."""
PAIRS_MAX = 100
"""Pairs of the table, the slowest first."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes whose link was measured last."""

    one: str
    other: str
    measured: Measured

    @property
    def speed(self) -> float:
        """GB/s; 0: no connection, or sums that were wrong."""
        return self.measured.bandwidth or 0.0


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """All measured links, and those that are shown."""

    pairs: tuple[Pair, ...] = ()
    """The slowest first."""
    nodes: tuple[str, ...] = ()
    """Nodes of the matrix, by name."""
    nodes_all: int = 0


def link_matrix(checks: Iterable[Iterable[CheckResult]]) -> LinkMatrix:
    """Return the newest measurement of each pair. `checks`: the oldest first."""
    newest: dict[tuple[str, str], Measured] = {}
    for results in checks:
        for pair, seen in measured_pairs(results).items():
            if seen.is_right is not None:
                one, other = sorted(pair)
                newest[one, other] = seen
    pairs = sorted((Pair(*pair, seen) for pair, seen in newest.items()), key=_slowest_first)
    names = dict.fromkeys(name for pair in pairs for name in (pair.one, pair.other))
    return LinkMatrix(tuple(pairs), tuple(sorted([*names][:NODES_MAX])), len(names))


def _slowest_first(pair: Pair) -> tuple[float, str, str]:
    return pair.speed, pair.one, pair.other


def speeds(found: LinkMatrix) -> list[list[float | None]]:
    """Rows and columns of the matrix in GB/s; None: the pair was not measured."""
    index: Mapping[str, int] = {name: number for number, name in enumerate(found.nodes)}
    rows: list[list[float | None]] = [[None] * len(found.nodes) for _ in found.nodes]
    for pair in found.pairs:
        if pair.one in index and pair.other in index:
            one, other = index[pair.one], index[pair.other]
            rows[one][other] = rows[other][one] = round(pair.speed, 4)
    return rows
