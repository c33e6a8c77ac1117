"""Number of pods of a PodDisruptionBudget that may be evicted now.

After kube-controller-manager v1.33, pkg/controller/disruption. A percentage, and `maxUnavailable`,
refer to the existing pods: the local cluster has no kinds with a wanted number of pods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from lightkube.models.policy_v1 import PodDisruptionBudgetSpec
from lightkube.resources.core_v1 import Pod

from unbroken.foreign_numbers import whole_number
from unbroken.kube.client import Object
from unbroken.kube.conditions import is_ready
from unbroken.spec.times import time_seconds

CONDITION = "DisruptionAllowed"
CONFIRM_SECONDS = 120.0
"""An eviction that has not deleted its pod after this time counts no longer."""


def budget_status(
    spec: PodDisruptionBudgetSpec,
    pods: Iterable[Pod],
    disrupted: Mapping[str, str],
    now: float,
) -> Object:
    """Return the counts of a budget's status.

    `disrupted`: pods whose eviction was allowed, and when."""
    result = list(pods)
    alive = {
        meta.name: is_ready(pod)
        for pod in result
        if (meta := pod.metadata) is not None and meta.deletionTimestamp is None
    }
    waiting = {
        name: at
        for name, at in disrupted.items()
        if name in alive and time_seconds(at) + CONFIRM_SECONDS > now
    }
    healthy = sum(ready for name, ready in alive.items() if name not in waiting)
    desired = _desired(spec, len(result))
    return {
        "expectedPods": len(result),
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "disruptionsAllowed": max(0, healthy - desired) if result else 0,
        "disruptedPods": waiting,
    }


def _desired(spec: PodDisruptionBudgetSpec, pods: int) -> int:
    if spec.maxUnavailable is not None:
        return max(0, pods - _share(spec.maxUnavailable, pods))
    return pods if spec.minAvailable is None else _share(spec.minAvailable, pods)


def _share(value: int | str, pods: int) -> int:
    """A number, or a percentage rounded up."""
    if isinstance(value, str):
        return math.ceil((whole_number(value.removesuffix("%"), 0, 100) or 0) * pods / 100)
    return value
