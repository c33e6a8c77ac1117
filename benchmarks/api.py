#!/usr/bin/env python3
"""The API server of the local cluster compared with a real kube-apiserver in one run.

    benchmarks/api.py [--quick] [--json FILE]

Both get the same requests from the same client in the same minutes, in turns, so that the ratios
mean something on a noisy machine.  The real one is v1.20 with etcd (no fsync), started by
`../shared/envtest/start` or from where UNBROKEN_ENVTEST points; without it only ours is measured.
Times are medians over rounds; the real one has no nodes here, so pods run on ours only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from arguments import output_file

ROOT = Path(__file__).parent.parent
ENVTEST = Path(os.environ.get("UNBROKEN_ENVTEST", ROOT.parent / "shared" / "envtest"))
WRITERS = 8
"""Requests under way at once in the create and patch measurements."""


@dataclass
class Server:
    """One API server under test."""

    name: str
    session: aiohttp.ClientSession
    url: str
    pids: list[int]
    figures: dict[str, float] = field(default_factory=dict)


def kubeconfig(path: Path) -> tuple[str, str]:
    """Server URL and bearer token."""
    config = yaml.safe_load(path.read_text())
    return config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"]


@asynccontextmanager
async def client(name: str, path: Path, pids: list[int]) -> AsyncIterator[Server]:
    """A keep-alive client of one server; certificates are not what is measured."""
    url, token = kubeconfig(path)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connector = aiohttp.TCPConnector(ssl=context, limit=64)
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:
        yield Server(name, session, url, pids)


def pod(name: str, namespace: str, *, runs: bool = False) -> dict[str, Any]:
    """A pod of the size that training jobs have: about 2 KB; unless it `runs`, nobody places it."""
    env = [{"name": f"VARIABLE_{i}", "value": "some-value-of-usual-length"} for i in range(12)]
    container = {
        "name": "main",
        "image": "registry.example.com/team/training:2026-11",
        "command": ["python3", "-c", "import time; time.sleep(3600)"],
        "env": env,
        "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
    }
    labels = {"app": "bench", "job-name": "bench", "index": name.rpartition("-")[2]}
    meta = {"name": name, "namespace": namespace, "labels": labels}
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "schedulerName": "default-scheduler" if runs else "nobody",
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


async def gather(count: int, work: Callable[[int], Awaitable[None]]) -> float:
    """Run `work` for 0..count-1, a few at once; seconds taken."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(WRITERS):
            tasks.create_task(worker())
    return time.perf_counter() - start


async def send(server: Server, method: str, path: str, **options: Any) -> bytes:
    """One request; an unexpected status ends the benchmark."""
    async with server.session.request(method, server.url + path, **options) as response:
        body = await response.read()
        if response.status >= 300:
            raise SystemExit(f"{server.name}: {method} {path}: {response.status} {body[:500]!r}")
        return body


async def make_namespace(server: Server, name: str) -> str:
    """Create a namespace with the service account that pods need; its path."""
    await send(
        server,
        "POST",
        "/api/v1/namespaces",
        json={"metadata": {"name": name}, "apiVersion": "v1", "kind": "Namespace"},
    )
    path = f"/api/v1/namespaces/{name}"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    async with server.session.post(f"{server.url}{path}/serviceaccounts", json=account) as response:
        await response.read()  # 409 where the server's own controller was quicker
    return path


async def measure_writes(server: Server, path: str, count: int) -> None:
    """Create `count` pods, then patch each once."""
    namespace = path.rpartition("/")[2]

    async def create(number: int) -> None:
        await send(server, "POST", f"{path}/pods", json=pod(f"pod-{number}", namespace))

    async def patch(number: int) -> None:
        body = json.dumps({"metadata": {"annotations": {"bench/round": "1"}}})
        headers = {"Content-Type": "application/merge-patch+json"}
        await send(server, "PATCH", f"{path}/pods/pod-{number}", data=body, headers=headers)

    server.figures["create_per_second"] = count / await gather(count, create)
    body = json.loads(await send(server, "GET", f"{path}/pods?limit=1"))
    server.figures["patch_per_second"] = count / await gather(count, patch)
    await measure_replay(server, path, body["metadata"]["resourceVersion"], count)


