"""The next tests of a check and their nodes, and the limits for what they measure.  Pure.

Pairs of nodes are chosen so that a bad node is found without knowing a good one. A pair that works
proves both of its nodes good. In the first round all nodes meet in pairs. Then each node of a
failed pair meets one that is proven good; only a node that fails again is bad. With fewer bad nodes
than half, a good pair is always found. Without a good pair no node is named: the network, or the
limit itself, is then at fault.

Nodes meet nodes of their own instance type if possible: a link is as slow as its slower end.

The limit for the link between two nodes is configured, or learned from similar links. A link is as
slow as its slower end, so each instance type has a limit of its own. It is the one that the
operator was configured with. Without one, it follows from the usual speed of the type, in this
check and in earlier ones.

Limits for the devices of one node are configured, or learned from other nodes. Without a configured
limit only GPUs are judged. The processes of a node without them share its processors with whatever
else runs there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from math import inf
from statistics import median, median_high

from unbroken.spec.nodes.kinds import CheckKind, CheckResult, NodeCheckSpec, Outcome

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


RUN = "run"
"""Name of the result that says why tests could not be run or completed."""
SUM, BANDWIDTH, LATENCY = "all-reduce", "all-reduce-bandwidth", "all-reduce-latency"
"""Names of the results of a pair."""
BANDWIDTH_QUEUED, LATENCY_QUEUED = f"{BANDWIDTH}-queued", f"{LATENCY}-queued"
"""Names of the results that say for how much of a measurement, in percent, the node had no
processor free."""
DEVICE_LINKS = "device-links"
"""Name of the result about single devices, of a pair and of one node."""
DEVICE_SUM, DEVICE_BANDWIDTH = "device-all-reduce", "device-bandwidth"
"""Names of the results of all devices of one node."""
GPU_PRODUCT = "gpu-product"
"""Name of the result that says why no GPU of a node could be tested."""
NCCL = "nccl"
"""Backend of a measurement with GPUs."""
SLOW_SHARE = 0.5
"""Share of the usual bandwidth of the pairs below which a link is bad.

HyperPod's own example is stricter: 30 GB/s where 80 are required (reference section 2.5).
"""
FLEET_SHARE = 0.25
"""Share of the bandwidth that nodes of the type had in earlier checks.

It is lower, because the network was perhaps less busy then. One lane of four, or 100 Gbit/s where
400 were, is exactly at it (judgement).
"""
LATENCY_TIMES, LATENCY_LEAST = 10.0, 2000.0
"""Limits of latency: this multiple of the usual one, and this number of microseconds.

A link above both is bad. A busy machine causes less than that by itself (judgement).
"""
PAIRS_LEAST = 2
"""Pairs of a type that must have results before a usual value is derived."""
SHARE_LEAST = 0.01
"""Least share of the time of a measurement that counts as spent with a processor."""
FLEET_LEAST = 3
"""Nodes of a type that must have earlier results before a usual value is derived."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Knowledge about nodes beyond the results of a check; all of it may be empty."""

    types: Mapping[str, str] = field(default_factory=dict)
    """The instance type of each node."""
    configured: Mapping[str, float] = field(default_factory=dict)
    """GB/s that links of an instance type must reach, as a person has configured."""
    published: Mapping[str, float] = field(default_factory=dict)
    """GB/s that are published for an instance type, with all of its GPUs."""
    learned: Mapping[str, float] = field(default_factory=dict)
    """Limits that were learned from earlier checks (`learn`)."""
    inside: Mapping[str, float] = field(default_factory=dict)
    """GB/s that all devices of a node must reach, as a person has configured."""
    inside_learned: Mapping[str, float] = field(default_factory=dict)
    """GB/s that all devices of a node must reach, as earlier checks have shown."""


def learn(shown: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the GB/s that links must reach by instance type, from each node's (type, best GB/s so
    far)."""
    by_type: dict[str, list[float]] = {}
    for kind, speed in shown:
        if kind:
            by_type.setdefault(kind, []).append(speed)
    return {
        kind: round(median(speeds) * FLEET_SHARE, 4)
        for kind, speeds in by_type.items()
        if len(speeds) >= FLEET_LEAST
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one pair; None: not measured."""

    is_right: bool | None = None
    """True if the two nodes could compute a sum, and the sum was correct."""
    bandwidth: float | None = None
    """GB/s, the lower one of the two measurements."""
    latency: float | None = None
    """Microseconds, the higher one of the two measurements."""
    queued: float = 0.0
    """Share of the time of `bandwidth` for which the two nodes had no processor free, 0 to 1."""
    latency_queued: float = 0.0
    """Share of the latency, as `queued`."""
    slow: str = ""
    """The device whose link is slower than the others or wrong, in words; empty: none is."""
    is_nccl: bool = False
    """True if it was measured with GPUs."""


