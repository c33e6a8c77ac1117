"""What the results of a check amount to: who is at fault, and why.  Pure.

Unknown never makes a fault.  A test of one node speaks for itself; pairs and training runs are
compared over nodes first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from unbroken.spec.node_check import CheckKind, CheckPhase, CheckResult, NodeCheckSpec, Outcome

from .check_plan import Edge, Link, edge, judge

SLOW_SHARE = 0.5
"""Of the usual bandwidth of the pairs: a link below it is bad.  HyperPod's own example is stricter:
30 GB/s where 80 are asked for (reference section 2.5)."""
LATENCY_TIMES, LATENCY_LEAST = 10.0, 2000.0
"""A link whose latency is so many times the usual and above so many microseconds is bad: less than
that a busy machine does by itself (judgement)."""
PAIRS_LEAST = 2
"""Fewer say nothing about what is usual."""
MAJORITY_LEAST = 3
"""Nodes that ran the same training: of two that disagree either may be right."""
RESULTS_MAX = 4000
"""Of about 200 bytes each: etcd takes objects of 1.5 MiB (its `--max-request-bytes`)."""
RUN = "run"
"""Name of the result that says why tests could not be made, or not to their end."""
SUM, BANDWIDTH, LATENCY = "all-reduce", "all-reduce-bandwidth", "all-reduce-latency"
CONNECTIVITY, TRAINING = "connectivity", "training-compared"
TRAINED = re.compile(r"loss=(\S+) weights=(\S+) (torch=\S+ cpu=[^\s;]+)")
"""What `nodes/checks/training` says of a run."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of one pair; None: nothing."""

    is_right: bool | None = None
    """Whether the two could sum, and did so rightly."""
    bandwidth: float | None = None
    """GB/s, the lesser of what both measured."""
    latency: float | None = None
    """Microseconds, the greater."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What pairs must reach; None: not known."""

    bandwidth: float | None = None
    latency: float | None = None


def measured_pairs(results: Iterable[CheckResult]) -> dict[Edge, Measured]:
    """What both ends of each pair said, put together."""
    said: dict[Edge, list[CheckResult]] = {}
    for one in results:
        if one.kind is CheckKind.CONNECTIVITY and one.peer:
            said.setdefault(edge(one.node, one.peer), []).append(one)
    return {pair: _measured(found) for pair, found in said.items()}


def _measured(said: Sequence[CheckResult]) -> Measured:
    sums = [one.outcome for one in said if one.test == SUM]
    if any(one.test == RUN for one in said) or not sums or Outcome.UNKNOWN in sums:
        return Measured()
    if Outcome.FAIL in sums:
        return Measured(is_right=False)
    speeds = [one.measured for one in said if one.test == BANDWIDTH and one.measured is not None]
    delays = [one.measured for one in said if one.test == LATENCY and one.measured is not None]
    return Measured(True, min(speeds, default=None), max(delays, default=None))