async def measure_list(servers: list[Server], path: str, rounds: int) -> None:
    """List all pods, the servers in turns; median."""
    times: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in range(rounds):
        for server in servers:
            start = time.perf_counter()
            await send(server, "GET", f"{path}/pods")
            times[server.name].append(time.perf_counter() - start)
    for server in servers:
        server.figures["list_seconds"] = statistics.median(times[server.name])


async def measure_watch(server: Server, path: str, watchers: int, count: int) -> None:
    """Events delivered per second, all watchers together, while writers change pods."""
    version = json.loads(await send(server, "GET", f"{path}/pods?limit=1"))
    start_version = version["metadata"]["resourceVersion"]
    query = f"watch=true&resourceVersion={start_version}&timeoutSeconds=120"
    seen = [0] * watchers
    ready = asyncio.Semaphore(0)

    async def watch(index: int) -> None:
        async with server.session.get(f"{server.url}{path}/pods?{query}") as response:
            ready.release()
            async for chunk in response.content.iter_any():
                # Events end with a newline and hold no other.
                seen[index] += chunk.count(b"\n")
                if seen[index] >= count:
                    return

    async def change(number: int) -> None:
        body = json.dumps({"metadata": {"annotations": {"bench/watch": str(time.time_ns())}}})
        headers = {"Content-Type": "application/merge-patch+json"}
        await send(server, "PATCH", f"{path}/pods/pod-{number}", data=body, headers=headers)

    async with asyncio.TaskGroup() as tasks:
        for index in range(watchers):
            tasks.create_task(watch(index))
        for _ in range(watchers):
            await ready.acquire()
        start = time.perf_counter()
        await gather(count, change)
    server.figures[f"watch_{watchers}_events_per_second"] = (
        watchers * count / (time.perf_counter() - start)
    )


async def measure_replay(server: Server, path: str, version: str, count: int) -> None:
    """Events per second to one watcher that catches up with `count` changes."""
    query = f"watch=true&resourceVersion={version}&timeoutSeconds=60"
    seen, start = 0, time.perf_counter()
    async with server.session.get(f"{server.url}{path}/pods?{query}") as response:
        async for chunk in response.content.iter_any():
            seen += chunk.count(b"\n")
            if seen >= count:
                break
    server.figures["watch_replay_events_per_second"] = seen / (time.perf_counter() - start)


