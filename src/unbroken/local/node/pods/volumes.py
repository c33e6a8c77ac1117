"""Volumes of a pod, and the files of all pods of a node.

The contents of a volume are decided from values (`content`); `provide` makes them. It is called
again when an object has changed that a volume is made from.

Files of a pod on disk, and how they are found again.

pods/UID/pod.json, hosts, volumes/, containers/NAME/ATTEMPT/{log,run.json,main.json,exit.json}
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import WorldError
from unbroken.local.node.processes.cri_log import parsed
from unbroken.local.node.processes.isolation import Isolation, Mount, is_below
from unbroken.local.node.processes.process import Run, adopt, read_exit
from unbroken.local.node.processes.supervisor import write_json

from .environment import ConfigProblem, EnvironmentSources, expand, field_value, resource_value
from .events import Exit, Object

DEFAULT_MODE = 0o644
SHARED_MEMORY = Path("/dev/shm")
_READ_ONLY_KINDS = ("configMap", "secret", "projected", "downwardAPI")
_TYPE_CHECKS = {
    "Directory": stat.S_ISDIR,
    "File": stat.S_ISREG,
    "Socket": stat.S_ISSOCK,
    "CharDevice": stat.S_ISCHR,
    "BlockDevice": stat.S_ISBLK,
}


class VolumeProblem(WorldError):
    """A volume cannot be provided now; the pod waits."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a volume that is made from objects."""

    data: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class Directory:
    """An empty directory of the pod's own."""

    is_in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """Files made from objects, by path inside the volume."""

    files: Mapping[str, File]


@dataclass(frozen=True, slots=True)
class HostPath:
    """Something of the host."""

    path: str
    type: str


Content = Directory | Files | HostPath


@dataclass(frozen=True, slots=True)
class Claims:
    """Persistent volumes as the pod's claims see them."""

    claims: Mapping[str, Object | None] = field(default_factory=dict)
    volumes: Mapping[str, Object | None] = field(default_factory=dict)
    """Volumes by name."""


# --- what a volume holds


def claim_name(volume: Object, pod: Object) -> str | None:
    """The claim that a volume of the pod uses."""
    if source := volume.get("persistentVolumeClaim"):
        return str(source["claimName"])
    if volume.get("ephemeral"):
        return f"{pod['metadata']['name']}-{volume['name']}"
    return None


def content(volume: Object, around: EnvironmentSources, claims: Claims) -> Content:
    """Decide what a volume holds; VolumeProblem when something it needs is not there."""
    name = volume["name"]
    if claim := claim_name(volume, around.pod):
        return _claimed(claim, claims)
    if source := volume.get("hostPath"):
        return HostPath(source["path"], source.get("type") or "")
    try:
        # The API server adds this volume to every pod; nothing may wait for it.
        is_optional = name.startswith("kube-api-access-")
        files = _made(volume, around, is_optional=is_optional)
    except ConfigProblem as problem:
        raise VolumeProblem(f'MountVolume.SetUp failed for volume "{name}" : {problem}') from None
    if files is not None:
        return Files(files)
    if "emptyDir" in volume or set(volume) == {"name"}:
        return Directory(is_in_memory=(volume.get("emptyDir") or {}).get("medium") == "Memory")
    kind = next(key for key in volume if key != "name")
    raise VolumeProblem(f'volume "{name}": this node has no volumes of kind {kind}')


def _claimed(name: str, claims: Claims) -> HostPath:
    claim = claims.claims.get(name)
    if claim is None:
        raise VolumeProblem(f'persistentvolumeclaim "{name}" not found')
    bound = (claim.get("spec") or {}).get("volumeName")
    if not bound:
        raise VolumeProblem(f'persistentvolumeclaim "{name}" is not bound to a volume')
    spec = (claims.volumes.get(bound) or {}).get("spec")
    if spec is None:
        raise VolumeProblem(f'persistentvolume "{bound}" not found')
    if source := spec.get("hostPath"):
        return HostPath(source["path"], source.get("type") or "DirectoryOrCreate")
    if source := spec.get("local"):
        return HostPath(source["path"], "DirectoryOrCreate")
    raise VolumeProblem(f'persistentvolume "{bound}" is neither hostPath nor local')


