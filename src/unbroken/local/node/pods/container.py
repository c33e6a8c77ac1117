"""Life of one container, its probes included. Pure.

A container waits, starts, runs, and ends; then it starts again or it does not.  Rules are kubelet's
(v1.33: kuberuntime_manager.go, kuberuntime_container.go, client-go flowcontrol/backoff.go).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .events import (
    Create,
    Effect,
    Exit,
    Hook,
    HookAnswered,
    HookKind,
    Kill,
    Note,
    Object,
    Probe,
    ProbeAnswered,
    ProbeKind,
    Terminate,
)

BACK_OFF_SECONDS, BACK_OFF_MAX_SECONDS = 10.0, 300.0
"""First and longest wait before a restart (kubelet, containerBackOff, MaxCrashLoopBackOff)."""
BACK_OFF_RESET_SECONDS = 600.0
"""A container that ran this long starts over (backoff.go: twice the longest wait)."""
MIN_GRACE_SECONDS = 2.0
"""Left for SIGTERM after a preStop hook that took all (minimumGracePeriodInSeconds)."""
RETRY_SECONDS = 10.0
"""Seconds until something that could not be made is tried again (pod_workers.go, backOffPeriod)."""


class Role(Enum):
    """Why a container is in the pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    """An init container that is always restarted and runs with the others."""
    MAIN = "main"


