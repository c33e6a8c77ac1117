"""Sentences about silent nodes for which a job waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from unbroken.cli.connection import NODES, Cluster
from unbroken.core.fencing import proof_command, why_awaited
from unbroken.kube.errors import Forbidden
from unbroken.spec.job_kinds import ENDED_PHASES
from unbroken.spec.keys import FENCE, OUT_OF_SERVICE
from unbroken.spec.lookup import value_at

from .views import is_ready

Object = dict[str, Any]


async def fence_waits(cluster: Cluster, pods: Iterable[Object]) -> list[str]:
    """For each silent node whose fence a job waits for, a sentence and the command that frees the
    job; nothing if nodes are forbidden."""
    leaving = defaultdict(list)
    for pod in pods:
        node = value_at(pod, "spec", "nodeName")
        is_over = value_at(pod, "status", "phase") in ENDED_PHASES
        if node and pod["metadata"].get("deletionTimestamp") and not is_over:
            leaving[str(node)].append(str(pod["metadata"]["name"]))
    found = []
    for name, names in sorted(leaving.items()):
        try:
            node = await cluster.find(NODES, name)
        except Forbidden:
            return []
        if node is not None and is_awaited(node):
            found += [why_awaited(name, f"pod {min(names)}"), proof_command(name)]
    return found


def is_awaited(node: Object) -> bool:
    """True if the fence of a node is asked for, and the node is neither ready nor fenced."""
    taints = value_at(node, "spec", "taints") or ()
    is_fenced = any(one["key"] == OUT_OF_SERVICE for one in taints)
    is_asked_for = bool(value_at(node, "metadata", "annotations", FENCE))
    return is_asked_for and not is_fenced and not is_ready(node)