def _made(
    volume: Object, around: EnvironmentSources, *, is_optional: bool
) -> dict[str, File] | None:
    """Files of a volume that is made from objects; None for other kinds."""
    for kind in ("configMap", "secret", "downwardAPI"):
        if kind in volume:
            mode = (volume[kind] or {}).get("defaultMode", DEFAULT_MODE)
            return _source_files(kind, volume[kind], mode, around)
    if "projected" not in volume:
        return None
    mode = volume["projected"].get("defaultMode", DEFAULT_MODE)
    files: dict[str, File] = {}
    for source in volume["projected"].get("sources") or ():
        for kind in ("configMap", "secret", "downwardAPI"):
            if kind in source:
                part = {**source[kind], "optional": is_optional or source[kind].get("optional")}
                files |= _source_files(kind, part, mode, around)
    return files


def _source_files(
    kind: str, source: Object, mode: int, around: EnvironmentSources
) -> dict[str, File]:
    if kind == "downwardAPI":
        return {item["path"]: _downward(item, mode, around) for item in source.get("items") or ()}
    name = source.get("secretName") or source.get("name", "")
    objects = around.secrets if kind == "secret" else around.config_maps
    result = objects.get(name)
    if result is None:
        if source.get("optional"):
            return {}
        raise ConfigProblem(f'{kind.lower()} "{name}" not found')
    data = _bytes_of(kind, result)
    if not source.get("items"):
        return {key: File(value, mode) for key, value in data.items()}
    files = {}
    for item in source["items"]:
        if item["key"] in data:
            files[item["path"]] = File(data[item["key"]], item.get("mode") or mode)
        elif not source.get("optional"):
            raise ConfigProblem(f"references non-existent config key: {item['key']}")
    return files


def _bytes_of(kind: str, found: Object) -> dict[str, bytes]:
    data = found.get("data") or {}
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in data.items()}
    binary = found.get("binaryData") or {}
    return {key: value.encode() for key, value in data.items()} | {
        key: base64.b64decode(value) for key, value in binary.items()
    }


def _downward(item: Object, mode: int, around: EnvironmentSources) -> File:
    if reference := item.get("fieldRef"):
        text = field_value(reference["fieldPath"], around)
    else:
        text = resource_value(item["resourceFieldRef"], {}, around)
    return File(text.encode(), item.get("mode") or mode)


# --- making it so


def provide(name: str, wanted: Content, pod_directory: Path, uid: str) -> Path:
    """Make a volume be there; the path of the host at which it is."""
    own = pod_directory / "volumes" / name
    match wanted:
        case HostPath(path, type):
            return _host_path(path, type)
        case Directory(True) if SHARED_MEMORY.is_dir():
            own = private_memory(uid) / name
            own.mkdir(exist_ok=True)
        case Directory():
            own.mkdir(parents=True, exist_ok=True)
        case Files(files):
            _publish(own, files)
            return own
    # Any user of any container writes here (kubelet, empty_dir.go).
    own.chmod(0o777)
    return own


def memory_directory(uid: str) -> Path:
    """Return the folder of a pod's volumes of medium Memory."""
    return SHARED_MEMORY / f"unbroken-{uid}"


def private_memory(uid: str) -> Path:
    """Make the folder private to this user. Raises VolumeProblem if another user made it."""
    folder = memory_directory(uid)
    folder.mkdir(mode=0o700, exist_ok=True)
    result = folder.lstat()
    if not stat.S_ISDIR(result.st_mode) or result.st_uid != os.geteuid():
        raise VolumeProblem(f"{folder} belongs to user {result.st_uid}: have it removed")
    # An earlier version made it accessible to all users.
    folder.chmod(0o700)
    return folder


def discard(pod_directory: Path, uid: str) -> None:
    """Remove what belongs to a pod that is gone."""
    for directory in (pod_directory, memory_directory(uid)):
        if directory.exists():
            shutil.rmtree(directory)


def _publish(own: Path, files: Mapping[str, File]) -> None:
    """Replace all files of a volume at once (kubelet, volume/util/atomic_writer.go).

    The files are in a new folder, `..data` links to it, and each name links into `..data`. A mount
    with a subPath has a file of the folder that was there at its start, and never changes.
    """
    data = own / "..data"
    if not (data.is_symlink() and _published(data) == files):
        own.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix="..", dir=own))
        new.chmod(0o755)
        for path, file in files.items():
            place = new / _inside(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.data)
            place.chmod(file.mode)
        _link(data, new.name)
    names = {path.partition("/")[0] for path in files}
    for name in names:
        _link(own / name, f"..data/{name}")
    for entry in own.iterdir():
        is_old = entry.name.startswith("..") and entry.name not in ("..data", os.readlink(data))
        if is_old or (entry.name not in names and entry.is_symlink() and entry != data):
            _remove(entry)