def measured_pairs(results: Iterable[CheckResult]) -> dict[NodePair, Measured]:
    """Return the combined results of both ends of each pair."""
    said: dict[NodePair, list[CheckResult]] = {}
    for result in results:
        if result.kind is CheckKind.CONNECTIVITY and result.peer:
            said.setdefault(edge(result.node, result.peer), []).append(result)
    return {pair: _measured(check_results) for pair, check_results in said.items()}


def _measured(said: Sequence[CheckResult]) -> Measured:
    sums = [check_result.outcome for check_result in said if check_result.test == SUM]
    if (
        any(check_result.test == RUN for check_result in said)
        or not sums
        or Outcome.UNKNOWN in sums
    ):
        return Measured()
    if Outcome.FAIL in sums:
        return Measured(is_right=False)
    speeds = [one for one in said if one.test == BANDWIDTH and one.measured is not None]
    delays = [one.measured for one in said if one.test == LATENCY and one.measured is not None]
    slow = [one.message for one in said if one.test == DEVICE_LINKS and one.outcome is Outcome.FAIL]
    return Measured(
        True,
        min((one.measured for one in speeds if one.measured is not None), default=None),
        max(delays, default=None),
        _queued(said, BANDWIDTH_QUEUED),
        _queued(said, LATENCY_QUEUED),
        "; ".join(dict.fromkeys(slow)),
        is_nccl=bool(speeds) and all(one.backend == NCCL for one in speeds),
    )


def _queued(said: Sequence[CheckResult], test: str) -> float:
    """Return the share of both ends together: each of them waits for the other."""
    return min(1.0, sum(one.measured or 0.0 for one in said if one.test == test) / 100)


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits for pairs; a missing entry is not known."""

    types: Mapping[str, str]
    bandwidth: Mapping[str, float]
    """GB/s by instance type."""
    latency: float | None
    """Microseconds; None: not known."""

    def of(self, node: str) -> float | None:
        """Return the GB/s that a link of this node must reach, if the other end can."""
        return self.bandwidth.get(self.types.get(node, ""))

    def of_pair(self, one: str, other: str) -> float | None:
        """Return the GB/s that this pair must reach; None: nothing is known of either node."""
        known = [least for node in (one, other) if (least := self.of(node)) is not None]
        return min(known, default=None)

    def is_late(self, seen: Measured) -> bool:
        """True if a pair's latency is above the limit."""
        return self.latency is not None and (seen.latency or 0.0) > self.latency

    def is_slow(self, one: str, other: str, seen: Measured) -> bool:
        """True if a pair's bandwidth is below the limit."""
        least = self.of_pair(one, other)
        return least is not None and (seen.bandwidth or 0.0) < least

    def waited(self, one: str, other: str, seen: Measured) -> bool:
        """True if a pair that is slow or late might be neither with a processor free all the
        time."""
        best = replace(
            seen,
            bandwidth=(seen.bandwidth or 0.0) / max(1 - seen.queued, SHARE_LEAST),
            latency=(seen.latency or 0.0) * (1 - seen.latency_queued),
        )
        is_bad, is_still_bad = (
            self.is_late(measured) or self.is_slow(one, other, measured)
            for measured in (seen, best)
        )
        return is_bad and not is_still_bad


def limits_of(pairs: Mapping[NodePair, Measured], fleet: Fleet) -> LinkLimits:
    """Return the limit of each instance type, as configured or learned."""
    by_type: dict[str, dict[NodePair, Measured]] = {}
    for pair, seen in _alike(pairs, fleet).items():
        if seen.is_right:
            by_type.setdefault(fleet.types.get(pair[0], ""), {})[pair] = seen
    usual = {kind: _usual(result) for kind, result in by_type.items() if len(result) >= PAIRS_LEAST}
    learned = {
        kind: max(usual.get(kind, 0.0), fleet.learned.get(kind, 0.0))
        for kind in {*usual, *fleet.learned}
    }
    # Published limits are of GPUs: a type that was tested without them is not held to them.
    other = {
        kind for kind, seen in by_type.items() if not all(one.is_nccl for one in seen.values())
    }
    published = {kind: least for kind, least in fleet.published.items() if kind not in other}
    bandwidth = {**learned, **published, **fleet.configured}
    return LinkLimits(fleet.types, bandwidth, _usual_latency(pairs))


def _alike(pairs: Mapping[NodePair, Measured], fleet: Fleet) -> dict[NodePair, Measured]:
    """Return the pairs whose nodes are of one instance type."""
    types = fleet.types
    return {
        pair: seen
        for pair, seen in pairs.items()
        if types.get(pair[0], "") == types.get(pair[1], "")
    }