def memory_mib(pids: list[int]) -> float:
    """Resident memory of the processes together."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of the processes together."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure_pods(server: Server, count: int) -> None:
    """Create to Running as a client sees it over a watch, one pod after the other."""
    path = await make_namespace(server, "bench-run")
    times = []
    query = "watch=true&timeoutSeconds=600"
    async with server.session.get(f"{server.url}{path}/pods?{query}") as response:
        for number in range(count):
            start = time.perf_counter()
            await send(
                server, "POST", f"{path}/pods", json=pod(f"run-{number}", "bench-run", runs=True)
            )
            while True:
                event = json.loads(await response.content.readline())
                content = event["object"]
                is_it = content["metadata"]["name"] == f"run-{number}"
                if is_it and (content.get("status") or {}).get("phase") == "Running":
                    break
            times.append(time.perf_counter() - start)
    server.figures["pod_running_p50_ms"] = statistics.median(times) * 1000
    server.figures["pod_running_p99_ms"] = statistics.quantiles(times, n=100)[98] * 1000
    await send(server, "DELETE", f"{path}/pods?gracePeriodSeconds=0")


async def measure_idle(server: Server, seconds: float) -> None:
    """Share of one core that a cluster with nodes takes while nothing happens."""
    before = cpu_seconds(server.pids)
    await asyncio.sleep(seconds)
    server.figures["idle_cpu_percent"] = (cpu_seconds(server.pids) - before) / seconds * 100


def start_ours(directory: Path, nodes: int) -> tuple[float, int]:
    """`unbroken up --detach`: seconds until it returned, and its pid."""
    command = [sys.executable, "-m", "unbroken.cli.main", "up", "--dir", str(directory)]
    start = time.perf_counter()
    subprocess.run([*command, "--nodes", str(nodes), "--detach"], check=True, stdout=sys.stderr)
    taken = time.perf_counter() - start
    return taken, json.loads((directory / "up.json").read_text())["pid"]


def start_real(directory: Path) -> list[int]:
    """Start the control plane; pids of etcd and kube-apiserver."""
    subprocess.run([ENVTEST / "start", directory], check=True, stdout=sys.stderr)
    return [int(pid) for pid in (directory / "pids").read_text().split()[:2]]


def stop_real(directory: Path) -> None:
    """Take the control plane away."""
    subprocess.run([ENVTEST / "stop", directory], check=False, stdout=sys.stderr)


async def run(quick: bool) -> dict[str, dict[str, float]]:
    """Measure everything; figures by server."""
    count, rounds, pods = (500, 3, 20) if quick else (5000, 9, 100)
    base = Path(tempfile.mkdtemp(prefix="unbroken-bench-"))
    has_real = (ENVTEST / "start").exists() and shutil.which("etcd") is not None
    servers: list[Server] = []
    try:
        starts = []
        for number in range(3):
            taken, pid = start_ours(base / f"start-{number}", 2)
            starts.append(taken)
            if number < 2:
                stop_ours(base / f"start-{number}")
        async with client("unbroken", base / "start-2" / "kubeconfig", [pid]) as ours:
            ours.figures["start_seconds"] = statistics.median(starts)
            servers.append(ours)
            await measure_idle(ours, 5 if quick else 20)
            await measure_pods(ours, pods)
            if has_real:
                pids = start_real(base / "real")
                async with client("kube-apiserver", base / "real" / "kubeconfig", pids) as real:
                    servers.append(real)
                    await measure_both(servers, count, rounds)
            else:
                print("no real control plane here: ours alone", file=sys.stderr)
                await measure_both(servers, count, rounds)
    finally:
        stop_ours(base / "start-2")
        if has_real:
            stop_real(base / "real")
        shutil.rmtree(base, ignore_errors=True)
    return {server.name: server.figures for server in servers}


def stop_ours(directory: Path) -> None:
    """Take a cluster away."""
    command = [sys.executable, "-m", "unbroken.cli.main", "down", "--dir", str(directory)]
    subprocess.run([*command, "--purge"], check=False, stdout=subprocess.DEVNULL)


async def measure_both(servers: list[Server], count: int, rounds: int) -> None:
    """Measure what both servers can do: pods that no scheduler places."""
    for server in servers:
        path = await make_namespace(server, "bench")
        await measure_writes(server, path, count)
    await measure_list(servers, "/api/v1/namespaces/bench", rounds)
    for watchers in (1, 20):
        for server in servers:
            events = count // 5 if watchers > 1 else count
            await measure_watch(server, "/api/v1/namespaces/bench", watchers, min(events, count))
    for server in servers:
        server.figures["memory_mib"] = memory_mib(server.pids)


def main() -> None:
    """Print a table: figure, ours, the real one's, ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the objects")
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(run(options.quick))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    real = figures.get("kube-apiserver", {})
    print(f"{'figure':34}{'unbroken':>12}{'kube-apiserver':>16}{'ratio':>8}")
    for name, value in figures["unbroken"].items():
        other = real.get(name)
        beside = f"{other:16.4g}{value / other:8.2f}" if other else ""
        print(f"{name:34}{value:12.4g}{beside}")


if __name__ == "__main__":
    main()
