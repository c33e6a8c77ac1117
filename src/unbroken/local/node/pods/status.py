"""A pod's status as kubelet writes it, from the state of its machine: pure.

Phases, conditions and their words are those of kubelet v1.33 (kubelet_pods.go getPhase,
status/generate.go).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from .container import Container, Role, Stage
from .events import Exit, Object
from .lifecycle import Ending, PodLifecycle


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a pod and its node."""

    host: str
    pod: str = ""
    """Empty until the pod has its address."""


def timestamp(seconds: float) -> str:
    """metav1.Time: RFC 3339, whole seconds, UTC."""
    return f"{datetime.fromtimestamp(int(seconds), UTC):%Y-%m-%dT%H:%M:%SZ}"


def pod_status(machine: PodLifecycle, addresses: Addresses, now: float) -> Object:
    """The whole status, but for conditions that others own."""
    if machine.ending is Ending.REJECTED:
        return {
            "phase": "Failed",
            "reason": machine.end_reason,
            "message": machine.end_message,
            "startTime": timestamp(machine.start_time),
        }
    phase = pod_phase(machine)
    status: Object = {
        "phase": phase,
        "conditions": _conditions(machine, phase, addresses, now),
        "hostIP": addresses.host,
        "hostIPs": [{"ip": addresses.host}],
        "startTime": timestamp(machine.start_time),
        "containerStatuses": [container_status(c, machine) for c in machine.main],
    }
    if addresses.pod:
        status |= {"podIP": addresses.pod, "podIPs": [{"ip": addresses.pod}]}
    if machine.init:
        status["initContainerStatuses"] = [container_status(c, machine) for c in machine.init]
    if machine.ending is Ending.DEADLINE:
        status |= {"reason": machine.end_reason, "message": machine.end_message}
    return status


# --- phase


def pod_phase(machine: PodLifecycle) -> str:
    """Pending, Running, Succeeded or Failed."""
    if machine.is_finished:
        return _final_phase(machine)
    policy = machine.pod["spec"].get("restartPolicy") or "Always"
    failed_init = [c for c in machine.init if c.role is Role.INIT and _has_failed(c)]
    if failed_init and policy == "Never":
        return "Pending" if any(c.is_alive for c in machine.all) else "Failed"
    if not machine.is_initialized or any(_never_ran(c) for c in machine.main):
        return "Pending"
    return "Running"


def _final_phase(machine: PodLifecycle) -> str:
    """Final phase of a pod of which nothing runs any more."""
    if machine.ending in (Ending.DEADLINE, Ending.REJECTED):
        return "Failed"
    has_failed = any(not c.has_succeeded for c in (*machine.main, *_plain(machine.init)))
    return "Failed" if has_failed else "Succeeded"


def _plain(containers: Iterable[Container]) -> list[Container]:
    return [c for c in containers if c.role is Role.INIT]


def _has_failed(container: Container) -> bool:
    return container.stage is Stage.ENDED and not container.has_succeeded


def _never_ran(container: Container) -> bool:
    return not _is_shown_running(container) and container.current is None


# --- containers


def container_status(container: Container, machine: PodLifecycle) -> Object:
    """One entry of containerStatuses."""
    state, state_id = _state(container, machine)
    last: Object = {}
    if container.current is not None and "terminated" not in state:
        last = _terminated(container.current, container.current_id)
    elif container.last is not None:
        last = _terminated(container.last, container.last_id)
    status: Object = {
        "name": container.name,
        "state": state,
        "lastState": last,
        "ready": container.is_ready,
        "restartCount": _restart_count(container),
        "image": container.spec.get("image", ""),
        "imageID": "",
        "started": container.is_started,
    }
    shown_id = state_id or container.container_id
    if shown_id:
        status["containerID"] = f"unbroken://{shown_id}"
    return status


def _restart_count(container: Container) -> int:
    """Runs after the first; one that is only about to start does not count."""
    runs = container.attempt - (container.stage is Stage.STARTING)
    return max(runs, 0)


def _is_shown_running(container: Container) -> bool:
    """A container waits for the end of its postStart hook before it is called running."""
    return container.stage is Stage.RUNNING and not container.is_post_start_pending


