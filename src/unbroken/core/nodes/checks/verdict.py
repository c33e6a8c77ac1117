"""Verdict of a check: the nodes at fault, and the reason. Pure.

Unknown is never a fault. A test of one node is evaluated alone; pairs and training runs are
compared over nodes first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unbroken.spec.nodes.kinds import CheckKind, CheckPhase, CheckResult, NodeCheckSpec, Outcome

from .plan import (
    BANDWIDTH,
    DEVICE_BANDWIDTH,
    GPU_PRODUCT,
    RUN,
    SUM,
    Fleet,
    Link,
    LinkLimits,
    Measured,
    best_of,
    compare_devices,
    edge,
    judge_pairs,
    limits_of,
    links,
    measured_pairs,
)

MAJORITY_LEAST = 3
"""Nodes that must have run the same training: with only two that disagree, the faulty one cannot be
identified."""
REASONS_MAX = 3
"""Reasons that the message of a check names for nodes that could not be judged."""
RESULTS_MAX = 4000
"""Largest number of results, of about 200 bytes each: etcd takes objects of 1.5 MiB (its
`--max-request-bytes`)."""
CONNECTIVITY, TRAINING = "connectivity", "training-compared"
TRAINED = re.compile(r"loss=(\S+) weights=(\S+) (torch=\S+ cpu=[^\s;]+)")
"""Form of the result that `nodes/checks/training` writes for a run."""


def compare_pairs(
    nodes: Iterable[str], results: Sequence[CheckResult], fleet: Fleet
) -> list[CheckResult]:
    """Return a result for each node that took part in pairs: proven good, or bad."""
    pairs = measured_pairs(results)
    limits = limits_of(pairs, fleet)
    states = links(pairs, limits)
    verdict = judge_pairs(nodes, states)
    best = best_of(pairs)
    met: dict[str, dict[str, Measured]] = {}
    for node, other in sorted(states):
        met.setdefault(node, {})[other] = pairs[edge(node, other)]
    check_results = []
    for node in sorted(met.keys() & set(nodes)):
        seen = met[node]
        broken = [other for other in seen if states[node, other] is Link.BAD]
        text = "; ".join(_trouble(node, other, seen[other], limits) for other in broken)
        test = CONNECTIVITY
        if node in verdict.bad:
            outcome = Outcome.FAIL
        elif node in verdict.good:
            outcome, text = Outcome.PASS, "works with other nodes"
        else:
            outcome = Outcome.UNKNOWN
            if broken:
                text += "; no node is proven good, so either may be at fault"
            elif waited := [one for one in seen if limits.waited(node, one, seen[one])]:
                text = _trouble(node, waited[0], seen[waited[0]], limits)
                text += "; no processor was free for long: test again when both nodes are idle"
            elif right := [other for other in seen if seen[other].is_right]:
                # No node of its type was available, so this is the best possible verdict: the node
                # passes.
                test, text = BANDWIDTH, _trouble(node, right[0], seen[right[0]], limits)
                text += "; nothing is known of what that one's type can"
        speed = best.get(node)
        amount = (speed, limits.of(node), "GB/s") if speed else (None, None, "")
        check_results.append(
            CheckResult(node, CheckKind.CONNECTIVITY, test, outcome, 0.0, text, *amount)
        )
    return check_results


def _trouble(node: str, other: str, seen: Measured, limits: LinkLimits) -> str:
    if not seen.is_right:
        return f"with {other}: no connection, or sums that are wrong"
    if seen.slow:
        return f"with {other}: {seen.slow}"
    if limits.is_late(seen):
        return f"with {other}: {seen.latency} us, expected at most {limits.latency}"
    return f"with {other}: {seen.bandwidth} GB/s, expected {limits.of_pair(node, other)}"


def compare_training(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Return a result for each node whose run can be compared with runs of others, bit for bit."""
    runs: dict[str, dict[str, str]] = {}
    for result in results:
        said = TRAINED.search(result.message)
        if (
            result.kind is CheckKind.TRAINING
            and result.outcome is Outcome.PASS
            and said is not None
        ):
            runs.setdefault(said[3], {})[result.node] = f"loss {said[1]}, weights {said[2]}"
    check_results = []
    for alike in runs.values():
        ((most, count),) = Counter(alike.values()).most_common(1)
        is_clear = count == len(alike) or (len(alike) >= MAJORITY_LEAST and 2 * count > len(alike))
        for node, got in sorted(alike.items()):
            check_results.append(_compared(node, got, most if is_clear else None, len(alike)))
    return check_results


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
    """The conclusion of a check."""

    phase: CheckPhase
    message: str
    results: tuple[CheckResult, ...]
    faulty: tuple[str, ...]
    doubts: Mapping[str, str]
    """Nodes that could not be judged, with the reason of each."""

    def verdict(self, node: str) -> CheckPhase:
        """Return PASSED, FAILED, or UNKNOWN for a node that could not be judged."""
        if node in self.faulty:
            return CheckPhase.FAILED
        return CheckPhase.UNKNOWN if node in self.doubts else CheckPhase.PASSED


