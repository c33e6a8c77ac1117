"""Environment of the operator in `control_plane.py`: an API server, pods without nodes, agents."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane_agents import PORT, address
from lightkube.resources.core_v1 import Pod

from unbroken.core.keys import MASTER_BYTES, job_key
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.informer import Informer
from unbroken.operator.jobs.pods import mounted_secret
from unbroken.spec.job.types import GROUP, KIND, PLURAL, VERSION
from unbroken.spec.keys import AGENT_AUTH

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.apiservers import embedded_cluster, real_cluster  # noqa: E402

REPLICA = "w"
JOBS = f"apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}"
PATCHES_MAX = 32
TICKS = os.sysconf("SC_CLK_TCK")
MERGE = {"Content-Type": "application/merge-patch+json"}


MASTER = bytes(range(MASTER_BYTES))
"""The operator's master key."""


def manifest(job: int, agents: int, nproc: int, is_plain: bool) -> dict[str, Any]:
    """A job with `agents` agents and enough restarts for every fault; `is_plain`: without a key."""
    annotations = {AGENT_AUTH: "none"} if is_plain else {}
    port = {"name": "AGENT_PORT", "value": str(PORT)}
    container = {"name": "pytorch", "image": "none", "env": [port]}
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": f"job-{job}", "namespace": "default", "annotations": annotations},
        "spec": {
            "nprocPerNode": str(nproc),
            "replicaSpecs": [{"name": REPLICA, "replicas": agents, "template": template}],
            "runPolicy": {"jobMaxRetryCount": 1_000_000},
        },
    }


class Kubelet:
    """Reports every new pod as running at its agent's address. `size`: agents of a job."""

    def __init__(self, client: KubeClient, size: int, running: Agents) -> None:
        self._client = client
        self._running = running
        self._size = size
        self._waiting: asyncio.Queue[Pod] = asyncio.Queue()
        self._pods = Informer(client, Pod, namespace="default", on_change=self._changed)

    def _changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is None and new is not None:
            self._waiting.put_nowait(new)

    async def run(self) -> None:
        """Watch the pods until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            for _ in range(PATCHES_MAX):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            pod = await self._waiting.get()
            assert pod.metadata is not None
            name = pod.metadata.name or ""
            _, job, _, pod_index = name.split("-")
            index = int(job) * self._size + int(pod_index)
            at = address(index)
            await self._running.move_in(index, pod)
            container = {
                "name": "pytorch", "image": "none", "imageID": "none", "ready": True,
                "restartCount": 0, "started": True,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }  # fmt: skip
            status = {
                "phase": "Running", "podIP": at, "podIPs": [{"ip": at}],
                "containerStatuses": [container],
            }  # fmt: skip
            path = f"api/v1/namespaces/default/pods/{name}/status"
            try:
                await self._client.raw("PATCH", path, body={"status": status}, headers=MERGE)
            except ApiRefusal as error:
                print(f"pod {name}: {error}", file=sys.stderr)


class Agents:
    """The processes in which the agents run."""

    def __init__(self, processes: list[asyncio.subprocess.Process], share: int) -> None:
        self._processes = processes
        self._share = share
        self._turns = {process.pid: asyncio.Lock() for process in processes}

    async def _ask(self, process: asyncio.subprocess.Process, order: object) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._turns[process.pid]:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await process.stdout.readline())
        return answer

    async def move_in(self, index: int, pod: Pod) -> None:
        """Send the agent the uid of its pod and, if the pod mounts one, its job's key."""
        assert pod.metadata is not None
        owner = (pod.metadata.ownerReferences or ())[0].uid
        key = "" if mounted_secret(pod) is None else job_key(MASTER, owner).hex()
        order = {"pod": index, "uid": pod.metadata.uid, "key": key}
        await self._ask(self._processes[index // self._share], order)

    async def fail(self, index: int) -> float:
        """Let a worker of the agent die; return the time on the monotonic clock."""
        found = await self._ask(self._processes[index // self._share], {"fail": index})
        return float(found["failed_at"])

    async def state(self) -> dict[str, Any]:
        """Return the summed counts of links, running agents, stops and starts of all processes."""
        found = [await self._ask(process, {}) for process in self._processes]
        whole: dict[str, Any] = {
            key: sum(one[key] for one in found) for key in ("linked", "running")
        }
        tallies: dict[int, list[float]] = {}
        for one in found:
            for attempt, (stops, last_stop, starts, last_start) in one["tallies"].items():
                sums = tallies.setdefault(int(attempt), [0, 0.0, 0, 0.0])
                tallies[int(attempt)] = [
                    sums[0] + stops, max(sums[1], last_stop),
                    sums[2] + starts, max(sums[3], last_start),
                ]  # fmt: skip
        whole["tallies"] = tallies
        return whole

    def cpu_seconds(self) -> float:
        """Processor time that all processes of agents have used."""
        return sum(cpu_seconds(process.pid) for process in self._processes)


@asynccontextmanager
async def agents(count: int, nproc: int, processes: int, has_steps: bool) -> AsyncIterator[Agents]:
    """Start agents that listen, and end them with the block."""
    share = -(-count // processes)
    started: list[asyncio.subprocess.Process] = []
    try:
        for first in range(0, count, share):
            options = {
                "first": first, "count": min(share, count - first), "nproc": nproc,
                "steps": has_steps,
            }  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(HERE / "control_plane_agents.py"), json.dumps(options),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            started.append(process)
        for process in started:
            assert process.stdout is not None
            await process.stdout.readline()
        yield Agents(started, share)
    finally:
        for process in started:
            # It ends by itself when its stdin does.
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@dataclass(frozen=True)
class Operator:
    """An operator's process."""

    pid: int
    counts: Path

    async def requests(self) -> dict[str, int]:
        """Return the requests that it has sent to the API server, by verb and path."""
        self.counts.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        await until_exists(self.counts)
        found: dict[str, int] = json.loads(self.counts.read_text())
        return found

    def profile(self) -> None:
        """Start the profiler, or stop it."""
        os.kill(self.pid, signal.SIGUSR2)

    def rss_mebibytes(self) -> tuple[float, float]:
        """Resident memory now, and its maximum."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        now, most = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
        return now, most


@contextmanager
def operator(
    kubeconfig: Path, folder: Path, extra: list[str], profile: str | None = None
) -> Iterator[Operator]:
    """Start an operator that ends with the block; its log is in `folder`."""
    counts, key = folder / "counts.json", folder / "operator.key"
    key.touch(0o600)
    key.write_text(MASTER.hex())
    command = [
        sys.executable, str(HERE / "control_plane_operator.py"), "--kubeconfig", str(kubeconfig),
        "--key-file", str(key), *extra,
    ]  # fmt: skip
    environment = {**os.environ, "CONTROL_PLANE_COUNTS": str(counts)}
    if profile:
        environment["CONTROL_PLANE_PROFILE"] = profile
    with open(folder / "operator.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield Operator(process.pid, counts)
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(kind: str) -> Iterator[tuple[Path, Path]]:
    """Start an API server (`real` or `embedded`) in its own folder."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-plane-")))
        place = folder / "plane"
        place.mkdir()
        start = real_cluster if kind == "real" else embedded_cluster
        found = stack.enter_context(start(place))
        yield found.kubeconfig, folder


async def until_exists(file: Path) -> None:
    """Wait until a file exists."""
    for _ in range(6000):
        if file.exists():  # noqa: ASYNC240
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{file.name} is not written")


def client_of(kubeconfig: Path) -> KubeClient:
    """A client of the API server for the harness itself."""
    return connect(kubeconfig, manager="control-plane-benchmark")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
