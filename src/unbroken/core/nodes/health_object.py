"""The node's own object: the fields that the daemon reads, and the patches that it writes.

All state that the daemon needs after a restart is here: faults found and not withdrawn, the
conditions that are its own, and its position in the kernel's log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.spec import keys
from unbroken.spec.nodes.values import TAINT_EFFECT, TAINT_VALUE, Action, Health, health_of
from unbroken.spec.times import time_text

Object = dict[str, Any]
DETAILS_MAX, DETAILS_BYTES = 10, 6144
"""Bounds of `fault-details`; all annotations of an object share 256 KiB (Kubernetes
TotalAnnotationSizeLimitB), and each watcher of nodes is sent them."""
MESSAGE_MAX = 300
PAST_MAX, XIDS_MAX = 20, 16
GPU_RESOURCE = "nvidia.com/gpu"
GPU_COUNT = "nvidia.com/gpu.count"
"""Label of NVIDIA's feature discovery: the GPUs themselves, however the resource is shared out."""
LADDER = tuple(Action)
NODE_ACTIONS = frozenset({Action.RESET_GPU, Action.REBOOT, Action.REPLACE})
PENDING = {
    Action.RESET_GPU: Health.PENDING_REBOOT,
    Action.REBOOT: Health.PENDING_REBOOT,
    Action.REPLACE: Health.PENDING_REPLACEMENT,
}
NO_FAULT = "NoFault"
_NUMBER = re.compile(r"\d{1,4}")


@dataclass(frozen=True, slots=True)
class OwnNode:
    """The fields of its node that the daemon needs."""

    uid: str = ""
    version: str = ""
    boot_id: str = ""
    verified: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, Any], ...] = ()
    conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Type -> (status, reason)."""
    gpus: int | None = None
    """GPUs that the node should have; None: it does not state a number."""
    gpu_capacity: int | None = None
    """GPUs that the node offers, which may count each GPU several times."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the node."""

    reason: str
    part: str
    condition: str
    action: Action
    message: str
    at: float

    @property
    def key(self) -> tuple[str, str]:
        """Key of the fault: equal keys are one fault."""
        return self.reason, self.part


@dataclass(slots=True)
class Memory:
    """The daemon's memory over restarts."""

    boot_id: str = ""
    verified: str = ""
    """Boot and verification since which the faults count."""
    cursor: str = ""
    """Position up to which the kernel's log was read."""
    conditions: set[str] = field(default_factory=set)
    """Conditions that the daemon has ever set, and so may withdraw."""
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    """Faults that require an action for the node and were not withdrawn."""
    past: dict[str, float] = field(default_factory=dict)
    """Reason -> time of the last withdrawal after a reset or a reboot."""
    xids: list[tuple[str, int, float]] = field(default_factory=list)
    """(GPU, XID, time) of the latest ones: they determine the meaning of the next."""
    times: dict[tuple[str, str], list[tuple[float, str]]] = field(default_factory=dict)
    """Counted fault -> its times, each with the cursor behind its line."""


def node_state(node: Mapping[str, Any]) -> OwnNode:
    """Return the needed fields of a Node object; malformed parts are left out."""
    metadata, status = _mapping(node, "metadata"), _mapping(node, "status")
    labels, annotations = _texts(metadata, "labels"), _texts(metadata, "annotations")
    conditions = {
        str(item.get("type")): (str(item.get("status")), str(item.get("reason") or ""))
        for item in status.get("conditions") or ()
    }
    return OwnNode(
        uid=str(metadata.get("uid") or ""),
        version=str(metadata.get("resourceVersion") or ""),
        boot_id=str(_mapping(status, "nodeInfo").get("bootID") or ""),
        verified=annotations.get(keys.VERIFIED, ""),
        labels=labels,
        annotations=annotations,
        taints=tuple(_mapping(node, "spec").get("taints") or ()),
        conditions=conditions,
        gpus=_count(labels.get(GPU_COUNT)),
        gpu_capacity=_count(_mapping(status, "capacity").get(GPU_RESOURCE)),
    )


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    result = value.get(key)
    return result if isinstance(result, Mapping) else {}


def _texts(value: Mapping[str, Any], key: str) -> dict[str, str]:
    return {str(name): str(text) for name, text in _mapping(value, key).items()}


def _count(text: object) -> int | None:
    return int(str(text)) if text is not None and _NUMBER.fullmatch(str(text)) else None


# --- what is remembered


def write_memory(memory: Memory) -> str:
    """Return the annotation's text."""
    faults = [
        [
            fault.reason,
            fault.part,
            fault.condition,
            fault.action.value,
            fault.message[:120],
            fault.at,
        ]
        for fault in memory.faults.values()
    ]
    kept = {
        "boot": memory.boot_id,
        "verified": memory.verified,
        "cursor": memory.cursor,
        "conditions": sorted(memory.conditions),
        "faults": faults,
        "past": memory.past,
        "xids": memory.xids[-XIDS_MAX:],
        "times": [[reason, part, times] for (reason, part), times in memory.times.items()],
    }
    return json.dumps(kept, separators=(",", ":"))


