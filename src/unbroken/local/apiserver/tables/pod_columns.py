"""The status of a pod in one word, as `kubectl get pods` shows it (printPod, v1.33)."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.local.apiserver.http.status import Object

from .durations import age, seconds_of

NODE_LOST = "NodeLost"


@dataclass(slots=True)
class Summary:
    """Contents of the columns READY, STATUS and RESTARTS."""

    status: str
    ready: int = 0
    total: int = 0
    restarts: int = 0
    restarted_at: str | None = None
    """Time of the last end of a container that was started again."""

    def count(self, container: Object) -> None:
        """Add the restarts of a container."""
        self.restarts += container.get("restartCount") or 0
        ended = ((container.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
        if (seconds_of(ended) or 0.0) > (seconds_of(self.restarted_at) or 0.0):
            self.restarted_at = ended

    def restarts_text(self, now: float) -> str:
        """`3 (5m ago)`."""
        if self.restarts and self.restarted_at:
            return f"{self.restarts} ({age(now, self.restarted_at)} ago)"
        return str(self.restarts)


def has_condition(content: Object, name: str) -> bool:
    """True if a condition of the object's status is True."""
    conditions = (content.get("status") or {}).get("conditions") or []
    return any(c.get("type") == name and c.get("status") == "True" for c in conditions)


def summary(pod: Object) -> Summary:
    """Sum up a pod."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    result = Summary(status.get("reason") or status.get("phase") or "")
    result.total = len(spec.get("containers") or []) + len(_sidecars(spec))
    for condition in status.get("conditions") or []:
        if (condition.get("type"), condition.get("reason")) == ("PodScheduled", "SchedulingGated"):
            result.status = "SchedulingGated"
    sidecars = Summary("")
    is_initializing = _initialize(pod, result, sidecars)
    if not is_initializing or has_condition(pod, "Initialized"):
        result.restarts, result.restarted_at = sidecars.restarts, sidecars.restarted_at
        _run(pod, result)
    if "deletionTimestamp" in pod["metadata"]:
        if status.get("reason") == NODE_LOST:
            result.status = "Unknown"
        elif status.get("phase") not in ("Succeeded", "Failed"):
            result.status = "Terminating"
    return result


def _sidecars(spec: Object) -> set[str]:
    """Return the init containers that keep running with the others."""
    containers = spec.get("initContainers") or []
    return {c.get("name", "") for c in containers if c.get("restartPolicy") == "Always"}


def _initialize(pod: Object, found: Summary, sidecars: Summary) -> bool:
    """Take in the init containers, up to the first that is not done; whether there is one."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    lasting = _sidecars(spec)
    for index, container in enumerate(status.get("initContainerStatuses") or []):
        found.count(container)
        is_sidecar = container.get("name") in lasting
        if is_sidecar:
            sidecars.count(container)
        state = container.get("state") or {}
        terminated, waiting = state.get("terminated"), state.get("waiting") or {}
        if terminated is not None and not terminated.get("exitCode"):
            continue
        if is_sidecar and container.get("started"):
            found.ready += bool(container.get("ready"))
            continue
        if terminated is not None:
            found.status = f"Init:{_ending(terminated)}"
        elif waiting.get("reason") and waiting["reason"] != "PodInitializing":
            found.status = f"Init:{waiting['reason']}"
        else:
            found.status = f"Init:{index}/{len(spec.get('initContainers') or [])}"
        return True
    return False


def _run(pod: Object, found: Summary) -> None:
    """Count the containers; the first one with a reason gives the status."""
    has_running = False
    for container in reversed((pod.get("status") or {}).get("containerStatuses") or []):
        found.count(container)
        state = container.get("state") or {}
        if (state.get("waiting") or {}).get("reason"):
            found.status = state["waiting"]["reason"]
        elif state.get("terminated") is not None:
            found.status = _ending(state["terminated"])
        elif container.get("ready") and state.get("running") is not None:
            has_running = True
            found.ready += 1
    if found.status == "Completed" and has_running:
        found.status = "Running" if has_condition(pod, "Ready") else "NotReady"


def _ending(terminated: Object) -> str:
    if terminated.get("reason"):
        return str(terminated["reason"])
    if terminated.get("signal"):
        return f"Signal:{terminated['signal']}"
    return f"ExitCode:{terminated.get('exitCode') or 0}"


def readiness_gates(pod: Object) -> str:
    """Return the number of the pod's own readiness conditions that are met: `1/2`."""
    gates = (pod.get("spec") or {}).get("readinessGates") or []
    if not gates:
        return "<none>"
    met = sum(has_condition(pod, gate.get("conditionType", "")) for gate in gates)
    return f"{met}/{len(gates)}"


def row_conditions(pod: Object) -> list[Object]:
    """Return the row conditions of a pod that has ended, by which clients can hide it."""
    phase = (pod.get("status") or {}).get("phase")
    messages = {
        "Succeeded": "The pod has completed successfully.",
        "Failed": "The pod failed.",
    }
    if phase not in messages:
        return []
    message = messages[phase]
    return [{"type": "Completed", "status": "True", "reason": phase, "message": message}]
