"""Driver of one pod on its node: feeds its machine with events and carries out its orders.

The worker lives until the pod has left the API. Cancelled, it leaves the containers running; the
next runner's worker finds them by the files on disk.

To start a container it gathers what the pod's spec refers to, and asks the launcher. It keeps the
pod's status in the API equal to its machine's: one patch a change, the latest wins.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lightkube.resources.core_v1 import ConfigMap, Secret

from unbroken.core.checkpoint_memory import SERVICE
from unbroken.core.tick import Tick
from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.kube import clock
from unbroken.kube.errors import Conflict, NotFound
from unbroken.local.node.context import NodeContext, base_environment, with_image, with_own_commands
from unbroken.local.node.processes.isolation import Isolation, Mount, is_below
from unbroken.local.node.processes.process import MARKER, Run
from unbroken.local.node.processes.supervisor import SIGKILL_ALL, SIGTERM
from unbroken.log_lines import Log
from unbroken.runtime.drive import Inbox

from .commands import HOOK_SECONDS, Target, perform
from .container import Stage, timeout_seconds
from .environment import ConfigProblem, EnvironmentSources, command_line, environment, references
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
from .lifecycle import Addresses, PodLifecycle, pod_status
from .volumes import (
    Claims,
    PodFiles,
    VolumeProblem,
    claim_name,
    container_id,
    content,
    ended_before,
    hosts_text,
    mounts,
    provide,
    termination_message,
    without_namespaces,
)

GPU_RESOURCE = "nvidia.com/gpu"
DEFAULT_TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True, slots=True)
class Result:
    """A container that was started, or has failed to."""

    container_id: str
    result: Run | Exit
    cgroups: list[str]


class ContainerStart:
    """Starts containers of one pod as the pod's object is now."""

    def __init__(self, node: NodeContext, pod: Object, files: PodFiles) -> None:
        self._node = node
        self._pod = pod
        self._files = files

    # --- the pod

    async def prepare(self, worker: PodWorker) -> None:
        """Give the pod its address and volumes; WorldError when something is missing."""
        if not worker.address:
            is_on_host = bool(self._pod["spec"].get("hostNetwork"))
            worker.address = self._node.address if is_on_host else self._node.addresses.take()
            self._files.record(self._pod, worker.address, self._gpus())
        hosts = hosts_text(self._pod, worker.address)
        # Also while nothing is served there: the checkpoint memory may be switched on later.
        self._files.write_hosts(f"{hosts}{self._node.address}\t{SERVICE}\n")
        volumes = self._pod["spec"].get("volumes") or ()
        if not volumes:
            return
        around = await self._environment_sources(worker, volumes_only=True)
        claims = await self._claims(volumes)
        for volume in volumes:
            wanted = content(volume, around, claims)
            worker.volumes[volume["name"]] = provide(
                volume["name"], wanted, self._files.directory, self._files.uid
            )

    async def _environment_sources(
        self, worker: PodWorker, *, volumes_only: bool = False
    ) -> EnvironmentSources:
        spec = self._pod["spec"]
        part = {"volumes": spec.get("volumes")} if volumes_only else {**spec, "volumes": None}
        maps, secrets = references(part)
        return EnvironmentSources(
            pod=self._pod,
            pod_ip=worker.address,
            host_ip=self._node.address,
            node_name=self._node.name,
            allocatable=self._node.allocatable,
            config_maps=await self._fetch("configmaps", maps),
            secrets=await self._fetch("secrets", secrets),
            base=base_environment(),
            api_host=self._node.api_host,
            api_port=self._node.api_port,
        )

    async def _fetch(self, plural: str, names: Iterable[str]) -> dict[str, Object | None]:
        namespace = self._pod["metadata"]["namespace"]
        ordered = list(names)
        result = await asyncio.gather(
            *(self._node.api.named(plural, namespace, name) for name in ordered)
        )
        return dict(zip(ordered, result, strict=True))

    async def _claims(self, volumes: Iterable[Object]) -> Claims:
        names = {name for volume in volumes if (name := claim_name(volume, self._pod))}
        claims = await self._fetch("persistentvolumeclaims", names)
        bound = {
            str(claim["spec"]["volumeName"])
            for claim in claims.values()
            if claim and (claim.get("spec") or {}).get("volumeName")
        }
        volumes_of = {
            name: await self._node.api.named("persistentvolumes", None, name) for name in bound
        }
        return Claims(claims, volumes_of)

    # --- a container

    async def start(self, worker: PodWorker, container: Object, attempt: int) -> Result:
        """Start one container; ConfigProblem or WorldError when it cannot be made."""
        refuse_unsupported(container)
        around = await self._environment_sources(worker)
        base = with_image(around.base, container.get("image") or "", self._node.images)
        variables = environment(container, replace(around, base=base))
        variables["PATH"] = with_own_commands(variables["PATH"])
        argv = command_line(container, variables)
        wanted = mounts(container, self._pod, worker.volumes, variables)
        isolation = self._node.launcher.isolation
        without_namespaces(wanted, isolation, variables)
        directory = self._files.new_run(container["name"], attempt)
        identity = os.urandom(32).hex()
        gpus = self._gpu_variables(container)
        variables |= {MARKER: identity, **gpus}
        uid, gid = _user(container, self._pod)
        if uid in (None, os.getuid()):
            # With the pod, not in the machine's own /tmp: there nothing would remove them.
            variables.setdefault("UNBROKEN_LOG_DIR", str(directory / "ranks"))
        cwd = container.get("workingDir") or str(directory / "work")
        groups = self._node.limits.create(identity, container.get("resources") or {})
        request = {
            "directory": str(directory),
            "argv": argv,
            "env": variables,
            "cwd": cwd,
            "isolation": isolation.value,
            "hostname": self._hostname(),
            "mounts": self._all_mounts(wanted, container, directory, cwd),
            "scratch": str(directory / "scratch"),
            "cgroups": groups,
            "tty": bool(container.get("tty")),
            "uid": uid,
            "gid": gid,
        }
        details = {
            MARKER: identity,
            "container_id": identity,
            "cwd": cwd,
            "isolation": isolation.value,
            "cgroups": groups,
            "gpus": gpus.get("CUDA_VISIBLE_DEVICES", ""),
            "uid": uid,
            "gid": gid,
        }
        run = await self._node.launcher.run(request, details, self._node.clock())
        return Result(identity, run, groups)

    def _hostname(self) -> str:
        spec = self._pod["spec"]
        if spec.get("hostNetwork"):
            return ""
        return str(spec.get("hostname") or self._pod["metadata"]["name"])[:63]

    def _all_mounts(
        self, wanted: list[Mount], container: Object, directory: Path, cwd: str
    ) -> list[tuple[str, str, bool]]:
        """The volumes and what every container has: hosts, termination log, working directory."""
        if self._node.launcher.isolation is Isolation.NONE:
            return []
        targets = [mount.target for mount in wanted]
        log = container.get("terminationMessagePath") or DEFAULT_TERMINATION_LOG
        extra = [Mount(str(directory / "termination-log"), os.path.normpath(log))]
        if not self._pod["spec"].get("hostNetwork"):
            extra.append(Mount(str(self._files.directory / "hosts"), "/etc/hosts"))
        if not os.path.isdir(cwd) and not any(is_below(cwd, target) for target in targets):
            extra.append(Mount(str(directory / "work"), os.path.normpath(cwd)))
        made = [*wanted, *(mount for mount in extra if mount.target not in targets)]
        return [(mount.source, mount.target, mount.read_only) for mount in made]

    def _gpus(self) -> list[int]:
        return sorted(gpu for gpu, uid in self._node.gpus.items() if uid == self._files.uid)

    def _gpu_variables(self, container: Object) -> dict[str, str]:
        """Return the variables for the node's GPUs that this container has."""
        limits = (container.get("resources") or {}).get("limits") or {}
        count = int(limits.get(GPU_RESOURCE, 0))
        own = self._gpus()
        before = 0
        for other in self._pod["spec"]["containers"]:
            if other["name"] == container["name"]:
                break
            amounts = (other.get("resources") or {}).get("limits") or {}
            before += int(amounts.get(GPU_RESOURCE, 0))
        listed = ",".join(str(gpu) for gpu in own[before : before + count])
        if not self._node.gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": listed, "NVIDIA_VISIBLE_DEVICES": listed or "void"}


