"""Faults of nodes and pods in tests of auto-resume, and what objects say of them."""

from __future__ import annotations

from typing import Any

from tests.operator.conftest import Place

Object = dict[str, Any]
UNHEALTHY = {
    "metadata": {
        "labels": {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"}
    }
}


def node(place: Place, index: int) -> str:
    """Return the name of a node of the test's own."""
    return f"{place.namespace}-n{index}"


def annotations(found: Object) -> dict[str, str]:
    """Return the annotations of an object."""
    return found["metadata"].get("annotations") or {}


def is_leaving(found: Object) -> bool:
    """Return whether an object is being deleted."""
    return "deletionTimestamp" in found["metadata"]


async def kubelet_ends(place: Place, name: str) -> None:
    """End the pod as its kubelet does."""
    await place.delete(f"pods/{name}", gracePeriodSeconds=0)
    await place.absent(f"pods/{name}")
