"""Decides whether a node may be fenced because of a pod.  Pure.

A fence ends the pods of everybody on the node.  So the state of a pod, which its owner can write,
is never enough: the node itself must be unwell.  What stays in the way of a job after that is told
to a person.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from unbroken.spec.keys import FENCES, OUT_OF_SERVICE

FENCES_AN_HOUR = 10
"""Fences of a node within an hour; a node that is lost more often needs a person."""
HOUR_SECONDS = 3600.0
FENCES_KEPT = 32
"""Fences that are remembered of a node."""
AWAITED_SECONDS = 60.0
"""A fence that is not given so long after it was asked for is reported to people."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence of a node that was asked for."""

    pod: str
    """Uid of the pod that it was asked for."""
    at: float
    """Seconds since the epoch."""


class FenceVerdict(Enum):
    """The answer to a request for a fence; `ASK`: write it."""

    ASK = "ask"
    STANDS = "stands"
    """The fence is asked for already."""
    READY = "ready"
    """The node is ready: the pod alone is no evidence about it."""
    REPEATED = "repeated"
    """The node was fenced for this pod before."""
    TOO_OFTEN = "too often"


def fence_verdict(
    is_ready: bool, is_asked_for: bool, fences: Iterable[Fence], pod: str, now: float
) -> FenceVerdict:
    """Judge a request to fence a node because of a pod (its uid), by the node as it is now."""
    if is_ready:
        return FenceVerdict.READY
    if is_asked_for:
        return FenceVerdict.STANDS
    known = tuple(fences)
    if any(one.pod == pod for one in known):
        return FenceVerdict.REPEATED
    if sum(one.at > now - HOUR_SECONDS for one in known) >= FENCES_AN_HOUR:
        return FenceVerdict.TOO_OFTEN
    return FenceVerdict.ASK


def counts_as_dead(silent_seconds: float | None, dead_seconds: float) -> bool:
    """True if a node has been silent for so long that its machine is known to be off.

    `silent_seconds` None: its kubelet reports.  `dead_seconds` 0: silence alone proves nothing.
    """
    return silent_seconds is not None and 0 < dead_seconds <= silent_seconds


def is_overdue(fences: Iterable[Fence], now: float) -> bool:
    """True if the newest of the fences of a node that is asked for is not given in time."""
    asked = max((one.at for one in fences), default=0.0)
    return now >= asked + AWAITED_SECONDS


def awaited(node: str, reason: str) -> str:
    """Say what a job waits for whose pod is on a silent node, and how a person frees it."""
    return f"{why_awaited(node, reason)} {proof_command(node)}"


def why_awaited(node: str, reason: str) -> str:
    """Say what a job waits for, up to the command that frees it (`proof_command`)."""
    return (
        f"node {node} does not answer, and may still run a pod of the job ({reason}), which "
        "therefore starts nowhere else. Switch its machine off, then run:"
    )


def proof_command(node: str) -> str:
    """Return the command by which a person says that nothing runs on a node."""
    return f"kubectl taint node {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"


def advice(verdict: FenceVerdict, node: str, reason: str) -> str:
    """Say what a person is to do about a refused fence; empty: nothing."""
    proof = f"if nothing runs on it, delete the Node, or: {proof_command(node)}"
    if verdict is FenceVerdict.REPEATED:
        return f"node {node} was fenced before for {reason}, and is not fenced again: {proof}"
    if verdict is FenceVerdict.TOO_OFTEN:
        return (
            f"node {node} was fenced {FENCES_AN_HOUR} times within an hour, and is not fenced for "
            f"{reason}: repair or replace it, or remove its annotation {FENCES} to allow more "
            f"fences; {proof}"
        )
    return ""