def speeds_shown(results: Iterable[CheckResult], fleet: Fleet) -> dict[str, float]:
    """Return the most GB/s that each node had with another node of its instance type."""
    return best_of(_alike(measured_pairs(results), fleet))


def best_of(pairs: Mapping[NodePair, Measured]) -> dict[str, float]:
    """Return the most GB/s that each node had in pairs with correct sums."""
    speeds: dict[str, float] = {}
    for pair, seen in pairs.items():
        for node in pair if seen.is_right else ():
            speeds[node] = max(speeds.get(node, 0.0), seen.bandwidth or 0.0)
    return speeds


def _usual(pairs: Mapping[NodePair, Measured]) -> float:
    """Return a limit learned from the pairs themselves: most nodes of a cluster are good.

    The best value of each node counts. Otherwise a bad node that meets several others would make
    its own slowness usual. Of an even number of nodes, the better of the two in the middle counts,
    so that one bad pair of two is found.
    """
    speeds = sorted(best_of(pairs).values())
    return round(speeds[len(speeds) // 2] * SLOW_SHARE, 4)


def _usual_latency(pairs: Mapping[NodePair, Measured]) -> float | None:
    delays: dict[str, float] = {}
    result = {pair: seen for pair, seen in pairs.items() if seen.is_right}
    for pair, seen in result.items():
        for node in pair:
            delays[node] = min(delays.get(node, inf), inf if seen.latency is None else seen.latency)
    if len(result) < PAIRS_LEAST:
        return None
    latency = sorted(delays.values())[(len(delays) - 1) // 2] * LATENCY_TIMES
    return max(latency, LATENCY_LEAST) if latency < inf else None


def link_of(node: str, other: str, seen: Measured, limits: LinkLimits) -> Link:
    """Return the state of the link for one of the two nodes."""
    if seen.is_right is None:
        return Link.UNKNOWN
    if not seen.is_right or seen.slow:
        return Link.BAD
    is_late = limits.is_late(seen)
    is_slow = limits.of(node) is not None and limits.is_slow(node, other, seen)
    if not is_late and not is_slow:
        return Link.GOOD
    if limits.waited(node, other, seen):
        return Link.UNKNOWN
    return Link.BAD if is_late or limits.of(other) is not None else Link.UNKNOWN


def links(pairs: Mapping[NodePair, Measured], limits: LinkLimits) -> dict[NodePair, Link]:
    """Return the state of each tested pair for the first of its nodes, in both orders."""
    return {
        (node, other): link_of(node, other, seen, limits)
        for pair, seen in pairs.items()
        for node, other in (pair, pair[::-1])
    }


DEVICES_COMPARED = "device-bandwidth-compared"
"""Name of the result for a node."""


def speeds_inside(results: Iterable[CheckResult]) -> dict[str, float]:
    """Return the bus bandwidth in GB/s that the GPUs of each node had together."""
    return {
        result.node: result.measured
        for result in results
        if result.measured is not None and _is_speed(result) and result.backend == NCCL
    }


def _is_speed(result: CheckResult) -> bool:
    return (result.kind, result.test) == (CheckKind.STRESS, DEVICE_BANDWIDTH)


def compare_devices(results: Collection[CheckResult], fleet: Fleet) -> list[CheckResult]:
    """Return a result for each node whose limit is known."""
    gpus = speeds_inside(results)
    learned = _limits(gpus, fleet)
    compared = []
    for result in results:
        if not _is_speed(result) or result.measured is None:
            continue
        kind = fleet.types.get(result.node, "")
        least = fleet.inside.get(kind, learned.get(kind) if result.node in gpus else None)
        if least is not None:
            compared.append(_compared(result.node, result.measured, least))
    return compared


def _compared(node: str, speed: float, least: float) -> CheckResult:
    is_good = speed >= least
    outcome = Outcome.PASS if is_good else Outcome.FAIL
    text = "" if is_good else "Bandwidth has less than threshold"
    return CheckResult(
        node, CheckKind.STRESS, DEVICES_COMPARED, outcome, 0.0, text, speed, least, "GB/s"
    )


def _limits(speeds: Mapping[str, float], fleet: Fleet) -> dict[str, float]:
    """Return what is learned of each instance type, in this check and in earlier ones."""
    by_type: dict[str, list[float]] = {}
    for node, speed in speeds.items():
        by_type.setdefault(fleet.types.get(node, ""), []).append(speed)
    usual = {
        kind: round(median_high(each) * SLOW_SHARE, 4)
        for kind, each in by_type.items()
        if len(each) >= FLEET_LEAST
    }
    return {
        kind: max(usual.get(kind, 0.0), fleet.inside_learned.get(kind, 0.0))
        for kind in {*usual, *fleet.inside_learned}
    }


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
