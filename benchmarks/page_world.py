"""Environment of the live page in `page.py`: API server with 200 jobs, agents, the page's server.

Jobs, pods and incidents are objects of the local API server, as an operator writes them.  Agents
are made up (`page_agents`).  The server of the page is the real one, in a process of its own, so
that its cost can be told from that of the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.cli.page.access import Access, read_page_file
from unbroken.core.keys import job_key
from unbroken.kube.client import KubeClient, connect
from unbroken.local.state import Paths
from unbroken.operator.definitions import install
from unbroken.operator.jobs.pods import job_identity, key_secret
from unbroken.spec.job.codec import incident_to
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.types import GROUP, KIND, PLURAL, VERSION
from unbroken.spec.times import time_text

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.apiservers import embedded_cluster  # noqa: E402

SMALL_PODS = 2
"""Pods of each job but the large one."""
NET = int(os.environ.get("PAGE_NET", "232"))
"""Second octet of the first loopback address of the agents; local clusters use lower ones."""
MASTER = bytes(range(32))
PATCH = {"Content-Type": "application/merge-patch+json"}
TOGETHER = 16
HOURS = 8.0
"""Age of the jobs."""
INCIDENTS, INCIDENTS_LARGE = 3, 40
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mebibytes(pid: int) -> float:
    """Memory of a process: its own, and its share of what it has together with others (Pss)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    row = next(row for row in text.splitlines() if row.startswith("Pss:"))
    return int(row.split()[1]) / 1024


def address(index: int) -> str:
    """The loopback address of the agent of this number."""
    return f"127.{NET + (index >> 16)}.{(index >> 8) & 255}.{index & 255}"


