"""Driver of one pod on its node: feeds its machine with events and carries out its orders.

The worker lives until the pod has left the API. Cancelled, it leaves the containers running; the
next runner's worker finds them by the files on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path

from lightkube.resources.core_v1 import ConfigMap, Secret

from unbroken.core.tick import Tick
from unbroken.errors import UnbrokenError, WorldError
from unbroken.kube import clock
from unbroken.local.node.context import NodeContext
from unbroken.local.node.processes.process import Run
from unbroken.local.node.processes.supervisor import SIGKILL_ALL, SIGTERM
from unbroken.log_lines import Log
from unbroken.runtime.drive import Inbox

from .commands import HOOK_SECONDS, Target, perform
from .container_start import ContainerStart
from .environment import ConfigProblem, references
from .events import (
    Create,
    Deleted,
    Effect,
    Ended,
    Event,
    Exit,
    Finished,
    Hook,
    HookAnswered,
    HookKind,
    Kill,
    Note,
    Object,
    Prepare,
    Prepared,
    PrepareFailed,
    Probe,
    ProbeAnswered,
    Refused,
    Rejected,
    Started,
    Terminate,
)
from .lifecycle import PodLifecycle
from .pod_files import PodFiles, container_id, ended_before, termination_message
from .probes import timeout_seconds
from .status import Addresses
from .status_writer import StatusWriter
from .volumes import VolumeProblem

log = Log(__name__)

REFRESH_RETRY_SECONDS = 1.0
"""Seconds until volumes are made again after the API server or the disk has failed."""


class PodWorker:
    """Runs one pod. Start `run` in a task of its own, and pass changes to it."""

    def __init__(self, node: NodeContext, pod: Object, rejection: Rejected | None = None) -> None:
        self.node = node
        self.pod = pod
        self.files = PodFiles(node.directory / "pods" / pod["metadata"]["uid"])
        started = (pod.get("status") or {}).get("startTime")
        self.machine = PodLifecycle(pod, clock.parse_time(started) if started else node.clock())
        if is_over(pod):
            self.machine.restore_end()
        self.address = ""
        self.volumes: dict[str, Path] = {}
        self._events: Inbox[Event] = Inbox(self.machine.deadline, node.clock)
        self._runs: dict[str, Run] = {}
        self._cgroups: dict[str, list[str]] = {}
        self._is_gone = False
        self._source_changed = asyncio.Event()
        """Set when an object has changed that a volume of the pod is made from."""
        self._status = StatusWriter(node, self.machine)
        self._tasks = asyncio.TaskGroup()
        self._spawned: set[asyncio.Task[None]] = set()
        self._ended: dict[str, asyncio.Event] = {}
        if rejection is not None:
            self._events.put_nowait(rejection)

    # --- input and questions

    def changed(self, pod: Object) -> None:
        """The API has a newer version of the pod."""
        old, new = self.pod["metadata"], pod["metadata"]
        if any(old.get(field) != new.get(field) for field in ("labels", "annotations")):
            self._source_changed.set()
        self.pod = pod
        self._status.observed(pod)
        if pod["metadata"].get("deletionTimestamp"):
            grace = pod["metadata"].get("deletionGracePeriodSeconds")
            self._events.put_nowait(Deleted(float(grace or 0)))
        self._events.put_nowait(Tick())

    def object_changed(self, kind: type[ConfigMap | Secret], namespace: str, name: str) -> None:
        """A ConfigMap or Secret has changed."""
        maps, secrets = references({"volumes": self.pod["spec"].get("volumes")})
        if namespace == self.pod["metadata"]["namespace"] and name in (
            maps if kind is ConfigMap else secrets
        ):
            self._source_changed.set()

    def gone(self) -> None:
        """The pod has left the API: whatever runs of it is killed."""
        self._is_gone = True
        self._events.put_nowait(Deleted(0.0))

    def target(self, name: str) -> Target | None:
        """A container as a place to run commands in; None while it does not run."""
        run = self._runs.get(name)
        if run is None:
            return None
        return Target(
            run=run,
            spec=self.machine.container(name).spec,
            pod_ip=self.address or self.node.address,
            isolation=run.details["isolation"],
            cgroups=self._cgroups.get(name, ()),
        )

    def log_path(self, name: str, *, previous: bool) -> Path | None:
        """The log of a container's newest run, or of the one before."""
        attempts = self.files.attempts(name)
        position = -2 if previous else -1
        if len(attempts) < -position:
            return None
        return self.files.run_directory(name, attempts[position]) / "log"

    def end_of(self, name: str, *, previous: bool) -> asyncio.Event:
        """Set when the run that is the container's newest now, or was before it, has ended."""
        if name in self._runs and not previous:
            return self._ended.setdefault(name, asyncio.Event())
        ended = asyncio.Event()
        ended.set()
        return ended

    # --- life

    async def run(self) -> None:
        """Live until the pod is gone and nothing of it is left."""
        try:
            async with self._tasks:
                self._restore()
                self._spawn(self._status.run())
                await self._live()
                for task in self._spawned:
                    task.cancel()
        finally:
            for run in self._runs.values():
                run.close()
        if self._is_gone:
            self.files.discard()
            if self.address:
                self.node.addresses.free(self.address)

    async def _live(self) -> None:
        self._events.put_nowait(Tick())
        async for event in self._events:
            for effect in self.machine.step(event, self.node.clock()):
                self._carry_out(effect)
            if self._events.empty():
                self._status.dirty(Addresses(self.node.address, self.address))
            if self._is_gone and self.machine.is_finished:
                return

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Prepare():
                self._spawn(self._prepare())
            case Create(name, attempt):
                self._spawn(self._create(name, attempt))
            case Terminate(name, _):
                self._signal(name, SIGTERM)
            case Kill(name, _):
                self._signal(name, SIGKILL_ALL)
            case Probe():
                self._spawn(self._probe(effect))
            case Hook():
                self._spawn(self._hook(effect))
            case Note():
                self.node.record(self.pod, effect)
            case Finished():
                log.info("pod finished", pod=self._title())

    def _signal(self, name: str, number: int) -> None:
        if run := self._runs.get(name):
            run.signal(number)

    def _title(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    # --- taking over

    def _restore(self) -> None:
        """Find the containers that an earlier runner started."""
        known = self.files.recorded()
        if known is not None:
            self.address = known["ip"]
        if self.machine.is_finished:
            # Ended by somebody else while no runner was here.
            for run in self.files.live_runs():
                run.signal(SIGKILL_ALL)
                run.close()
            self._take_deletion()
            return
        for container in self.machine.all:
            runs = self.files.found_runs(container.name)
            if not runs:
                continue
            attempt, result, directory = runs[-1]
            identity = container_id(directory)
            started = Started(container.name, attempt, identity, result.started_at)
            history = ended_before(runs)
            self.machine.restore(container.name, history, started, self.node.clock())
            if isinstance(result, Exit):
                self._events.put_nowait(self._ended_event(started, directory, result))
            else:
                log.info("container adopted", pod=self._title(), container=container.name)
                self._watch(started, result)
        self._take_deletion()

    def _take_deletion(self) -> None:
        """The deletion of an adopted pod began earlier: only what is left of its grace counts."""
        metadata = self.pod["metadata"]
        if not metadata.get("deletionTimestamp"):
            return
        grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
        if self._runs:
            left = clock.parse_time(metadata["deletionTimestamp"]) - self.node.clock()
            grace = min(grace, max(0.0, left))
        self._events.put_nowait(Deleted(grace))

    # --- effects

    async def _prepare(self) -> None:
        try:
            await self._starter().prepare(self)
        except (WorldError, ConfigProblem, OSError) as error:
            self._events.put_nowait(PrepareFailed(str(error)))
        else:
            self._events.put_nowait(Prepared())
            self._spawn(self._refresh_volumes())

    async def _refresh_volumes(self) -> None:
        """Make the volumes again after each change of an object that they are made from.

        Volumes stay as they are while an object or a key is missing, as with kubelet.
        """
        while True:
            await self._source_changed.wait()
            self._source_changed.clear()
            try:
                await self._starter().prepare(self)
            except (VolumeProblem, ConfigProblem) as problem:
                self.node.record(self.pod, Note(True, "FailedMount", str(problem)))
            except (WorldError, OSError) as error:
                log.warning("volumes not refreshed", pod=self._title(), error=error)
                self._source_changed.set()
                await clock.pause(REFRESH_RETRY_SECONDS)

    def _starter(self) -> ContainerStart:
        return ContainerStart(self.node, self.pod, self.files)

    async def _create(self, name: str, attempt: int) -> None:
        container = self.machine.container(name).spec
        try:
            started = await self._starter().start(self, container, attempt)
        except ConfigProblem as problem:
            self._events.put_nowait(Refused(name, attempt, problem.reason, str(problem)))
            return
        except (UnbrokenError, OSError) as error:
            log.warning("container not created", pod=self._title(), container=name, error=error)
            self._events.put_nowait(Refused(name, attempt, "CreateContainerError", str(error)))
            return
        self._cgroups[name] = started.cgroups
        event = Started(name, attempt, started.container_id, started.result.started_at)
        if isinstance(started.result, Exit):
            directory = self.files.run_directory(name, attempt)
            self._events.put_nowait(self._ended_event(event, directory, started.result))
            return
        self._events.put_nowait(event)
        self._watch(event, started.result)

    def _watch(self, started: Started, run: Run) -> None:
        self._runs[started.name] = run
        self._spawn(self._await_end(started, run))

    async def _await_end(self, started: Started, run: Run) -> None:
        ended = await run.ended()
        del self._runs[started.name]
        run.close()
        self.node.limits.remove(started.container_id)
        if (event := self._ended.pop(started.name, None)) is not None:
            event.set()
        self._events.put_nowait(self._ended_event(started, run.directory, ended))

    def _ended_event(self, started: Started, directory: Path, ended: Exit) -> Ended:
        spec = self.machine.container(started.name).spec
        known = Exit(
            ended.exit_code,
            ended.reason,
            termination_message(directory, spec, ended),
            ended.started_at,
            ended.finished_at,
        )
        return Ended(started.name, started.attempt, started.container_id, known)

    async def _probe(self, probe: Probe) -> None:
        spec = self.machine.container(probe.name).spec[f"{probe.kind.value}Probe"]
        is_ok, text = await self._perform(probe.name, spec, timeout_seconds(spec))
        answer = ProbeAnswered(probe.name, probe.attempt, probe.kind, is_ok, text)
        self._events.put_nowait(answer)

    async def _hook(self, hook: Hook) -> None:
        spec = self.machine.container(hook.name).spec["lifecycle"][hook.kind.value]
        seconds = HOOK_SECONDS
        if hook.kind is HookKind.PRE_STOP:
            seconds = max(1.0, self.machine.container(hook.name).kill_at - self.node.clock())
        is_ok, text = await self._perform(hook.name, spec, seconds)
        answer = HookAnswered(hook.name, hook.attempt, hook.kind, is_ok, text)
        self._events.put_nowait(answer)

    async def _perform(self, name: str, action: Object, seconds: float) -> tuple[bool, str]:
        target = self.target(name)
        if target is None:
            return False, "the container has ended"
        return await perform(action, target, self.node.launcher, self.node.session, seconds)


def is_over(pod: Object) -> bool:
    """The pod has come to its end; it never runs again."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
