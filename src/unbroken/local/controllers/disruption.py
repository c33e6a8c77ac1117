"""Writes the status of PodDisruptionBudgets, by which the API server answers evictions.

The number of pods that may be evicted now is a pure function, after kube-controller-manager v1.33,
pkg/controller/disruption. A percentage, and `maxUnavailable`, refer to the existing pods: the local
cluster has no kinds with a wanted number of pods.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from lightkube.models.policy_v1 import PodDisruptionBudgetSpec
from lightkube.resources.core_v1 import Pod
from lightkube.resources.policy_v1 import PodDisruptionBudget

from unbroken.foreign_numbers import whole_number
from unbroken.kube.cache import Key, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import rfc3339, wall
from unbroken.kube.conditions import is_ready
from unbroken.kube.errors import Conflict, NotFound
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.scheduler.model import matches_labels
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


class DisruptionBudgets:
    """Keeps the counts of budgets in line with their pods."""

    def __init__(self, client: KubeClient, informers: Informers) -> None:
        self._client = client
        self._pods = informers.of(Pod)
        self._budgets = informers.of(PodDisruptionBudget)
        self._queue: WorkQueue[Key] = WorkQueue("budgets", self._write, workers=2)

    async def run(self) -> None:
        """Write until cancelled."""
        await all_synced(self._pods, self._budgets)
        self._budgets.subscribe(self._on_budget)
        self._pods.subscribe(self._on_pod)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._queue.run())

    def _on_budget(self, old: PodDisruptionBudget | None, new: PodDisruptionBudget | None) -> None:
        if new is not None:
            self._queue.add(key_of(new))

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        if old and new and _shown(old) == _shown(new):
            return
        for budget in self._budgets.items():
            if any(pod is not None and _selects(budget, pod) for pod in (old, new)):
                self._queue.add(key_of(budget))

    async def _write(self, key: Key) -> float | None:
        """Write the status if it has changed; when to look again for evictions without effect."""
        budget = self._budgets.get(key.name, key.namespace)
        if budget is None or budget.spec is None or budget.metadata is None:
            return None
        known = budget.status
        disrupted = (known and known.disruptedPods) or {}
        pods = (pod for pod in self._pods.items() if _selects(budget, pod))
        wanted = budget_status(budget.spec, pods, disrupted, wall())
        wanted["observedGeneration"] = budget.metadata.generation or 0
        held = {name: getattr(known, name, None) for name in wanted}
        if {**held, "disruptedPods": disrupted} != wanted:
            allowed = wanted["disruptionsAllowed"] > 0
            condition = {
                "type": CONDITION,
                "status": "True" if allowed else "False",
                "reason": "SufficientPods" if allowed else "InsufficientPods",
                "message": "",
                "observedGeneration": wanted["observedGeneration"],
                "lastTransitionTime": rfc3339(wall()),
            }
            gone = dict.fromkeys(disrupted.keys() - wanted["disruptedPods"].keys())
            merged = {**wanted, "disruptedPods": {**wanted["disruptedPods"], **gone}}
            body = {
                # An eviction that was allowed meanwhile must not be forgotten.
                "metadata": {"resourceVersion": budget.metadata.resourceVersion},
                "status": {**merged, "conditions": [condition]},
            }
            path = f"apis/policy/v1/namespaces/{key.namespace}/poddisruptionbudgets/{key.name}"
            with suppress(Conflict, NotFound):  # The watch will deliver the newer version.
                await self._client.merge(f"{path}/status", body)
        return CONFIRM_SECONDS if wanted["disruptedPods"] else None


def _selects(budget: PodDisruptionBudget, pod: Pod) -> bool:
    labels = (pod.metadata and pod.metadata.labels) or {}
    is_near = key_of(budget).namespace == key_of(pod).namespace
    selector = None if budget.spec is None else budget.spec.selector
    return is_near and matches_labels(selector, labels)


def _shown(pod: Pod) -> Any:
    """Return the parts of a pod that its budget counts."""
    meta = pod.metadata
    return meta and (meta.labels, meta.uid, meta.deletionTimestamp is None), is_ready(pod)
