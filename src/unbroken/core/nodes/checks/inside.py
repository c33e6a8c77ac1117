"""Limits for the devices of one node: configured, or learned from other nodes. Pure.

Without a configured limit only GPUs are judged. The processes of a node without them share its
processors with whatever else runs there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median_high

from unbroken.spec.nodes.check import CheckKind, CheckResult, Outcome

from .limits import DEVICE_BANDWIDTH, FLEET_LEAST, NCCL, SLOW_SHARE, Fleet

DEVICES_COMPARED = "device-bandwidth-compared"
"""Name of the result for a node."""


def speeds_inside(results: Iterable[CheckResult]) -> dict[str, float]:
    """Return the bus bandwidth in GB/s that the GPUs of each node had together."""
    return {
        result.node: result.measured
        for result in results
        if result.measured is not None and _is_speed(result) and result.message.startswith(NCCL)
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
