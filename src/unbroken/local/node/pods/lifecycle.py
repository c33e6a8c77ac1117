"""Life of a pod from its containers, and the status that the API shows. Pure.

    step(event, now) -> effects          deadline() -> when to send the next Tick

The order is kubelet's (v1.33, kuberuntime_manager.go computePodActions): volumes, init containers
one by one, sidecars among them that stay, then all others. Restarts have a back-off. At the pod's
end or deletion everything stops within the grace period, sidecars last.

Phases, conditions and their words in the status are those of kubelet v1.33 (kubelet_pods.go
getPhase, status/generate.go).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from unbroken.core.tick import Tick

from .container import RETRY_SECONDS, Container, Role, Stage
from .events import (
    Deleted,
    Effect,
    Ended,
    Event,
    Exit,
    Finished,
    HookAnswered,
    Note,
    Object,
    Prepare,
    Prepared,
    PrepareFailed,
    ProbeAnswered,
    Refused,
    Rejected,
    Started,
)

DEFAULT_GRACE_SECONDS = 30.0
NEVER = float("inf")


class Ending(Enum):
    """Why a pod is being brought to its end."""

    COMPLETED = "completed"
    """Its containers have ended and are not restarted."""
    DELETED = "deleted"
    DEADLINE = "deadline"
    """activeDeadlineSeconds have passed."""
    REJECTED = "rejected"
    """The node did not take it."""


class PodLifecycle:
    """State machine of one pod; nothing but `step`, `restore` and `set_pod` changes it."""

    def __init__(self, pod: Object, start_time: float) -> None:
        self.pod = pod
        self.start_time = start_time
        """Time at which the node accepted it, in seconds since the epoch."""
        self.ending: Ending | None = None
        self.end_reason = ""
        self.end_message = ""
        """Reason and message of the pod's phase."""
        self.is_prepared = False
        self.is_initialized = False
        """All init containers are done once; they do not run again."""
        self.is_finished = False
        self._prepare_at = 0.0
        self._stop_by = NEVER
        self._problem = ""
        self.init = self._containers("initContainers")
        self.main = self._containers("containers")
        self._by_name = {c.name: c for c in (*self.init, *self.main)}

    def _containers(self, field: str) -> list[Container]:
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        title = f"{metadata['name']}_{metadata.get('namespace', 'default')}({metadata['uid']})"
        policy = spec.get("restartPolicy") or "Always"
        made = []
        for container in spec.get(field) or ():
            role = Role.MAIN
            if field == "initContainers":
                is_sidecar = container.get("restartPolicy") == "Always"
                role = Role.SIDECAR if is_sidecar else Role.INIT
            made.append(Container(container, role, policy, title, self.grace_seconds))
        return made

    @property
    def grace_seconds(self) -> float:
        """terminationGracePeriodSeconds of the pod."""
        grace = self.pod["spec"].get("terminationGracePeriodSeconds")
        return DEFAULT_GRACE_SECONDS if grace is None else float(grace)

    @property
    def all(self) -> list[Container]:
        """Init containers in order, then the others."""
        return [*self.init, *self.main]

    def container(self, name: str) -> Container:
        """The container of that name; KeyError."""
        return self._by_name[name]

    def set_pod(self, pod: Object) -> None:
        """Take the changed object: readiness gates and the deadline are read from it again."""
        self.pod = pod

    def restore(
        self, name: str, history: Sequence[tuple[str, Exit]], run: Started, now: float
    ) -> None:
        """Take over a run from an earlier runner; one that has ended gets `Ended` next.

        `history` holds the ends of the runs before it, as far as they are known.
        """
        container = self._by_name[name]
        if history:
            container.current_id, container.current = history[-1]
        container.restore(run.attempt, run.container_id, run.at, now)
        known = (self.pod.get("status") or {}).get("containerStatuses") or ()
        container.was_ready = any(s["name"] == name and s.get("ready") for s in known)
        if container.role is Role.MAIN:
            self.is_initialized = True

    def restore_end(self) -> None:
        """The pod had come to its end before; nothing of it runs again."""
        self.ending, self.is_finished = Ending.COMPLETED, True

    # --- events

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take an event and return the effects to carry out now."""
        effects = self._take(event, now)
        if not self.is_finished:
            effects += self._advance(now)
        return effects

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Tick():
                return []
            case Prepared():
                self.is_prepared = True
            case PrepareFailed(message):
                return self._retry_prepare(message, now)
            case Rejected(reason, message):
                self.ending = Ending.REJECTED
                self.end_reason, self.end_message = reason, message
                return [Note(True, reason, message)]
            case Deleted(grace):
                return self._delete(grace, now)
            case _:
                return self._take_container_event(event, now)
        return []

    def _take_container_event(
        self, event: Started | Refused | Ended | ProbeAnswered | HookAnswered, now: float
    ) -> list[Effect]:
        container = self._by_name[event.name]
        match event:
            case Started(_, attempt, container_id, at):
                assert attempt == container.attempt, "only the newest run starts"
                return container.run(container_id, at, now)
            case Refused(_, _, reason, message):
                return container.refuse(reason, message, now)
            case Ended(_, attempt, container_id, ended):
                return self._end(container, attempt, container_id, ended)
            case ProbeAnswered():
                return container.answer_probe(event, now)
            case HookAnswered():
                return container.answer_hook(event, now)

    def _end(
        self, container: Container, attempt: int, container_id: str, ended: Exit
    ) -> list[Effect]:
        if attempt != container.attempt:
            return []
        container.end(container_id, ended)
        if ended.reason != "StartError":
            return []
        return [Note(True, "Failed", f"Error: {ended.message}", container.field_path)]

    def _retry_prepare(self, message: str, now: float) -> list[Effect]:
        self._prepare_at = now + RETRY_SECONDS
        is_news, self._problem = message != self._problem, message
        return [Note(True, "FailedMount", message)] if is_news else []

    def _delete(self, grace: float, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.ending is None:
            effects += [
                Note(False, "Killing", f"Stopping container {c.name}", c.field_path)
                for c in self.all
                if c.is_alive
            ]
        if self.ending in (None, Ending.COMPLETED):
            self.ending = Ending.DELETED
        return effects + self._stop_all(grace, now)

    def _stop_all(self, grace: float, now: float) -> list[Effect]:
        """Stop all but sidecars, which follow when the others are gone; sooner if asked again."""
        self._stop_by = min(self._stop_by, now + max(grace, 0.0))
        for container in self.all:
            container.give_up()
        return [
            effect
            for container in self.all
            if container.role is not Role.SIDECAR
            for effect in container.stop(self._stop_by - now, now)
        ]

    # --- what is to be done

    def _advance(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.ending is None:
            effects += self._watch_deadline(now)
        if self.ending is None:
            effects += self._prepare(now)
        if self.ending is None and self.is_prepared:
            effects += self._run(now)
        if self.ending is not None:
            effects += self._stop_sidecars(now)
        for container in self.all:
            effects += container.kill_if_due(now)
            effects += container.probe(now)
        if self.ending is not None and not any(c.is_alive for c in self.all):
            self.is_finished = True
            effects.append(Finished())
        return effects

    def _deadline_at(self) -> float:
        seconds = self.pod["spec"].get("activeDeadlineSeconds")
        return NEVER if seconds is None else self.start_time + float(seconds)

    def _watch_deadline(self, now: float) -> list[Effect]:
        if now < self._deadline_at():
            return []
        # Words of kubelet v1.33, active_deadline.go.
        self.ending, self.end_reason = Ending.DEADLINE, "DeadlineExceeded"
        self.end_message = "Pod was active on the node longer than the specified deadline"
        note = Note(False, self.end_reason, self.end_message)
        return [note, *self._stop_all(self.grace_seconds, now)]

    def _prepare(self, now: float) -> list[Effect]:
        if self.is_prepared or now < self._prepare_at:
            return []
        self._prepare_at = NEVER
        return [Prepare()]

    def _run(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self._initialize(now, effects):
            return effects
        self.is_initialized = True
        for container in self.main:
            effects += container.advance(now)
            # The next container is started after the hook of this one, as kubelet does.
            if container.stage is Stage.STARTING or container.is_post_start_pending:
                break
        if all(c.stage is Stage.ENDED and not c.is_restarted for c in self.main):
            self.ending = Ending.COMPLETED
            effects += self._stop_all(self.grace_seconds, now)
        return effects

    def _initialize(self, now: float, effects: list[Effect]) -> bool:
        """Bring init containers on; True when the main containers may run."""
        for container in self.init:
            if container.role is Role.SIDECAR:
                effects += container.advance(now)
                if not self.is_initialized and not container.is_started:
                    return False
            elif not self.is_initialized and not container.has_succeeded:
                effects += container.advance(now)
                if container.stage is Stage.ENDED:
                    self.ending = Ending.COMPLETED
                    effects += self._stop_all(self.grace_seconds, now)
                return False
        return True

    def _stop_sidecars(self, now: float) -> list[Effect]:
        """Stop the sidecars, the last one first, when all other containers have ended."""
        if any(c.is_alive for c in self.all if c.role is not Role.SIDECAR):
            return []
        for container in reversed(self.init):
            if container.is_alive:
                return container.stop(self._stop_by - now, now)
        return []

    def deadline(self) -> float | None:
        """Return when the next Tick is due; None: only events can change anything."""
        if self.is_finished:
            return None
        times = [c.deadline() for c in self.all if self._is_timed(c)]
        if self.ending is None:
            times += [self._deadline_at(), *([] if self.is_prepared else [self._prepare_at])]
        first = min(times, default=NEVER)
        return None if first == NEVER else first

    def _is_timed(self, container: Container) -> bool:
        """Waiting containers have a time of their own only when their turn has come."""
        if container.stage is not Stage.WAITING:
            return True
        return container.start_at > 0 and self.ending is None


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
