"""The next tests of a check, and their nodes, from the results so far. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unbroken.spec.nodes.check import CheckKind, CheckResult, NodeCheckSpec, Outcome

from .inside import compare_devices
from .limits import RUN, Fleet, limits_of, links, measured_pairs
from .plan import next_pairs


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """Tests of one kind on one node, or on two nodes that meet."""

    nodes: tuple[str, ...]
    kind: CheckKind

    @property
    def is_pair(self) -> bool:
        """True if two nodes meet."""
        return len(self.nodes) == 2


def next_steps(
    spec: NodeCheckSpec, results: Sequence[CheckResult], running: Collection[Step], fleet: Fleet
) -> list[Step]:
    """Return steps that may begin now, at most one per node; none if nothing may begin or all is
    done.

    A node that is found at fault is not tested further. Pairs come last, when all nodes are ready.
    """
    done = {(result.node, result.kind) for result in results if not result.peer}
    bad = {result.node for result in results if result.outcome is Outcome.FAIL and not result.peer}
    busy = {node for step in running for node in step.nodes}
    alone = [kind for kind in spec.kinds if kind is not CheckKind.CONNECTIVITY]
    wanted = []
    for node in spec.nodes:
        left = [kind for kind in alone if (node, kind) not in done]
        if node not in bad and left and node not in busy:
            wanted.append(Step((node,), left[0]))
    is_open = any(
        (node, kind) not in done for node in spec.nodes if node not in bad for kind in alone
    )
    if wanted or is_open or busy or CheckKind.CONNECTIVITY not in spec.kinds:
        return wanted
    compared = compare_devices(results, fleet)
    bad |= {result.node for result in compared if result.outcome is Outcome.FAIL}
    return _pairs(spec, results, bad, fleet)


def _pairs(
    spec: NodeCheckSpec, results: Sequence[CheckResult], bad: Collection[str], fleet: Fleet
) -> list[Step]:
    # A node that could not be tested alone cannot meet another either.
    lost = {result.node for result in results if result.test == RUN and not result.peer}
    fit = [node for node in spec.nodes if node not in bad and node not in lost]
    if len(fit) < 2:
        return []
    pairs = measured_pairs(results)
    tested = links(pairs, limits_of(pairs, fleet))
    return [Step(pair, CheckKind.CONNECTIVITY) for pair in next_pairs(fit, tested, fleet.types)]


def total_steps(spec: NodeCheckSpec) -> int:
    """Return the number of steps in all, if no pair has to be repeated."""
    alone = sum(kind is not CheckKind.CONNECTIVITY for kind in spec.kinds)
    pairs = len(spec.nodes) // 2 if CheckKind.CONNECTIVITY in spec.kinds else 0
    return alone * len(spec.nodes) + pairs


def steps_done(results: Sequence[CheckResult]) -> int:
    """Return the number of steps with results."""
    alone = {(result.node, result.kind) for result in results if not result.peer}
    return len(alone) + len(
        {frozenset((result.node, result.peer)) for result in results if result.peer}
    )
