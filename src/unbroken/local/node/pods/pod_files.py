"""Files of a pod on disk, and how they are found again.

pods/UID/pod.json, hosts, volumes/, containers/NAME/ATTEMPT/{log,run.json,main.json,exit.json}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.local.node.processes.cri_log import parsed
from unbroken.local.node.processes.process import Run, adopt, read_exit
from unbroken.local.node.processes.supervisor import write_json

from .events import Exit, Object
from .volumes import discard

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