class Stage(Enum):
    """Stage of a container's life."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class Stopping(Enum):
    """Progress of stopping a running container."""

    NO = "no"
    HOOK = "hook"
    """preStop runs."""
    ASKED = "asked"
    """SIGTERM was sent."""
    KILLED = "killed"


@dataclass(slots=True)
class Container:
    """State of one container."""

    spec: Object
    role: Role
    restart_policy: str
    pod_title: str
    """`name_namespace(uid)`, as kubelet's messages have it."""
    grace_seconds: float
    """Grace period of the pod."""
    stage: Stage = Stage.WAITING
    attempt: int = -1
    """Number of the newest run, from 0; equals the restart count once it has run."""
    container_id: str = ""
    started_at: float = 0.0
    waiting_reason: str = ""
    """Empty: the pod's usual reason."""
    waiting_message: str = ""
    current: Exit | None = None
    """End of the newest run."""
    current_id: str = ""
    last: Exit | None = None
    """End of the run before."""
    last_id: str = ""
    start_at: float = 0.0
    """Earliest time of its next start."""
    stopping: Stopping = Stopping.NO
    kill_at: float = field(default=float("inf"))
    is_post_start_pending: bool = False
    probes: dict[ProbeKind, ProbeState] = field(default_factory=dict)
    was_ready: bool = False
    """Readiness that an earlier runner saw, until the probe reports another."""
    _back_off: float = 0.0
    _backed_off_at: float = field(default=float("-inf"))
    _wants_stop: float | None = None

    @property
    def name(self) -> str:
        """Name in the pod."""
        return str(self.spec["name"])

    @property
    def field_path(self) -> str:
        """Return the path by which events refer to it."""
        kind = "containers" if self.role is Role.MAIN else "initContainers"
        return f"spec.{kind}{{{self.name}}}"

    @property
    def is_started(self) -> bool:
        """It runs and its startup probe, if any, has passed."""
        if self.stage is not Stage.RUNNING or self.is_post_start_pending:
            return False
        startup = self.probes.get(ProbeKind.STARTUP)
        return startup is None or startup.is_passed

    @property
    def is_ready(self) -> bool:
        """Return the readiness for the status."""
        if self.role is Role.INIT:
            return self.has_succeeded
        if not self.is_started:
            return False
        readiness = self.probes.get(ProbeKind.READINESS)
        if readiness is None:
            return "readinessProbe" not in self.spec
        return readiness.is_passed if readiness.is_decided else self.was_ready

    @property
    def has_succeeded(self) -> bool:
        """The newest run ended with 0."""
        return self.stage is Stage.ENDED and self.current is not None and not self.current.exit_code

    @property
    def is_restarted(self) -> bool:
        """After the end that it has come to, it starts again."""
        if self.role is Role.SIDECAR:
            return True
        failed = self.current is None or self.current.exit_code != 0
        if self.role is Role.INIT:
            return failed and self.restart_policy != "Never"
        return self.restart_policy == "Always" or (failed and self.restart_policy == "OnFailure")

    # --- starting

    def advance(self, now: float) -> list[Effect]:
        """Start it if it is to be started now."""
        if self.stage is Stage.ENDED and self.is_restarted:
            self._back_off_until(now)
            if self.is_backing_off:
                text = f"Back-off restarting failed container {self.name} in pod {self.pod_title}"
                return [Note(True, "BackOff", text, self.field_path)]
        if self.stage is not Stage.WAITING or now < self.start_at:
            return []
        self.stage = Stage.STARTING
        self.attempt += 1
        return [Create(self.name, self.attempt)]

    def _back_off_until(self, now: float) -> None:
        """Decide when the next run may start: at once the first time, then later and later."""
        assert self.current is not None
        ended = self.current.finished_at
        is_fresh = ended - self._backed_off_at > BACK_OFF_RESET_SECONDS
        if not is_fresh and now < ended + self._back_off:
            self.stage = Stage.WAITING
            self.start_at = ended + self._back_off
            self.waiting_reason = "CrashLoopBackOff"
            self.waiting_message = (
                f"back-off {_duration(self._back_off)} restarting failed "
                f"container={self.name} pod={self.pod_title}"
            )
        else:
            self.stage, self.start_at = Stage.WAITING, now
        self._back_off = min(
            BACK_OFF_SECONDS if is_fresh else self._back_off * 2, BACK_OFF_MAX_SECONDS
        )
        self._backed_off_at = max(now, self.start_at)

    @property
    def is_backing_off(self) -> bool:
        """It waits for its next run after a failure."""
        return self.stage is Stage.WAITING and self.waiting_reason == "CrashLoopBackOff"

    def refuse(self, reason: str, message: str, now: float) -> list[Effect]:
        """It could not be made; try again later."""
        self.attempt -= 1
        self.stage = Stage.WAITING
        self.start_at = now + RETRY_SECONDS
        is_news = (self.waiting_reason, self.waiting_message) != (reason, message)
        self.waiting_reason, self.waiting_message = reason, message
        note = Note(True, "Failed", f"Error: {message}", self.field_path)
        return [note] if is_news else []

    def run(self, container_id: str, at: float, now: float) -> list[Effect]:
        """It runs now."""
        self._enter_run(container_id, at)
        self.is_post_start_pending = "postStart" in (self.spec.get("lifecycle") or {})
        effects: list[Effect] = [
            Note(False, "Started", f"Started container {self.name}", self.field_path)
        ]
        if self._wants_stop is not None:
            return [*effects, *self.stop(self._wants_stop - now, now)]
        if self.is_post_start_pending:
            effects.append(Hook(self.name, self.attempt, HookKind.POST_START))
        else:
            self._begin_probes(now)
        return effects

    def _enter_run(self, container_id: str, at: float) -> None:
        self.stage, self.container_id, self.started_at = Stage.RUNNING, container_id, at
        if self.current is not None:
            self.last, self.last_id = self.current, self.current_id
        self.current = None
        self.waiting_reason = self.waiting_message = ""
        self.stopping, self.kill_at = Stopping.NO, float("inf")

    def restore(self, attempt: int, container_id: str, at: float, now: float) -> None:
        """Take over a run that an earlier runner started; its postStart hook is not repeated."""
        self.attempt = attempt
        self._enter_run(container_id, at)
        self._begin_probes(now)

    # --- probes and hooks

    def _begin_probes(self, now: float) -> None:
        specs = {kind: self.spec.get(f"{kind.value}Probe") for kind in ProbeKind}
        if specs[ProbeKind.STARTUP] and not self.is_startup_passed:
            specs = {ProbeKind.STARTUP: specs[ProbeKind.STARTUP]}
        for kind, spec in specs.items():
            if spec and kind not in self.probes:
                self.probes[kind] = ProbeState.begin(kind, spec, self.started_at, now)

    @property
    def is_startup_passed(self) -> bool:
        """True if the startup probe has succeeded in this run."""
        startup = self.probes.get(ProbeKind.STARTUP)
        return startup is not None and startup.is_passed

    def probe(self, now: float) -> list[Effect]:
        """Probes that are due; none while it is being stopped."""
        if self.stage is not Stage.RUNNING or self.stopping is not Stopping.NO:
            return []
        due = [
            probe
            for probe in self.probes.values()
            if probe.due <= now and not (probe.kind is ProbeKind.STARTUP and probe.is_passed)
        ]
        for probe in due:
            probe.take()
        return [Probe(self.name, self.attempt, probe.kind) for probe in due]

    def answer_probe(self, event: ProbeAnswered, now: float) -> list[Effect]:
        """Count a probe's answer; a failed liveness or startup probe stops this run."""
        probe = self.probes.get(event.kind)
        if probe is None or self.stage is not Stage.RUNNING or event.attempt != self.attempt:
            return []
        probe.answer(event.is_ok, now)
        if event.is_ok:
            if event.kind is ProbeKind.STARTUP and probe.is_passed:
                self._begin_probes(now)
            return []
        title = event.kind.value.capitalize()
        effects: list[Effect] = [
            Note(True, "Unhealthy", f"{title} probe failed: {event.message}", self.field_path)
        ]
        if probe.has_failed and event.kind is not ProbeKind.READINESS:
            if self.stopping is not Stopping.NO:
                return effects
            fate = "will be restarted" if self.is_restarted_after_kill else "will be killed"
            text = f"Container {self.name} failed {event.kind.value} probe, {fate}"
            effects.append(Note(False, "Killing", text, self.field_path))
            grace = probe.spec.get("terminationGracePeriodSeconds")
            effects += self.stop(self.grace_seconds if grace is None else float(grace), now)
        return effects

    @property
    def is_restarted_after_kill(self) -> bool:
        """A kill is a failure, and failures restart it."""
        return self.role is Role.SIDECAR or self.restart_policy != "Never"

    def answer_hook(self, event: HookAnswered, now: float) -> list[Effect]:
        """Continue after a hook."""
        if self.stage is not Stage.RUNNING or event.attempt != self.attempt:
            return []
        effects: list[Effect] = []
        if event.kind is HookKind.POST_START and self.is_post_start_pending:
            self.is_post_start_pending = False
            if event.is_ok:
                self._begin_probes(now)
                return []
            effects.append(Note(True, "FailedPostStartHook", event.message, self.field_path))
            text = f"FailedPostStartHook: container {self.name} is stopped"
            effects.append(Note(False, "Killing", text, self.field_path))
            return effects + self.stop(self.grace_seconds, now)
        if event.kind is HookKind.PRE_STOP and self.stopping is Stopping.HOOK:
            if not event.is_ok:
                effects.append(Note(True, "FailedPreStopHook", event.message, self.field_path))
            self.kill_at = max(self.kill_at, now + MIN_GRACE_SECONDS)
            self.stopping = Stopping.ASKED
            effects.append(Terminate(self.name, self.attempt))
        return effects

    # --- stopping

    def stop(self, grace_seconds: float, now: float) -> list[Effect]:
        """Stop this run within `grace_seconds`; asked again with less, it hurries."""
        kill_at = now + max(grace_seconds, 0.0)
        if self.stage is Stage.STARTING:
            self._wants_stop = min(kill_at, self._wants_stop or kill_at)
            return []
        if self.stage is not Stage.RUNNING or self.stopping is Stopping.KILLED:
            return []
        self.kill_at = min(self.kill_at, kill_at)
        if self.stopping is not Stopping.NO or grace_seconds <= 0:
            return self.kill_if_due(now)
        if "preStop" in (self.spec.get("lifecycle") or {}):
            self.stopping = Stopping.HOOK
            return [Hook(self.name, self.attempt, HookKind.PRE_STOP)]
        self.stopping = Stopping.ASKED
        return [Terminate(self.name, self.attempt)]

    def kill_if_due(self, now: float) -> list[Effect]:
        """The grace is over: kill."""
        if self.stage is not Stage.RUNNING or now < self.kill_at:
            return []
        if self.stopping is Stopping.KILLED:
            return []
        if self.stopping is Stopping.HOOK:
            self.stopping, self.kill_at = Stopping.ASKED, now + MIN_GRACE_SECONDS
            return [Terminate(self.name, self.attempt)]
        self.stopping, self.kill_at = Stopping.KILLED, float("inf")
        return [Kill(self.name, self.attempt)]

    def end(self, container_id: str, ended: Exit) -> None:
        """Nothing of the run lives."""
        if self.stage is Stage.STARTING and self.current is not None:
            self.last, self.last_id = self.current, self.current_id
        self.stage, self.current, self.current_id = Stage.ENDED, ended, container_id
        self.container_id = container_id
        self.stopping, self.kill_at, self._wants_stop = Stopping.NO, float("inf"), None
        self.is_post_start_pending = False
        self.probes.clear()
        self.was_ready = False

    def give_up(self) -> None:
        """No further run: what came last is how it ended."""
        if self.stage is Stage.WAITING and self.current is not None:
            self.stage = Stage.ENDED
        self.start_at = float("inf")

    @property
    def is_alive(self) -> bool:
        """Something of it runs, or is about to."""
        return self.stage in (Stage.STARTING, Stage.RUNNING)

    def deadline(self) -> float:
        """Return when something is due next."""
        if self.stage is Stage.WAITING:
            return self.start_at
        if self.stage is not Stage.RUNNING:
            return float("inf")
        if self.stopping is not Stopping.NO:
            return self.kill_at
        due = [
            probe.due
            for probe in self.probes.values()
            if not (probe.kind is ProbeKind.STARTUP and probe.is_passed)
        ]
        return min(due, default=float("inf"))


