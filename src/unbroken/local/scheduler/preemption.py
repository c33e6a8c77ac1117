"""Choose the pods that a pod may push off a node when none is free.  Pure.

After kube-scheduler v1.33, plugin defaultpreemption, without disruption budgets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from unbroken.kube.cache import Key

from .cluster import Cluster, Place
from .model import NodeInfo, PodInfo
from .place import Decision, refuses
from .relations import relations

NOT_HELPFUL = "Preemption is not helpful for scheduling"
NO_VICTIMS = "No preemption victims found for incoming pod"


@dataclass(frozen=True, slots=True)
class Preemption:
    """The node to make room on and the pods to delete there, or why it is no use."""

    node: str | None
    victims: tuple[PodInfo, ...] = ()
    explanation: str = ""
    """Text that kube-scheduler adds to its sentence."""


def preempt(pod: PodInfo, cluster: Cluster, decision: Decision) -> Preemption:
    """Find victims of lower priority for a pod that `decision` found no node for."""
    refusals = decision.refusals or {}
    if not pod.may_preempt:
        return Preemption(None, explanation="not eligible due to preemptionPolicy=Never.")
    reasons: Counter[str] = Counter()
    options: list[tuple[str, tuple[PodInfo, ...]]] = []
    for node, held in cluster.nodes():
        refusal = refusals.get(node.name)
        if refusal is None or not refusal.may_yield:
            reasons[NOT_HELPFUL] += 1
            continue
        victims = _victims(pod, node, held, cluster)
        if victims:
            options.append((node.name, victims))
        else:
            reasons[NO_VICTIMS] += 1
    if not options:
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        return Preemption(None, explanation=f"0/{len(refusals)} nodes are available: {listed}.")
    node_name, chosen = min(options, key=_cost)
    return Preemption(node_name, chosen)


def waits_for_room(pod: PodInfo, cluster: Cluster) -> bool:
    """Room is being made already: a victim of the pod has not ended yet."""
    held = cluster.places.get(pod.nominated)
    return held is not None and any(
        other.is_deleting and other.priority < pod.priority for other in held.pods.values()
    )


def _victims(pod: PodInfo, node: NodeInfo, held: Place, cluster: Cluster) -> tuple[PodInfo, ...]:
    """The pods that must go, as few and as unimportant as can be; empty if that is no use."""
    lower = [other for other in held.pods.values() if other.priority < pod.priority]
    gone: set[Key] = {other.key for other in lower}
    if not lower or not _fits(pod, node, held, cluster, gone):
        return ()
    # The most important come first, and are spared if the pod still fits; of equals the older.
    lower.sort(key=lambda other: (-other.priority, other.created))
    for other in lower:
        gone.discard(other.key)
        if not _fits(pod, node, held, cluster, gone):
            gone.add(other.key)
    return tuple(other for other in lower if other.key in gone)


def _fits(pod: PodInfo, node: NodeInfo, held: Place, cluster: Cluster, gone: set[Key]) -> bool:
    related = relations(pod, cluster, gone)
    return refuses(pod, node, held, related, cluster, gone) is None


def _cost(option: tuple[str, tuple[PodInfo, ...]]) -> tuple[int, int, int, float, str]:
    """Least important victims, then least in sum, then fewest, then youngest; then by name."""
    name, victims = option
    priorities = [victim.priority for victim in victims]
    top = [victim.created for victim in victims if victim.priority == max(priorities)]
    # Sums are shifted so that more victims never look cheaper for being negative.
    total = sum(priority + 2**31 for priority in priorities)
    return max(priorities), total, len(victims), -min(top), name
