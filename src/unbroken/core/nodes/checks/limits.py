"""Limits for the link between two nodes: configured, or learned from similar links. Pure.

A link is as slow as its slower end, so each instance type has a limit of its own. It is the one
that the operator was configured with. Without one, it follows from the usual speed of the type, in
this check and in earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from unbroken.spec.nodes.check import CheckKind, CheckResult, Outcome

from .plan import Link, NodePair, edge

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
"""First word of the message about a measurement with GPUs."""
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
        is_nccl=bool(speeds) and all(one.message.startswith(NCCL) for one in speeds),
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