def usual(pairs: Mapping[Edge, Measured]) -> Limits:
    """Limits learned from the pairs themselves: most nodes of a cluster are good.

    What counts of each node is the best that it has shown: a bad one that meets several others
    would else make its own slowness usual.  Of an even number of nodes the better of the two in
    the middle counts: one bad pair of two is found.
    """
    speeds: dict[str, float] = {}
    delays: dict[str, float] = {}
    found = {pair: one for pair, one in pairs.items() if one.is_right}
    for pair, one in found.items():
        for node in pair:
            speeds[node] = max(speeds.get(node, 0.0), one.bandwidth or 0.0)
            delays[node] = min(delays.get(node, inf), inf if one.latency is None else one.latency)
    if len(found) < PAIRS_LEAST:
        return Limits()
    bandwidth = sorted(speeds.values())[len(speeds) // 2] * SLOW_SHARE
    latency = sorted(delays.values())[(len(delays) - 1) // 2] * LATENCY_TIMES
    is_known = latency < inf
    return Limits(round(bandwidth, 4), max(latency, LATENCY_LEAST) if is_known else None)


def link_of(one: Measured, limits: Limits) -> Link:
    """Whether a pair is as it should be."""
    if one.is_right is None:
        return Link.UNKNOWN
    is_slow = limits.bandwidth is not None and (one.bandwidth or 0.0) < limits.bandwidth
    is_late = limits.latency is not None and (one.latency or 0.0) > limits.latency
    return Link.BAD if not one.is_right or is_slow or is_late else Link.GOOD


def links(results: Iterable[CheckResult]) -> dict[Edge, Link]:
    """How each pair did that was tested, by what is usual among them."""
    pairs = measured_pairs(results)
    limits = usual(pairs)
    return {pair: link_of(one, limits) for pair, one in pairs.items()}


def compare_pairs(nodes: Iterable[str], results: Sequence[CheckResult]) -> list[CheckResult]:
    """A result of each node that took part in pairs: who is proven good, who is bad."""
    pairs = measured_pairs(results)
    limits = usual(pairs)
    states = {pair: link_of(one, limits) for pair, one in pairs.items()}
    verdict = judge(nodes, states)
    found = []
    for node in sorted({name for pair in pairs for name in pair} & set(nodes)):
        mine = {pair: one for pair, one in pairs.items() if node in pair}
        broken = [pair for pair in mine if states[pair] is Link.BAD]
        text = "; ".join(_trouble(node, pair, pairs[pair], limits) for pair in sorted(broken))
        best = max((one.bandwidth or 0.0 for one in mine.values()), default=0.0)
        if node in verdict.bad:
            outcome = Outcome.FAIL
        elif node in verdict.good:
            outcome, text = Outcome.PASS, "works with other nodes"
        else:
            outcome = Outcome.UNKNOWN
            text = f"{text}; no node is proven good, so either may be at fault" if text else ""
        amount = (best, limits.bandwidth, "GB/s") if best else (None, None, "")
        found.append(
            CheckResult(node, CheckKind.CONNECTIVITY, CONNECTIVITY, outcome, 0.0, text, *amount)
        )
    return found


def _trouble(node: str, pair: Edge, one: Measured, limits: Limits) -> str:
    other = pair[0] if pair[1] == node else pair[1]
    if not one.is_right:
        return f"with {other}: no connection, or sums that are wrong"
    if limits.bandwidth is not None and (one.bandwidth or 0.0) < limits.bandwidth:
        return f"with {other}: {one.bandwidth} GB/s, expected {limits.bandwidth}"
    return f"with {other}: {one.latency} us, expected at most {limits.latency}"


def compare_training(results: Iterable[CheckResult]) -> list[CheckResult]:
    """A result of each node whose run can be compared with those of others, bit for bit."""
    runs: dict[str, dict[str, str]] = {}
    for one in results:
        said = TRAINED.search(one.message)
        if one.kind is CheckKind.TRAINING and one.outcome is Outcome.PASS and said is not None:
            runs.setdefault(said[3], {})[one.node] = f"loss {said[1]}, weights {said[2]}"
    found = []
    for alike in runs.values():
        ((most, count),) = Counter(alike.values()).most_common(1)
        is_clear = count == len(alike) or (len(alike) >= MAJORITY_LEAST and 2 * count > len(alike))
        for node, got in sorted(alike.items()):
            found.append(_compared(node, got, most if is_clear else None, len(alike)))
    return found


def _compared(node: str, got: str, most: str | None, count: int) -> CheckResult:
    if most is None:
        outcome = Outcome.UNKNOWN
        text = f"{got}: the nodes disagree and none has a majority; test them with a third"
    elif got != most:
        outcome, text = Outcome.FAIL, f"{got}, expected {most} as of most of {count} nodes"
    elif count == 1:
        outcome, text = Outcome.UNKNOWN, "no other node here has this torch and these instructions"
    else:
        outcome, text = Outcome.PASS, f"the same bits on {count} nodes"
    return CheckResult(node, CheckKind.TRAINING, TRAINING, outcome, 0.0, text)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a check has found."""

    phase: CheckPhase
    message: str
    results: tuple[CheckResult, ...]
    faulty: tuple[str, ...]
    standing: Mapping[str, CheckPhase]
    """Of each node: PASSED, FAILED, or UNKNOWN where it could not be tested."""


def conclude(spec: NodeCheckSpec, results: Sequence[CheckResult]) -> Conclusion:
    """Everything that the results amount to.  To be asked once, when the last test has ended."""
    compared = [*results, *compare_pairs(spec.nodes, results), *compare_training(results)]
    if CheckKind.CONNECTIVITY in spec.kinds and not any(one.peer for one in results):
        compared += [_alone(node) for node in spec.nodes]
    final = tuple(_own(one) for one in compared)
    standing = {node: _standing(node, final) for node in spec.nodes}
    faulty = tuple(node for node in spec.nodes if standing[node] is CheckPhase.FAILED)
    unknown = [node for node in spec.nodes if standing[node] is CheckPhase.UNKNOWN]
    if faulty:
        phase, text = CheckPhase.FAILED, f"at fault: {', '.join(faulty)}"
    elif unknown:
        phase, text = CheckPhase.UNKNOWN, f"could not be judged: {', '.join(unknown)}"
    else:
        phase, text = CheckPhase.PASSED, f"{len(spec.nodes)} node(s) without a fault"
    return Conclusion(phase, text, final, faulty, standing)


def _alone(node: str) -> CheckResult:
    text = "needs two nodes that can be tested"
    return CheckResult(node, CheckKind.CONNECTIVITY, SUM, Outcome.UNKNOWN, 0.0, text)


def _own(one: CheckResult) -> CheckResult:
    """A failed pair is no fault of either node by itself."""
    is_pair = one.kind is CheckKind.CONNECTIVITY and one.peer
    return replace(one, outcome=Outcome.UNKNOWN) if is_pair and one.outcome is Outcome.FAIL else one


def _standing(node: str, results: Iterable[CheckResult]) -> CheckPhase:
    mine = [one for one in results if one.node == node]
    if any(one.outcome is Outcome.FAIL for one in mine):
        return CheckPhase.FAILED
    if not any(one.outcome is Outcome.PASS for one in mine):
        return CheckPhase.UNKNOWN
    was_stopped = any(one.test == RUN and not one.peer for one in mine)
    is_open = any(one.test == CONNECTIVITY and one.outcome is Outcome.UNKNOWN for one in mine)
    disagrees = any(
        one.test == TRAINING and one.outcome is Outcome.UNKNOWN and "disagree" in one.message
        for one in mine
    )
    return CheckPhase.UNKNOWN if was_stopped or is_open or disagrees else CheckPhase.PASSED


def compact(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """The results, or what must be kept of them where an object of the API cannot hold all.

    Of the tests of one node that found nothing the first of each kind stays; all else is needed to
    go on.
    """
    if len(results) <= RESULTS_MAX:
        return tuple(results)
    kept: list[CheckResult] = []
    seen: set[tuple[str, CheckKind]] = set()
    for one in results:
        is_dull = one.kind in (CheckKind.BASIC, CheckKind.STRESS) and one.test != RUN
        if is_dull and one.outcome is not Outcome.FAIL and (one.node, one.kind) in seen:
            continue
        seen.add((one.node, one.kind))
        kept.append(one)
    return tuple(kept)


def faults_of(node: str, results: Iterable[CheckResult]) -> list[CheckResult]:
    """The failed tests of a node."""
    return [one for one in results if one.node == node and one.outcome is Outcome.FAIL]