def refuse_unsupported(container: Object) -> None:
    """Say no to what would otherwise silently not happen."""
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if "grpc" in (container.get(name) or {}):
            raise ConfigProblem(f"{name}: this node runs no grpc probes", "CreateContainerError")


def _user(container: Object, pod: Object) -> tuple[int | None, int | None]:
    """User and group to run as; only root can be anyone but itself."""
    context = {
        **(pod["spec"].get("securityContext") or {}),
        **(container.get("securityContext") or {}),
    }
    uid, gid = context.get("runAsUser"), context.get("runAsGroup")
    if os.geteuid() != 0:
        if uid not in (None, os.geteuid()):
            text = f"runAsUser {uid}: unbroken runs as user {os.geteuid()} and cannot change it"
            raise ConfigProblem(text, "CreateContainerError")
        return None, None
    return uid, gid


SETTLE_SECONDS = 0.1
"""A start that is done within this time is not announced before; it saves a write."""
OWNED = (
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)
"""Conditions that the node writes; PodScheduled only if it is missing."""

log = Log(__name__)


class StatusWriter:
    """Writes one pod's status."""

    def __init__(self, node: NodeContext, machine: PodLifecycle) -> None:
        self._node = node
        self._machine = machine
        self._pod = machine.pod
        self._written: Object = dict(machine.pod.get("status") or {})
        self._addresses = Addresses(node.address)
        self._dirty = asyncio.Event()
        self._settled = asyncio.Event()
        self._is_deleted = False
        self._is_final = machine.is_finished
        """The status was complete when the pod was taken over; it stays."""

    def observed(self, pod: Object) -> None:
        """A newer version of the pod, with conditions of others."""
        self._pod = pod
        self._refresh_machine()

    def dirty(self, addresses: Addresses) -> None:
        """The machine has moved."""
        self._addresses = addresses
        if self._is_settling():
            self._settled.clear()
        else:
            self._settled.set()
        self._dirty.set()

    def _is_settling(self) -> bool:
        machine = self._machine
        if machine.is_finished or machine.ending is not None:
            return False
        is_preparing = not machine.is_prepared and machine.deadline() is None
        return is_preparing or any(c.stage is Stage.STARTING for c in machine.all)

    def _refresh_machine(self) -> None:
        """The machine reads conditions from its pod: ours as written, others' as observed."""
        status = self._pod.get("status") or {}
        ours = [c for c in self._written.get("conditions") or () if c["type"] in OWNED]
        seen = {c["type"] for c in ours}
        others = [c for c in status.get("conditions") or () if c["type"] not in seen]
        self._machine.set_pod({**self._pod, "status": {**status, "conditions": ours + others}})

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._dirty.wait()
            if not self._settled.is_set():
                await self._settle()
            self._dirty.clear()
            await self._write_when_possible()

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._settled.wait()
        except TimeoutError:
            self._settled.set()

    async def _write_when_possible(self) -> None:
        try:
            await self._write()
            await self._delete_finished()
        except PeerError as refusal:
            # Not found, or another pod of this name: the watch will inform the worker.
            is_expected = isinstance(refusal, NotFound | Conflict)
            level = logging.DEBUG if is_expected else logging.WARNING
            log.log(level, "pod status refused", pod=self._pod["metadata"]["name"], error=refusal)
        except WorldError as error:
            log.warning("pod status not written", pod=self._pod["metadata"]["name"], error=error)
            if error.retry_after_seconds is not None:
                await clock.pause(error.retry_after_seconds)
                self._dirty.set()

    async def _write(self) -> None:
        if self._is_final:
            return
        wanted = pod_status(self._machine, self._addresses, self._node.clock())
        patch = changes(self._written, wanted)
        if not patch:
            return
        await self._node.api.patch_pod_status(self._pod, patch)
        self._written = {**self._written, **wanted}
        self._refresh_machine()

    async def _delete_finished(self) -> None:
        is_leaving = "deletionTimestamp" in self._pod["metadata"]
        if is_leaving and self._machine.is_finished and not self._is_deleted:
            await self._node.api.delete_pod(self._pod)
            self._is_deleted = True


def changes(written: Object, wanted: Object) -> Object:
    """The patch from one status to the other; conditions are merged by their type."""
    patch = {
        key: value
        for key, value in wanted.items()
        if key != "conditions" and written.get(key) != value
    }
    if "podIPs" in patch:
        # Merged by address, so an old one must be taken out by name.
        stale = [entry["ip"] for entry in written.get("podIPs") or ()]
        patch["podIPs"] = [
            *patch["podIPs"],
            *({"$patch": "delete", "ip": ip} for ip in stale if {"ip": ip} not in patch["podIPs"]),
        ]
    known = {c["type"]: c for c in written.get("conditions") or ()}
    conditions = [c for c in wanted.get("conditions") or () if not _same(known.get(c["type"]), c)]
    if conditions:
        patch["conditions"] = [{"reason": None, "message": None, **c} for c in conditions]
    return patch


def _same(known: Object | None, wanted: Object) -> bool:
    fields = ("status", "reason", "message")
    return known is not None and all(known.get(f) == wanted.get(f) for f in fields)


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
