"""The life of one pod on its node: pure, driven by events, without clock or process.

    step(event, now) -> effects          deadline() -> when to send the next Tick

The order is kubelet's (v1.33, kuberuntime_manager.go computePodActions): volumes, init containers
one by one, sidecars among them that stay, then all others. Restarts have a back-off. At the pod's
end or deletion everything stops within the grace period, sidecars last. Status objects are built
from this state in `status`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
