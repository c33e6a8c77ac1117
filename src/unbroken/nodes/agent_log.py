"""The log of the health monitoring agent, in the documented streams' form, as a file.

`SagemakerHealthMonitoringAgent/<instance group>/<instance>.log` below a directory; each line a JSON
object (reference section 2.3 b, of HyperPod on EKS).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from unbroken.core.nodes.health import LogFault
from unbroken.core.nodes.health_object import NODE_ACTIONS
from unbroken.spec.keys import GPU_UNHEALTHY
from unbroken.spec.nodes.values import Action
from unbroken.spec.times import time_text

STREAM = "SagemakerHealthMonitoringAgent"
BYTES_MAX = 16 << 20
"""Longest file; then it is set aside as `.1`."""
ACTIONS = {Action.RESET_GPU: "reboot", Action.RESTART_JOB: "none"}
"""The documented lines know none, reboot and replace."""


class AgentLog:
    """The file of one node; made with its first line."""

    def __init__(self, directory: Path, group: str, node: str) -> None:
        instance = node.removeprefix("hyperpod-")
        self.path = directory / STREAM / (group or "default") / f"{instance}.log"

    def write(self, fault: LogFault, now: float) -> None:
        """Append a line.  Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > BYTES_MAX:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line(fault, now), ensure_ascii=False) + "\n")


def line(fault: LogFault, now: float) -> dict[str, object]:
    """A line of the log."""
    detail = {
        "Action": ACTIONS.get(fault.action, fault.action.value),
        "Type": fault.type,
        "Reason": documented_reason(fault),
        "Message": f"{fault.reason}: {fault.message}",
    }
    return {
        "level": "info",
        "ts": time_text(now, has_microseconds=True),
        "msg": "Health event detected",
        "Event detail": detail,
        **_condition(fault, now),
        "HealthMonitoringAgentDetectionEvent": "HealthEvent",
    }


def _condition(fault: LogFault, now: float) -> dict[str, object]:
    """Keys of the older documented form, blanks and colons included, for filters that look for
    them; none where the fault sets no condition of the node."""
    if fault.action not in NODE_ACTIONS:
        return {}
    details = {
        "type": fault.type,
        "status": "True",
        "transition": time_text(now),
        "reason": fault.reason,
        "message": fault.message,
    }
    return {"condition type: ": fault.type, "with condition details ": details}


def documented_reason(fault: LogFault) -> str:
    """HyperPod's name of a group of XIDs; else our own of the fault."""
    if fault.type != GPU_UNHEALTHY or not fault.reason.startswith(("Xid", "SXid")):
        return fault.reason
    match fault.action:
        case Action.REPLACE:
            return "NvidiaGpuXidErrorPendingReplacement"
        case Action.RESET_GPU | Action.REBOOT:
            return "NvidiaGpuXidErrorPendingReboot"
        case Action.RESTART_JOB:
            return "NvidiaGpuXidRestartApp" if fault.reason == "Xid94" else "XidUserAppError"
        case Action.NONE:
            return fault.reason
