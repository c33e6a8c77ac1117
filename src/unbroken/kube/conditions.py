"""Conditions of pods and nodes. Pure."""

from __future__ import annotations

from lightkube.resources.core_v1 import Node, Pod


def ready_status(item: Pod | Node | None) -> str:
    """Return True, False or Unknown, the status of the condition Ready; empty if there is none."""
    conditions = (item and item.status and item.status.conditions) or ()
    return next((condition.status for condition in conditions if condition.type == "Ready"), "")


def silent_since(node: Node) -> float | None:
    """Return the time since when the kubelet of a node does not report; None: it does."""
    conditions = (node.status and node.status.conditions) or ()
    ready = next((one for one in conditions if one.type == "Ready"), None)
    if ready is None or ready.status != "Unknown" or ready.lastTransitionTime is None:
        return None
    return ready.lastTransitionTime.timestamp()


def is_ready(item: Pod | Node | None) -> bool:
    """Return whether the condition Ready is True."""
    return ready_status(item) == "True"