def _published(data: Path) -> dict[str, File]:
    """Return the files of a volume as they are now."""
    return {
        str(path.relative_to(data)): File(path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in data.rglob("*")
        if path.is_file()
    }


def _link(place: Path, target: str) -> None:
    """Make `place` a symbolic link, whatever is there."""
    if place.is_symlink() and os.readlink(place) == target:
        return
    draft = place.with_name("..link")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    if place.is_dir() and not place.is_symlink():
        # A folder of an earlier version, which made no links.
        _remove(place)
    draft.replace(place)


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


def _inside(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ConfigProblem(f"path {path} leaves its volume")
    return path


def _host_path(path: str, type: str) -> Path:
    place = Path(path)
    if type == "DirectoryOrCreate":
        place.mkdir(parents=True, exist_ok=True, mode=0o755)
    elif type == "FileOrCreate" and not place.exists():
        place.touch(mode=0o644)
    if not place.exists():
        if type:
            raise VolumeProblem(f"hostPath type check failed: {path} is not there")
        # Without a type the runtime makes a directory.
        place.mkdir(parents=True)
    is_type = _TYPE_CHECKS.get(type.removesuffix("OrCreate"))
    if is_type is not None and not is_type(place.stat().st_mode):
        raise VolumeProblem(f"hostPath type check failed: {path} is not a {type}")
    return place


# --- what a container sees


def mounts(
    container: Object, pod: Object, paths: Mapping[str, Path], variables: Mapping[str, str]
) -> list[Mount]:
    """Mounts of one container; sub-paths are made where they are not there."""
    kinds = {v["name"]: next((k for k in v if k != "name"), "") for v in _volumes(pod)}
    result = []
    for mount in container.get("volumeMounts") or ():
        name = mount["name"]
        if name not in paths:
            raise ConfigProblem(f'volume "{name}" is not in the pod', "CreateContainerError")
        source = paths[name]
        sub_path = mount.get("subPath") or expand(mount.get("subPathExpr") or "", variables)
        if sub_path:
            source = _sub_path(source, sub_path)
        is_read_only = bool(mount.get("readOnly")) or kinds.get(name) in _READ_ONLY_KINDS
        target = os.path.normpath(os.path.join("/", mount["mountPath"]))
        result.append(Mount(str(source), target, is_read_only))
    return result


def _volumes(pod: Object) -> Iterable[Object]:
    return pod["spec"].get("volumes") or ()


def _sub_path(volume: Path, sub_path: str) -> Path:
    place = volume / _inside(sub_path)
    if not place.exists():
        place.mkdir(parents=True)
    if not place.resolve().is_relative_to(volume.resolve()):
        raise ConfigProblem(f"subPath {sub_path} leaves its volume", "CreateContainerError")
    return place


KEY_VARIABLE = "UNBROKEN_AGENT_KEY_FILE"


def without_namespaces(
    wanted: Iterable[Mount], isolation: Isolation, variables: dict[str, str]
) -> None:
    """Check the mounts of a host on which nothing can be mounted: only volumes at their place
    already will do.

    The key of a job's agents is read from the path in a variable, which is set accordingly: a job
    runs on any host.
    """
    if isolation is not Isolation.NONE:
        return
    for mount in wanted:
        if os.path.realpath(mount.source) == os.path.realpath(mount.target):
            continue
        key = variables.get(KEY_VARIABLE, "")
        if not is_below(key, mount.target):
            raise ConfigProblem(
                f"nothing can be mounted at {mount.target}: this host allows no user namespaces "
                "(and unbroken does not run as root)",
                "CreateContainerError",
            )
        variables[KEY_VARIABLE] = os.path.join(mount.source, os.path.relpath(key, mount.target))


KEPT_RUNS = 2
"""The newest run and the one before, whose log is `previous`."""
MESSAGE_MAX = 4096
FALLBACK_MAX, FALLBACK_LINES = 2048, 80
"""Sizes of termination messages (kubelet, kuberuntime_container.go; core/v1 types.go)."""


@dataclass(frozen=True, slots=True)
class PodFiles:
    """The directory of one pod."""

    directory: Path

    @property
    def uid(self) -> str:
        """Uid of the pod."""
        return self.directory.name

    def record(self, pod: Object, address: str, gpus: Sequence[int]) -> None:
        """Write down whose directory this is and what the pod was given."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        metadata = pod["metadata"]
        known = {"namespace": metadata["namespace"], "name": metadata["name"], "ip": address}
        known["gpus"] = list(gpus)
        known["grace"] = pod["spec"].get("terminationGracePeriodSeconds")
        write_json(str(self.directory / "pod.json"), known)

    def recorded(self) -> Object | None:
        """Return the recorded facts; None for a directory that never reached that point."""
        try:
            result: Object = json.loads((self.directory / "pod.json").read_bytes())
        except FileNotFoundError:
            return None
        return result

    def run_directory(self, container: str, attempt: int) -> Path:
        """Directory of one run of a container."""
        return self.directory / "containers" / container / str(attempt)

    def attempts(self, container: str) -> list[int]:
        """Runs that are on disk, oldest first."""
        try:
            names = [entry.name for entry in (self.directory / "containers" / container).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names)

    def new_run(self, container: str, attempt: int) -> Path:
        """Make the directory of a run, and drop those that can no longer be requested."""
        for old in self.attempts(container):
            if old <= attempt - KEPT_RUNS or old >= attempt:
                shutil.rmtree(self.run_directory(container, old))
        directory = self.run_directory(container, attempt)
        for name in ("scratch", "work", "ranks"):
            (directory / name).mkdir(parents=True)
        (directory / "termination-log").touch(mode=0o666)
        (directory / "termination-log").chmod(0o666)
        return directory

    def found_runs(self, container: str) -> list[tuple[int, Run | Exit, Path]]:
        """Runs that an earlier runner started, oldest first, the newest perhaps alive."""
        result = []
        for attempt in self.attempts(container):
            directory = self.run_directory(container, attempt)
            run = adopt(directory)
            if run is not None:
                result.append((attempt, run, directory))
        return result

    def live_runs(self) -> list[Run]:
        """Every run of the pod that is still alive."""
        containers = self.directory / "containers"
        names = [entry.name for entry in containers.iterdir()] if containers.exists() else []
        runs = [run for name in names for _, run, _ in self.found_runs(name)]
        return [run for run in runs if isinstance(run, Run)]

    def container_ids(self) -> set[str]:
        """IDs of every run that is on disk."""
        return {
            container_id(path.parent) for path in self.directory.glob("containers/*/*/run.json")
        }

    def write_hosts(self, text: str) -> Path:
        """The pod's /etc/hosts."""
        path = self.directory / "hosts"
        path.write_text(text, encoding="utf-8")
        return path

    def discard(self) -> None:
        """Remove everything of a pod that is gone."""
        discard(self.directory, self.uid)


def hosts_text(pod: Object, address: str, cluster_domain: str = "cluster.local") -> str:
    """The pod's /etc/hosts, in the form kubelet gives it (v1.33, kubelet_pods.go)."""
    spec, metadata = pod["spec"], pod["metadata"]
    hostname = spec.get("hostname") or metadata["name"]
    names = hostname
    if subdomain := spec.get("subdomain"):
        names = f"{hostname}.{subdomain}.{metadata['namespace']}.svc.{cluster_domain}\t{hostname}"
    lines = [
        "# Kubernetes-managed hosts file.",
        "127.0.0.1\tlocalhost",
        "::1\tlocalhost ip6-localhost ip6-loopback",
        f"{address}\t{names}",
    ]
    lines += [f"{a['ip']}\t" + "\t".join(a["hostnames"]) for a in spec.get("hostAliases") or ()]
    return "\n".join(lines) + "\n"


def termination_message(directory: Path, container: Object, ended: Exit) -> str:
    """Return the container's termination message."""
    path = directory / "termination-log"
    text = path.read_bytes()[-MESSAGE_MAX:] if path.exists() else b""
    is_fallback = container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
    if not text and is_fallback and ended.exit_code:
        text = last_lines(directory / "log")
    return text.decode("utf-8", "replace") or ended.message


def last_lines(log: Path) -> bytes:
    """The end of a container's output."""
    if not log.exists():
        return b""
    tail = log.read_bytes()[-4 * FALLBACK_MAX :].split(b"\n")
    return b"".join(_texts(tail[-FALLBACK_LINES - 1 :]))[-FALLBACK_MAX:]


def _texts(lines: Iterable[bytes]) -> Iterable[bytes]:
    for line in lines:
        entry = parsed(line)
        if entry is not None:
            yield entry.text if entry.is_partial else entry.text + b"\n"


def ended_before(runs: list[tuple[int, Run | Exit, Path]]) -> list[tuple[str, Exit]]:
    """Ids and ends of all runs but the newest."""
    result = []
    for _, _, directory in runs[:-1]:
        ended = read_exit(directory)
        if ended is not None:
            result.append((container_id(directory), ended))
    return result


def container_id(directory: Path) -> str:
    """Id of the run in this directory."""
    result = json.loads((directory / "run.json").read_bytes())
    return str(result["container_id"])
