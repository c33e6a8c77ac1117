"""Recognition of an error that has come before: at the same step, and on which nodes.

An error that returns at the same step on another node comes from the script, and no restart helps.
An error that stays with one node may come from the node. External errors, and errors that only name
lost peers, prove neither. Several ranks with the same error in one attempt are one occurrence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unbroken.core.job.watch.progress import FIRST_SECONDS
from unbroken.spec import keys
from unbroken.spec.job.incident import Incident, Signal
from unbroken.wire.agent import FaultKind

from .incidents import UNCHARGED, culprit
from .signals import BAD_METRIC, LOSS_SPIKE

SAME_ERROR = "SameErrorSameStep"
"""Reason of a job that failed because its error repeats at the same step."""
OCCURRENCES = 3
"""Occurrences that prove an error of the script even without another node or a step."""
NODES_NAMED = 4
_OWN = "the error comes from the script"
_RAISED = (
    FaultKind.EXCEPTION.value,
    FaultKind.CUDA_ERROR.value,
    FaultKind.DISK_FULL.value,
    FaultKind.OUT_OF_MEMORY.value,
)
_BAD_VALUE = (BAD_METRIC, LOSS_SPIKE)
_LOG_FAULT = re.compile(r"^LogFault_[^:]*")
# Faults of storage, name service and network appear everywhere at once, and pass.
_PASSING = re.compile(
    r"(?i)time(?:d )?out|connection|temporar|unavailable|too many requests|throttl|name or service"
    r"|network|unreachable|\b50[0234]\b|input/output error|stale file handle|no space left"
)


@dataclass(frozen=True, slots=True)
class RepeatedError:
    """An error that has come before."""

    text: str
    """The reason of a remedy, in words."""
    is_users: bool = False
    """True if the error is the user's: no restart would help."""
    suspect: str = ""
    """The only node on which the error was seen, if another one can be tried; empty: none."""


def find_repeat(
    found: Sequence[Signal],
    step: int | None,
    before: Iterable[Incident],
    now: float,
    elsewhere: Iterable[str] = (),
) -> RepeatedError | None:
    """Search earlier incidents for the first cause of these signs, at the job's `step`.

    `elsewhere`: nodes that could be used instead.
    """
    first = culprit(found)
    key = _key(first)
    if not key:
        return None
    step = first.step if first.step is not None else step
    if step is None and first.fault not in _RAISED:
        return None
    times, nodes = 1, _nodes(found, key)
    for incident in _matching(key, step, before, now):
        times += 1
        nodes |= _nodes((incident.culprit, *incident.signals), key)
    at = "soon after the start" if step is None else f"at step {step}"
    if times < 2:
        return None
    if not _is_proof(first):
        return RepeatedError(f"{first.fault} {at} for the {_ordinal(times)} time")
    places = ", ".join(sorted(nodes)[:NODES_NAMED]) or "an unknown node"
    said = f"the same error {at} for the {_ordinal(times)} time"
    # Without a step, similar errors may come from two ranks that each missed a different peer.
    is_proven = step is not None and len(nodes) > 1
    if is_proven or times >= OCCURRENCES or _is_value(first):
        where = f"on nodes {places}" if len(nodes) > 1 else f"on {places}"
        hint = f"to restart anyway, set the annotation {keys.SAME_ERROR}: restart"
        return RepeatedError(f"{said}, {where}: {_OWN} ({hint})", is_users=True)
    suspect = next(iter(nodes)) if len(nodes) == 1 else ""
    if suspect and set(elsewhere) - nodes:
        return RepeatedError(f"{said}, only on {suspect}: another node is tried", suspect=suspect)
    return RepeatedError(f"{said}, on {places}")


def is_users(reason: str) -> bool:
    """True if a remedy has this reason because no restart would help."""
    return _OWN in reason


def _matching(
    key: str, step: int | None, before: Iterable[Incident], now: float
) -> Iterable[Incident]:
    """Return incidents of the same error, the newest first, back to the last progress."""
    later = now
    for incident in sorted(before, key=lambda one: -one.number):
        first = incident.culprit
        if first.fault in UNCHARGED:
            return  # somebody has asked for a restart, and may have changed something
        own = first.step if first.step is not None else incident.step
        if step is None and later - (incident.started_at or incident.detected_at) > FIRST_SECONDS:
            return
        if _key(first) == key and own == step:
            yield incident
        elif step is not None and max(own or 0, incident.step or 0) > step:
            return
        later = incident.detected_at


def _key(signal: Signal) -> str:
    """Return a key that is equal for equal errors; empty: the error cannot be identified."""
    if signal.fault in _RAISED and signal.fingerprint:
        return signal.fingerprint
    if signal.fault in (FaultKind.OUT_OF_MEMORY.value, *_BAD_VALUE):
        return signal.fault
    if signal.fault == FaultKind.LOG_RULE.value:
        rule = _LOG_FAULT.match(signal.text)
        return rule[0] if rule else ""
    return ""


def _is_value(signal: Signal) -> bool:
    """True if the error concerns a value that all ranks share, so that it says nothing about the
    node."""
    return signal.fault in (*_BAD_VALUE, FaultKind.LOG_RULE.value)


def _is_proof(signal: Signal) -> bool:
    if signal.fault == FaultKind.OUT_OF_MEMORY.value and not signal.fingerprint:
        return False
    return _is_value(signal) or not _PASSING.search(signal.text)


def _nodes(found: Iterable[Signal], key: str) -> set[str]:
    return {signal.node for signal in found if signal.node and _key(signal) == key}


def _ordinal(times: int) -> str:
    return {2: "second", 3: "third"}.get(times, f"{times}th")