def _duration(seconds: float) -> str:
    """Return a duration of whole seconds as Go prints it: 10s, 1m20s, 5m0s."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@dataclass(slots=True)
class ProbeState:
    """One probe of one run of a container."""

    kind: ProbeKind
    spec: Object
    due: float
    """Time of its next run; infinite while one is running."""
    is_passed: bool
    """The verdict so far."""
    is_decided: bool = False
    """A threshold was reached at least once."""
    has_failed: bool = False
    """The failure threshold was reached."""
    _last: bool | None = field(default=None)
    _run: int = 0
    _began: float = 0.0

    @staticmethod
    def begin(kind: ProbeKind, spec: Object, started_at: float, now: float) -> ProbeState:
        """A probe of a container that started at `started_at` and may be probed from `now` on."""
        due = max(now, started_at + float(spec.get("initialDelaySeconds") or 0))
        return ProbeState(kind, spec, due, is_passed=kind is ProbeKind.LIVENESS)

    def take(self) -> None:
        """It is being run now."""
        self._began = self.due
        self.due = float("inf")

    def answer(self, is_ok: bool, now: float) -> None:
        """Count an answer; afterwards `is_passed` and `has_failed` are up to date."""
        period = float(self.spec.get("periodSeconds") or 10)
        self.due = max(self._began + period, now)
        self._run = self._run + 1 if self._last is is_ok else 1
        self._last = is_ok
        threshold = self.spec.get("successThreshold") or 1
        if not is_ok:
            threshold = self.spec.get("failureThreshold") or 3
        if self._run < threshold:
            return
        self.is_passed = is_ok
        self.is_decided = True
        self.has_failed = not is_ok


def timeout_seconds(spec: Object) -> float:
    """Return the seconds that one run of a probe may take."""
    return float(spec.get("timeoutSeconds") or 1)