@dataclass(frozen=True)
class Shape:
    """Size of the world."""

    jobs: int
    ranks: int
    """Ranks of the first job; the others have SMALL_PODS pods."""
    nproc: int
    """Ranks of a pod."""

    def pods(self, job: int) -> int:
        """Pods of a job."""
        return max(self.ranks // self.nproc, 1) if job == 0 else SMALL_PODS


def _job(number: int, shape: Shape, now: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job and its status."""
    container = {"name": "pytorch", "image": "none"}
    count = shape.pods(number)
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name_of(number), "namespace": "default"},
        "spec": {
            "nprocPerNode": str(shape.nproc),
            "replicaSpecs": [
                {"name": "w", "replicas": count, "template": {"spec": {"containers": [container]}}}
            ],
        },
    }
    began = now - HOURS * 3600
    condition = {
        "type": "Running", "status": "True", "reason": "Started",
        "message": f"attempt 1 runs on {count} nodes",
        "lastTransitionTime": time_text(began), "lastUpdateTime": time_text(began),
    }  # fmt: skip
    status = {
        "conditions": [condition],
        "startTime": time_text(began),
        "restartCount": 1,
        "replicaStatuses": {"w": {"active": count, "ready": count}},
    }
    return body, status


def name_of(number: int) -> str:
    """The name of a job."""
    return "large" if number == 0 else f"job-{number}"


def _incidents(job: dict[str, Any], count: int, now: float) -> Iterator[dict[str, Any]]:
    """Incidents that ended well."""
    drawn = random.Random(1)
    for number in range(1, count + 1):
        at = now - HOURS * 3600 * (1 - number / (count + 1))
        rank = drawn.randrange(8)
        sign = Symptom(at, "Signal", "killed by SIGKILL", f"{job['metadata']['name']}-w-0",
                       "node-0", rank, exit_code=137, step=number * 100)  # fmt: skip
        yield incident_to(
            Incident(
                number, number - 1, sign, (sign,), Remedy.PROCESS, "all pods are healthy", at + 0.1,
                stopped_at=at + 0.5, ready_at=at + 0.6, started_at=at + 0.8, progress_at=at + 2.0,
                ended_at=at + 2.0, outcome="recovered", fault="SIGKILL", progress_before=at - 0.2,
                step=number * 100, resumed_step=number * 100 - 7, step_seconds=0.5,
            ),
            job["metadata"],
        )  # fmt: skip


class Builder:
    """Writes the objects."""

    def __init__(self, client: KubeClient, shape: Shape) -> None:
        self._client = client
        self._shape = shape
        self._turns = asyncio.Semaphore(TOGETHER)
        self.pods: list[dict[str, Any]] = []
        """Pods as `page_agents` reads them."""

    async def build(self) -> None:
        """Write all jobs."""
        await install(self._client)
        # Pods have no nodes: nothing but their status says that they run.
        for number in range(self._shape.jobs):
            await self._build(number, time.time())

    async def _build(self, number: int, now: float) -> None:
        jobs = f"apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}"
        body, status = _job(number, self._shape, now)
        job = json.loads(await self._client.raw("POST", jobs, body=body))
        await self._patch(f"{jobs}/{name_of(number)}/status", status)
        key = job_key(MASTER, job["metadata"]["uid"])
        secret = key_secret(job_identity(job), f"{name_of(number)}-key", key)
        await self._client.raw("POST", "api/v1/namespaces/default/secrets", body=secret)
        count = INCIDENTS_LARGE if number == 0 else INCIDENTS
        for one in _incidents(job, count, now):
            await self._client.raw(
                "POST", "apis/unbroken.dev/v1/namespaces/default/incidents", body=one
            )
        first = len(self.pods)
        made = [
            self._pod(job, key, index, first + index) for index in range(self._shape.pods(number))
        ]
        self.pods += await asyncio.gather(*made)
        for one in self.pods[first:]:
            one["job"], one["of"] = number, name_of(number)

    async def _patch(self, path: str, status: dict[str, Any]) -> None:
        await self._client.raw("PATCH", path, body={"status": status}, headers=PATCH)

    async def _pod(self, job: dict[str, Any], key: bytes, index: int, number: int) -> Any:
        name = f"{job['metadata']['name']}-w-{index}"
        identity = job_identity(job)
        body = {
            "metadata": {
                "name": name,
                "labels": {"HPJob": identity.name},
                "ownerReferences": [identity.owner_reference()],
            },
            "spec": {
                "nodeName": f"node-{index}",
                "containers": [{"name": "pytorch", "image": "none"}],
                "volumes": [
                    {"name": "unbroken-agent-key", "secret": {"secretName": f"{identity.name}-key"}}
                ],
            },
        }
        container = {
            "name": "pytorch", "image": "none", "imageID": "none", "ready": True,
            "restartCount": 0, "started": True,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }  # fmt: skip
        status = {
            "phase": "Running", "podIP": address(number),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [container],
        }  # fmt: skip
        async with self._turns:
            pods = "api/v1/namespaces/default/pods"
            pod = json.loads(await self._client.raw("POST", pods, body=body))
            await self._patch(f"{pods}/{name}/status", status)
        nproc = self._shape.nproc
        ranks = [index * nproc + one for one in range(nproc)]
        uid = pod["metadata"]["uid"]
        return {"address": address(number), "uid": uid, "key": key.hex(), "ranks": ranks}


@dataclass(frozen=True)
class World:
    """A running page."""

    url: str
    server: int
    """Process of the page's server."""
    api: int
    """Process of the API server."""
    paths: Paths

    def link(self) -> str:
        """A link that opens the page."""
        file = read_page_file(self.paths.ui)
        assert file is not None
        return f"{self.url}?link={Access(file.key).link_token(time.time())}"

    def cookie(self) -> str:
        """A cookie of a browser that has opened a link."""
        file = read_page_file(self.paths.ui)
        assert file is not None
        port = self.url.rstrip("/").rpartition(":")[2]
        return f"unbroken-{port}={Access(file.key).cookie(time.time())}"


@contextmanager
def world(shape: Shape, log: Path | None, *, is_asking: bool) -> Iterator[Starter]:
    """Build the objects and start the agents; the page's server is started with the result.

    `is_asking`: the page asks the agents; else an operator in its process has their reports.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="page-")))
        (folder / "plane").mkdir()
        found = stack.enter_context(embedded_cluster(folder / "plane"))
        pods = asyncio.run(_built(folder / "plane", shape))
        if not is_asking:
            (folder / "plane" / "reports.json").write_text(json.dumps(pods))
        agents = subprocess.Popen(
            [sys.executable, str(HERE / "page_agents.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(_ended, agents)
        assert agents.stdin is not None
        assert agents.stdout is not None
        agents.stdin.write(json.dumps(pods) + "\n")
        agents.stdin.flush()
        assert agents.stdout.readline() == "ready\n", "the agents do not listen"
        yield Starter(folder / "plane", found.process.pid, log)


async def _built(directory: Path, shape: Shape) -> list[dict[str, Any]]:
    client = connect(directory / "internal.kubeconfig", manager="page-benchmark")
    try:
        builder = Builder(client, shape)
        await builder.build()
    finally:
        await client.close()
    return builder.pods


@dataclass(frozen=True)
class Starter:
    """Starts servers of the page."""

    directory: Path
    api: int
    log: Path | None

    @contextmanager
    def page(self, speed: float = 1.0, profile: Path | None = None) -> Iterator[World]:
        """Run a server of the page during the block; its clock runs `speed` times as fast."""
        command = [sys.executable, str(HERE / "page_server.py"), str(self.directory), str(speed)]
        if profile is not None:
            command.append(str(profile))
        with open(self.log or os.devnull, "a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                assert url, "the page is not served"
                yield World(url, process.pid, self.api, Paths(self.directory))
            finally:
                _ended(process)


def _ended(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