def read_memory(text: str) -> Memory:
    """Return the memory of an earlier daemon; a text that cannot be read is no memory."""
    try:
        kept = json.loads(text)
        faults = [
            Fault(str(reason), str(part), str(condition), Action(action), str(message), float(at))
            for reason, part, condition, action, message, at in kept["faults"]
        ]
        return Memory(
            str(kept["boot"]),
            str(kept["verified"]),
            str(kept["cursor"]),
            {str(item) for item in kept["conditions"]},
            {fault.key: fault for fault in faults},
            {str(reason): float(at) for reason, at in kept["past"].items()},
            [(str(part), int(xid), float(at)) for part, xid, at in kept.get("xids", ())],
            {
                (str(reason), str(part)): [(float(at), str(cursor)) for at, cursor in times]
                for reason, part, times in kept.get("times", ())
            },
        )
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Memory()


# --- what is written


def fault_patch(
    node: OwnNode, memory: Memory, news: Sequence[tuple[Fault, int]], now: float
) -> Object:
    """Return a merge patch for new faults, each with the number of times it was seen.

    It applies to this very version of the node: the list of taints is replaced as a whole.
    """
    metadata: Object = {"uid": node.uid, "resourceVersion": node.version}
    annotations: Object = {keys.DAEMON_MEMORY: write_memory(memory)}
    patch: Object = {"metadata": {**metadata, "annotations": annotations}}
    if news:
        annotations[keys.FAULT_DETAILS] = details(
            node.annotations.get(keys.FAULT_DETAILS, ""), news
        )
    acted = [fault for fault, _ in news if fault.action in NODE_ACTIONS]
    if acted:
        action = severest([*(fault.action for fault in acted), *_advised(node)])
        annotations[keys.ADVICE] = action.value
        patch["metadata"]["labels"] = {
            keys.HEALTH: PENDING[action].value,
            keys.FAULT_TYPES: acted[-1].condition,
            keys.FAULT_REASONS: acted[-1].reason,
        }
        if not any(_is_ours(taint) for taint in node.taints):
            patch["spec"] = {"taints": [*node.taints, _taint(now)]}
    elif not memory.faults and keys.ADVICE in node.annotations:
        annotations[keys.ADVICE] = None
    return patch


def _advised(node: OwnNode) -> Iterable[Action]:
    """Yield the actions that the labels already require, whether the daemon or a person set
    them."""
    health = health_of(node.labels)
    if health == Health.PENDING_REPLACEMENT.value:
        yield Action.REPLACE
    elif health == Health.PENDING_REBOOT.value:
        is_reset = node.annotations.get(keys.ADVICE) == Action.RESET_GPU.value
        yield Action.RESET_GPU if is_reset else Action.REBOOT


def severest(actions: Iterable[Action]) -> Action:
    """Return the highest rung of several."""
    return max(actions, key=LADDER.index, default=Action.NONE)


def _is_ours(taint: Mapping[str, Any]) -> bool:
    return taint.get("key") == keys.HEALTH and taint.get("effect") == TAINT_EFFECT


def _taint(now: float) -> Object:
    return {
        "key": keys.HEALTH,
        "value": TAINT_VALUE,
        "effect": TAINT_EFFECT,
        "timeAdded": time_text(now),
    }


def details(before: str, news: Sequence[tuple[Fault, int]]) -> str:
    """Return the annotation with the faults added, newest last; a repeated fault replaces its older
    entry."""
    kept = _read_details(before)
    for fault, count in news:
        entry = _detail(fault, count)
        kept = [item for item in kept if not _is_same(item, fault)]
        kept.append(entry)
    kept = kept[-DETAILS_MAX:]
    while len(kept) > 1 and len(_compact(kept).encode()) > DETAILS_BYTES:
        kept = kept[1:]
    return _compact(kept)


def _compact(entries: list[Object]) -> str:
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False)


def _read_details(text: str) -> list[Object]:
    try:
        result = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    return [item for item in result if isinstance(item, dict)] if isinstance(result, list) else []


def _detail(fault: Fault, count: int) -> Object:
    again = f" ({count} times)" if count > 1 else ""
    return {
        "timestamp": time_text(fault.at),
        "type": fault.condition,
        "reason": fault.reason,
        "message": fault.message[:MESSAGE_MAX] + again,
    }


def _is_same(entry: Object, fault: Fault) -> bool:
    """True if the message begins with the part, or else has the same text."""
    message = str(entry.get("message", ""))
    return entry.get("reason") == fault.reason and message.startswith(
        f"{fault.part}: " if fault.part else fault.message[:MESSAGE_MAX]
    )


def condition_patch(node: OwnNode, memory: Memory, now: float) -> Object | None:
    """Return a strategic merge patch that sets the status conditions to those of the faults; None:
    they are up to date."""
    wanted: dict[str, Fault | None] = dict.fromkeys(sorted(memory.conditions))
    for fault in memory.faults.values():
        wanted[fault.condition] = fault
    changed = [
        _condition(kind, fault, now)
        for kind, fault in wanted.items()
        if _differs(node.conditions.get(kind), fault)
    ]
    return {"status": {"conditions": changed}} if changed else None


def _differs(known: tuple[str, str] | None, fault: Fault | None) -> bool:
    if fault is None:
        return known is not None and known[0] == "True"
    return known != ("True", fault.reason)


def _condition(kind: str, fault: Fault | None, now: float) -> Object:
    stamp = time_text(now)
    return {
        "type": kind,
        "status": "False" if fault is None else "True",
        "reason": NO_FAULT if fault is None else fault.reason,
        "message": "no fault of this kind is known" if fault is None else fault.message,
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": stamp,
    }
