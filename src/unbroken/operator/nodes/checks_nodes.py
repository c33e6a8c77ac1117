"""Patches of nodes by a deep check: labels and taint while it runs, and its findings. Pure.

A node of a cluster may join as Unschedulable and InProgress: that is a hold without a check yet,
and the check that takes it also frees the node. Any other label with more than `Schedulable`
belongs to another writer (a fault, a quarantine). It is left unchanged, except for a check's own
failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from lightkube.resources.core_v1 import Node

from unbroken.spec.keys import CHECK_HOLD, DEEP_CHECK, HEALTH
from unbroken.spec.nodes.check import CheckPhase
from unbroken.spec.nodes.values import TAINT_EFFECT, TAINT_VALUE, DeepCheck, Health, health_of

Object = dict[str, Any]

FREE = ("", Health.SCHEDULABLE.value)
PENDING = (Health.PENDING_REBOOT.value, Health.PENDING_REPLACEMENT.value)


def held_by(node: Node) -> str:
    """Return the check that holds a node; empty: none does."""
    return str(_hold(node).get("check", ""))


def _hold(node: Node) -> Object:
    text = ((node.metadata and node.metadata.annotations) or {}).get(CHECK_HOLD, "")
    try:
        result = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def take(node: Node, check: str) -> Object | None:
    """Return a merge patch that marks a node as being checked; None: nothing is to be written."""
    if held_by(node):
        return None
    labels = _labels(node)
    health, before = health_of(labels), labels.get(DEEP_CHECK, "")
    has_joined = (health, before) == (Health.UNSCHEDULABLE.value, DeepCheck.IN_PROGRESS.value)
    is_ours = health in FREE or has_joined
    hold = {"check": check, "isOurs": is_ours, "before": before}
    new: dict[str, str | None] = {DEEP_CHECK: DeepCheck.IN_PROGRESS.value}
    patch = _patch(node, new, msgspec.json.encode(hold).decode())
    if is_ours:
        patch["metadata"]["labels"][HEALTH] = Health.UNSCHEDULABLE.value
        taint = {"key": HEALTH, "value": TAINT_VALUE, "effect": TAINT_EFFECT}
        patch["spec"] = {"taints": [*_other_taints(node), taint]}
    return patch


def give_back(node: Node, phase: CheckPhase) -> Object | None:
    """Return a merge patch that ends a check's hold with its findings; None: it holds nothing."""
    hold = _hold(node)
    if not hold:
        return None
    before = str(hold.get("before", ""))
    result = {
        CheckPhase.PASSED: DeepCheck.PASSED.value,
        CheckPhase.FAILED: DeepCheck.FAILED.value,
    }.get(phase, "" if before == DeepCheck.IN_PROGRESS.value else before)
    patch = _patch(node, {DEEP_CHECK: result or None}, None)
    health = health_of(_labels(node))
    if phase is CheckPhase.FAILED:
        # The taint stays, or is added: the repair removes it.
        if health not in PENDING:
            patch["metadata"]["labels"][HEALTH] = Health.PENDING_REPLACEMENT.value
        taint = {"key": HEALTH, "value": TAINT_VALUE, "effect": TAINT_EFFECT}
        patch["spec"] = {"taints": [*_other_taints(node), taint]}
    elif hold.get("isOurs") and health == Health.UNSCHEDULABLE.value:
        patch["metadata"]["labels"][HEALTH] = Health.SCHEDULABLE.value
        patch["spec"] = {"taints": _other_taints(node)}
    return patch


def _labels(node: Node) -> dict[str, str]:
    return (node.metadata and node.metadata.labels) or {}


def _patch(node: Node, labels: dict[str, str | None], hold: str | None) -> Object:
    assert node.metadata is not None
    # The version guards the list of taints, which a merge patch replaces as a whole.
    return {
        "metadata": {
            "resourceVersion": node.metadata.resourceVersion,
            "labels": labels,
            "annotations": {CHECK_HOLD: hold},
        }
    }


def _other_taints(node: Node) -> Sequence[Object]:
    taints = (node.spec and node.spec.taints) or ()
    return [taint.to_dict() for taint in taints if taint.key != HEALTH]
