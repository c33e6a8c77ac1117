"""Number of evictions that a PodDisruptionBudget allows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lightkube.models.policy_v1 import PodDisruptionBudgetSpec
from lightkube.resources.core_v1 import Pod

from unbroken.local.controllers.disruption import CONFIRM_SECONDS, budget_status

EVICTED = "1970-01-01T00:16:40Z"
NOW = 1000.0


def pods(ready: int, others: int = 0, deleting: int = 0) -> list[Pod]:
    """Return pods p0, p1, ...: ready ones first, those being deleted last."""
    found = []
    for number in range(ready + others + deleting):
        metadata: dict[str, Any] = {"name": f"p{number}"}
        if number >= ready + others:
            metadata["deletionTimestamp"] = EVICTED
        status = "False" if ready <= number < ready + others else "True"
        conditions = [{"type": "Ready", "status": status}]
        content = {"metadata": metadata, "status": {"conditions": conditions}}
        found.append(msgspec.convert(content, Pod))
    return found


@pytest.mark.parametrize(
    ("spec", "found", "allowed"),
    [
        ({"minAvailable": 2}, pods(3), 1),
        ({"minAvailable": 2}, pods(2, 1), 0),
        ({"minAvailable": 2}, pods(2, deleting=1), 0),
        ({"minAvailable": 1_000_000}, pods(3), 0),
        ({"minAvailable": "50%"}, pods(3), 1),
        ({"maxUnavailable": 1}, pods(3), 1),
        ({"maxUnavailable": 1}, pods(2, 1), 0),
        ({"maxUnavailable": "50%"}, pods(3), 2),
        ({"maxUnavailable": 5}, pods(2), 2),
        ({"minAvailable": 0}, pods(0), 0),
        ({}, pods(3), 0),
    ],
)
def test_so_many_may_be_evicted(spec: dict[str, Any], found: list[Pod], allowed: int) -> None:
    status = budget_status(PodDisruptionBudgetSpec(**spec), found, {}, NOW)
    assert status["disruptionsAllowed"] == allowed
    assert status["expectedPods"] == len(found)


def test_an_eviction_counts_until_its_pod_goes_or_its_time_is_over() -> None:
    spec = PodDisruptionBudgetSpec(minAvailable=1)
    evicted = {"p0": EVICTED, "gone": EVICTED}
    status = budget_status(spec, pods(3), evicted, NOW)
    assert (status["currentHealthy"], status["disruptionsAllowed"]) == (2, 1)
    assert status["disruptedPods"] == {"p0": EVICTED}
    later = budget_status(spec, pods(3), evicted, NOW + CONFIRM_SECONDS)
    assert (later["currentHealthy"], later["disruptedPods"]) == (3, {})
