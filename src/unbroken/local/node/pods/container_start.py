"""From a pod's spec to a running container: gathers what it refers to and asks the launcher."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from unbroken.local.node.context import (
    NodeContext,
    base_environment,
    with_image,
    with_own_commands,
)
from unbroken.local.node.processes.isolation import Isolation, Mount, is_below
from unbroken.local.node.processes.process import MARKER, Run

from .environment import ConfigProblem, EnvironmentSources, command_line, environment, references
from .events import Exit, Object
from .pod_files import PodFiles, hosts_text
from .volumes import Claims, claim_name, content, mounts, provide, without_namespaces

GPU_RESOURCE = "nvidia.com/gpu"
DEFAULT_TERMINATION_LOG = "/dev/termination-log"


class Place(Protocol):
    """Results of preparing a pod that starting its containers needs."""

    address: str
    volumes: dict[str, Path]


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

    async def prepare(self, place: Place) -> None:
        """Give the pod its address and volumes; WorldError when something is missing."""
        if not place.address:
            is_on_host = bool(self._pod["spec"].get("hostNetwork"))
            place.address = self._node.address if is_on_host else self._node.addresses.take()
            self._files.record(self._pod, place.address, self._gpus())
        self._files.write_hosts(hosts_text(self._pod, place.address))
        volumes = self._pod["spec"].get("volumes") or ()
        if not volumes:
            return
        around = await self._environment_sources(place, volumes_only=True)
        claims = await self._claims(volumes)
        for volume in volumes:
            wanted = content(volume, around, claims)
            place.volumes[volume["name"]] = provide(
                volume["name"], wanted, self._files.directory, self._files.uid
            )

    async def _environment_sources(
        self, place: Place, *, volumes_only: bool = False
    ) -> EnvironmentSources:
        spec = self._pod["spec"]
        part = {"volumes": spec.get("volumes")} if volumes_only else {**spec, "volumes": None}
        maps, secrets = references(part)
        return EnvironmentSources(
            pod=self._pod,
            pod_ip=place.address,
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

    async def start(self, place: Place, container: Object, attempt: int) -> Result:
        """Start one container; ConfigProblem or WorldError when it cannot be made."""
        refuse_unsupported(container)
        around = await self._environment_sources(place)
        base = with_image(around.base, container.get("image") or "", self._node.images)
        variables = environment(container, replace(around, base=base))
        variables["PATH"] = with_own_commands(variables["PATH"])
        argv = command_line(container, variables)
        wanted = mounts(container, self._pod, place.volumes, variables)
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