def _state(container: Container, machine: PodLifecycle) -> tuple[Object, str]:
    if _is_shown_running(container):
        running = {"startedAt": timestamp(container.started_at)}
        return {"running": running}, container.container_id
    if container.current is not None and not container.waiting_reason:
        return _terminated(container.current, container.current_id), container.current_id
    if container.current is not None and container.stage is Stage.ENDED:
        return _terminated(container.current, container.current_id), container.current_id
    if machine.is_finished and container.current is None and machine.is_initialized:
        # Words of kubelet v1.33, status_manager.go TerminatePod.
        lost = {
            "exitCode": 137,
            "reason": "ContainerStatusUnknown",
            "message": "The container could not be located when the pod was terminated",
            "startedAt": None,
            "finishedAt": None,
        }
        return {"terminated": lost}, ""
    default = "PodInitializing" if machine.init else "ContainerCreating"
    waiting = {"reason": container.waiting_reason or default}
    if container.waiting_message:
        waiting["message"] = container.waiting_message
    return {"waiting": waiting}, ""


def _terminated(ended: Exit, container_id: str) -> Object:
    reason = ended.reason or ("Error" if ended.exit_code else "Completed")
    terminated: Object = {
        "exitCode": ended.exit_code,
        "reason": reason,
        "startedAt": timestamp(ended.started_at),
        "finishedAt": timestamp(ended.finished_at),
        "containerID": f"unbroken://{container_id}",
    }
    if ended.message:
        terminated["message"] = ended.message
    return {"terminated": terminated}


# --- conditions


def _conditions(
    machine: PodLifecycle, phase: str, addresses: Addresses, now: float
) -> list[Object]:
    has_sandbox = machine.is_prepared and bool(addresses.pod) and not machine.is_finished
    wanted = [
        _condition("PodReadyToStartContainers", has_sandbox),
        _initialized(machine, phase),
        _ready(machine, phase),
        _containers_ready(machine, phase),
    ]
    known = {c["type"]: c for c in (machine.pod.get("status") or {}).get("conditions") or ()}
    scheduled = known.get("PodScheduled") or _condition("PodScheduled", True)
    return [_dated(condition, known, now) for condition in (*wanted, scheduled)]


def _condition(kind: str, is_true: bool, reason: str = "", message: str = "") -> Object:
    condition: Object = {
        "type": kind,
        "status": "True" if is_true else "False",
        "lastProbeTime": None,
    }
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message
    return condition


def _dated(condition: Object, known: Mapping[str, Object], now: float) -> Object:
    """With the time of its last change: the known one, unless the status changes."""
    before = known.get(condition["type"])
    since = before.get("lastTransitionTime") if before else None
    if before is None or before["status"] != condition["status"] or since is None:
        since = timestamp(now)
    return {**condition, "lastTransitionTime": since}


def _initialized(machine: PodLifecycle, phase: str) -> Object:
    if phase == "Succeeded":
        return _condition("Initialized", True, "PodCompleted")
    missing = [
        c.name
        for c in machine.init
        if not machine.is_initialized
        and not (c.has_succeeded if c.role is Role.INIT else c.is_started)
    ]
    if not missing:
        return _condition("Initialized", True)
    text = f"containers with incomplete status: [{' '.join(missing)}]"
    return _condition("Initialized", False, "ContainersNotInitialized", text)


def _containers_ready(machine: PodLifecycle, phase: str) -> Object:
    if phase in ("Succeeded", "Failed"):
        reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"
        return _condition("ContainersReady", False, reason)
    counted = [c for c in machine.all if c.role is not Role.INIT]
    unready = [c.name for c in counted if not c.is_ready]
    if not unready:
        return _condition("ContainersReady", True)
    text = f"containers with unready status: [{' '.join(unready)}]"
    return _condition("ContainersReady", False, "ContainersNotReady", text)


def _ready(machine: PodLifecycle, phase: str) -> Object:
    containers = _containers_ready(machine, phase)
    if containers["status"] != "True":
        return {**containers, "type": "Ready"}
    gates = [g["conditionType"] for g in machine.pod["spec"].get("readinessGates") or ()]
    problems = _closed_gates(gates, (machine.pod.get("status") or {}).get("conditions") or ())
    if not problems:
        return _condition("Ready", True)
    return _condition("Ready", False, "ReadinessGatesNotReady", ", ".join(problems))


def _closed_gates(gates: Sequence[str], conditions: Iterable[Object]) -> list[str]:
    result = {c["type"]: c["status"] for c in conditions}
    problems = []
    for gate in gates:
        if gate not in result:
            text = f'corresponding condition of pod readiness gate "{gate}" does not exist.'
            problems.append(text)
        elif result[gate] != "True":
            text = f'the status of pod readiness gate "{gate}" is not "True", but {result[gate]}'
            problems.append(text)
    return problems
