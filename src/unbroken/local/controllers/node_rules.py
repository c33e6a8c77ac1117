"""Conditions and taints of a silent node, and the time when its pods must go. Pure.

After kube-controller-manager v1.33, pkg/controller/nodelifecycle and pkg/controller/tainteviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from lightkube.models.core_v1 import NodeCondition, Taint, Toleration
from lightkube.resources.core_v1 import Node, Pod

from unbroken.kube.client import Object
from unbroken.kube.clock import rfc3339
from unbroken.kube.conditions import ready_status
from unbroken.local.scheduler.selectors import tolerates
from unbroken.spec.keys import NOT_READY, UNREACHABLE, UNSCHEDULABLE

WATCHED = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
"""Conditions that a node must keep fresh."""

PRESSURES = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
    "NetworkUnavailable": "node.kubernetes.io/network-unavailable",
}

DEFAULT_TOLERATION_SECONDS = 300
"""Admission gives it to every pod for the two taints of a lost node (DefaultTolerationSeconds)."""


def _conditions(node: Node) -> Sequence[NodeCondition]:
    return (node.status and node.status.conditions) or ()


def heartbeat(node: Node) -> str:
    """Return the node's own last write into its status; it changes when the node writes again.

    Empty for Unknown, which only this program writes.
    """
    ready = ready_status(node)
    if ready == "Unknown":
        return ""
    times = [
        condition.lastHeartbeatTime
        for condition in _conditions(node)
        if condition.lastHeartbeatTime
    ]
    return f"{ready} {max(times).isoformat() if times else ''}"


def silence(node: Node, now: float) -> list[Object]:
    """Return the conditions to write for a silent node; empty if they are set already."""
    by_type = {condition.type: condition for condition in _conditions(node)}
    written: list[Object] = []
    for kind in WATCHED:
        known = by_type.get(kind)
        if known is not None and known.status == "Unknown":
            continue
        reason, message = "NodeStatusUnknown", "Kubelet stopped posting node status."
        if known is None:
            reason, message = "NodeStatusNeverUpdated", "Kubelet never posted node status."
        written.append(
            {
                "type": kind,
                "status": "Unknown",
                "reason": reason,
                "message": message,
                "lastTransitionTime": rfc3339(now),
            }
        )
    return written


def wanted_taints(node: Node, now: float) -> list[Taint] | None:
    """The taints that the node's state calls for; None if it has just those.

    Taints of others stay, and so does the time at which one of these was added.
    """
    present = list((node.spec and node.spec.taints) or ())
    calls = _called_for(node)
    ours = {NOT_READY, UNREACHABLE, UNSCHEDULABLE, *PRESSURES.values()}
    kept = [
        taint for taint in present if taint.key not in ours or (taint.key, taint.effect) in calls
    ]
    have = {(taint.key, taint.effect) for taint in kept}
    added = [
        Taint(key=key, effect=effect, timeAdded=datetime.fromtimestamp(int(now), UTC))
        for key, effect in calls
        if (key, effect) not in have
    ]
    return [*kept, *added] if added or len(kept) != len(present) else None


def _called_for(node: Node) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    match ready_status(node):
        case "False":
            calls += [(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]
        case "Unknown":
            calls += [(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")]
        case "":
            # A node without a report so far takes no pods, but has lost none either.
            calls.append((NOT_READY, "NoSchedule"))
        case _:
            pass
    if node.spec and node.spec.unschedulable:
        calls.append((UNSCHEDULABLE, "NoSchedule"))
    for condition in _conditions(node):
        if condition.type in PRESSURES and condition.status == "True":
            calls.append((PRESSURES[condition.type], "NoSchedule"))
    return calls


@dataclass(frozen=True, slots=True)
class Stay:
    """Time that a pod may stay on a node. `until` None: any time."""

    until: float | None
    """Wall time."""


def stay(pod: Pod, taints: Sequence[Taint], now: float) -> Stay:
    """Return when the node's NoExecute taints evict the pod; a time in the past: now."""
    tolerations = list((pod.spec and pod.spec.tolerations) or ())
    tolerations += _defaults(tolerations)
    until: float | None = None
    for taint in taints:
        if taint.effect != "NoExecute":
            continue
        matching = [toleration for toleration in tolerations if tolerates(toleration, taint)]
        if not matching:
            return Stay(now)
        limits = [
            toleration.tolerationSeconds
            for toleration in matching
            if toleration.tolerationSeconds is not None
        ]
        if limits:
            since = taint.timeAdded.timestamp() if taint.timeAdded else now
            end = since + max(0, min(limits))
            until = end if until is None else min(until, end)
    return Stay(until)


def _defaults(tolerations: Sequence[Toleration]) -> list[Toleration]:
    """Return the tolerations that admission adds, for an API server without it."""
    return [
        Toleration(
            key=key,
            operator="Exists",
            effect="NoExecute",
            tolerationSeconds=DEFAULT_TOLERATION_SECONDS,
        )
        for key in (NOT_READY, UNREACHABLE)
        if not any(
            tolerates(toleration, Taint(key=key, effect="NoExecute")) for toleration in tolerations
        )
    ]