def conclude(spec: NodeCheckSpec, results: Sequence[CheckResult], fleet: Fleet) -> Conclusion:
    """Return the conclusion from all results. Call it once, when the last test has ended."""
    compared = [
        *results,
        *compare_devices(results, fleet),
        *compare_pairs(spec.nodes, results, fleet),
        *compare_training(results),
    ]
    if CheckKind.CONNECTIVITY in spec.kinds and not any(result.peer for result in results):
        compared += [_alone(node) for node in spec.nodes]
    final = tuple(_own(check_result) for check_result in compared)
    mine = {node: [result for result in final if result.node == node] for node in spec.nodes}
    faulty = tuple(
        node for node, own in mine.items() if any(result.outcome is Outcome.FAIL for result in own)
    )
    doubts = {node: why for node, own in mine.items() if node not in faulty if (why := _doubt(own))}
    phase, texts = CheckPhase.PASSED, []
    if faulty:
        phase, texts = CheckPhase.FAILED, [f"at fault: {', '.join(faulty)}"]
    if doubts:
        phase = phase if faulty else CheckPhase.UNKNOWN
        texts.append(_unjudged(doubts))
    text = "; ".join(texts) or f"{len(spec.nodes)} node(s) without a fault"
    return Conclusion(phase, text, final, faulty, doubts)


def _alone(node: str) -> CheckResult:
    text = "needs two nodes that can be tested"
    return CheckResult(node, CheckKind.CONNECTIVITY, SUM, Outcome.UNKNOWN, 0.0, text)


def _own(check_result: CheckResult) -> CheckResult:
    """Return the node's own results. A failed pair is not a fault of either node by itself."""
    is_pair = check_result.kind is CheckKind.CONNECTIVITY and check_result.peer
    return (
        replace(check_result, outcome=Outcome.UNKNOWN)
        if is_pair and check_result.outcome is Outcome.FAIL
        else check_result
    )


def _doubt(mine: Sequence[CheckResult]) -> str:
    """Return why a node without failures cannot be judged; empty: it passes."""
    for result in mine:
        is_unknown = result.outcome is Outcome.UNKNOWN
        was_stopped = result.test == RUN and not result.peer
        disagrees = is_unknown and result.test == TRAINING and "disagree" in result.message
        # It has GPUs, and what passed says nothing about them.
        has_untested_gpus = is_unknown and result.test == GPU_PRODUCT
        is_open = is_unknown and result.test == CONNECTIVITY
        if was_stopped or disagrees or has_untested_gpus or is_open:
            return result.message or f"{result.test} is unknown"
    if any(result.outcome is Outcome.PASS for result in mine):
        return ""
    return next(filter(None, (result.message for result in mine)), "no test could be made")


def _unjudged(doubts: Mapping[str, str]) -> str:
    """Return the nodes that could not be judged, in groups with the reason of each."""
    groups: dict[str, list[str]] = {}
    for node, why in doubts.items():
        groups.setdefault(why, []).append(node)
    texts = [f"{', '.join(nodes)} ({why})" for why, nodes in list(groups.items())[:REASONS_MAX]]
    texts += [", ".join(nodes) for nodes in list(groups.values())[REASONS_MAX:]]
    return f"could not be judged: {'; '.join(texts)}"


def compact(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return the results, shortened if an object of the API cannot hold all.

    Of one-node tests that found nothing, the first of each kind is kept. All other results are
    needed to continue.
    """
    if len(results) <= RESULTS_MAX:
        return tuple(results)
    kept: list[CheckResult] = []
    seen: set[tuple[str, CheckKind]] = set()
    for result in results:
        is_dull = result.kind in (CheckKind.BASIC, CheckKind.STRESS)
        is_dull = is_dull and result.test not in (RUN, DEVICE_BANDWIDTH, GPU_PRODUCT)
        if is_dull and result.outcome is not Outcome.FAIL and (result.node, result.kind) in seen:
            continue
        seen.add((result.node, result.kind))
        kept.append(result)
    return tuple(kept)


def faults_of(node: str, results: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the failed tests of a node."""
    return [result for result in results if result.node == node and result.outcome is Outcome.FAIL]
