"""Seconds that one operator needs to stop and start a large job, and the processor time it uses.

    python benchmarks/control_plane.py [--agents 100,1000,5000,12500] [--server embedded,real]
                                       [--jobs N] [--incidents N] [--steps] [--plain] [--json FILE]

The operator is a process of its own, and so is the API server.  Agents run in two other processes,
each with its own address, with the frames and repetitions of real agents and without workers.  One
of them reports that a worker has died.  Several jobs share the agents, and in each of them one
agent reports a death at the same time.  Measured are the seconds from there until the last agent
has its stop, and until the last one has its start.  All processes share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import count, output_file
from control_plane_world import (
    JOBS,
    Agents,
    Kubelet,
    Operator,
    agents,
    client_of,
    cpu_seconds,
    manifest,
    operator,
    server,
    until_exists,
)

LOOK_SECONDS = 0.05
REST_SECONDS = 2.0
"""Seconds after an incident until all writes that it caused are done."""
IDLE_SECONDS = 5.0
START_SECONDS = 600.0
INCIDENT_SECONDS = 120.0
STEP = 7919
"""A prime number, so that different agents fail in each incident."""


async def until(
    look: Callable[[], Any], seconds: float, fits: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Repeat `look` until its result fits. TimeoutError has the last result."""
    deadline, found = time.monotonic() + seconds, {}
    while time.monotonic() < deadline:
        found = await look()
        if fits(found):
            return found
        await asyncio.sleep(LOOK_SECONDS)
    raise TimeoutError(f"after {seconds:g} s: {found}")


async def incident(
    number: int, count: int, jobs: int, running: Agents, one: Operator
) -> dict[str, float]:
    """Let a worker of each job die, and return the figures of the recovery."""
    before, cpu, agents_cpu = (
        await one.requests(),
        cpu_seconds(one.pid),
        running.cpu_seconds(),
    )
    size = count // jobs
    failed_at = min([await running.fail(job * size + number * STEP % size) for job in range(jobs)])

    def fits(found: dict[str, Any]) -> bool:
        started = found["tallies"].get(number + 1, [0, 0, 0, 0])[2]
        return bool(started == count and found["running"] == count)

    found = await until(running.state, INCIDENT_SECONDS, fits)
    took = time.monotonic() - failed_at
    used = cpu_seconds(one.pid) - cpu
    agents_used = running.cpu_seconds() - agents_cpu
    await asyncio.sleep(REST_SECONDS)
    after = await one.requests()
    new = {key: after[key] - before.get(key, 0) for key in after}
    asked = {key: times for key, times in new.items() if times}
    stops, last_stop, _, last_start = (
        found["tallies"][number][:2] + found["tallies"][number + 1][2:]
    )
    return {
        "stopped": last_stop - failed_at,
        "started": last_start - failed_at,
        "stops": stops,
        "took": took,
        "operator_cpu": used,
        "agents_cpu": agents_used,
        "requests": sum(n for key, n in asked.items() if "/leases" not in key),
        "asked": asked,  # type: ignore[dict-item]
    }


async def idle(one: Operator, running: Agents) -> tuple[float, float]:
    """Share of a core that operator and agents use while nothing happens."""
    mine, theirs, began = cpu_seconds(one.pid), running.cpu_seconds(), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - began
    return (cpu_seconds(one.pid) - mine) / seconds, (running.cpu_seconds() - theirs) / seconds


async def measure(kind: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one operator with one kind of API server and `count` agents."""
    with server(kind) as (kubeconfig, folder):
        client = client_of(kubeconfig)
        try:
            if count % options.jobs:
                sys.exit(f"{count} agents cannot be divided among {options.jobs} jobs")
            made = agents(count, options.nproc, options.processes, options.steps)
            async with made as running, asyncio.TaskGroup() as tasks:
                kubelet = tasks.create_task(Kubelet(client, count // options.jobs, running).run())
                with operator(kubeconfig, folder, options.operator, options.profile) as one:
                    found = await _measured(client, count, running, one, options)
                kubelet.cancel()
        finally:
            await client.close()
            if options.log:
                shutil.copy(folder / "operator.log", options.log)
    return {"server": kind, "agents": count, **found}


async def _measured(
    client: Any, count: int, running: Agents, one: Operator, options: argparse.Namespace
) -> dict[str, Any]:
    began = time.monotonic()
    for job in range(options.jobs):
        await _create(client, manifest(job, count // options.jobs, options.nproc, options.plain))
    await until(running.state, START_SECONDS, lambda found: bool(found["running"] == count))
    created = time.monotonic() - began
    print(f"{count} run after {created:.1f} s", flush=True)
    await asyncio.sleep(REST_SECONDS)
    rest = await idle(one, running)
    seen = []
    if options.profile:
        one.profile()
    for number in range(options.incidents):
        seen.append(await incident(number, count, options.jobs, running, one))
        print(count, {key: value for key, value in seen[-1].items() if key != "asked"}, flush=True)
    if options.profile:
        one.profile()
        await until_exists(Path(options.profile))
    now, most = one.rss_mebibytes()
    return {
        "created_seconds": created,
        "idle_cores": rest[0],
        "idle_agents_cores": rest[1],
        "rss_mebibytes": now,
        "rss_most_mebibytes": most,
        "incidents": seen,
        **{
            f"{name}_{p}": of([one[name] for one in seen])
            for name in ("stopped", "started", "operator_cpu", "agents_cpu", "requests")
            for p, of in (("p50", statistics.median), ("p99", high))
        },
    }


def high(values: list[float]) -> float:
    """The 99th percentile; with few values, the largest."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


async def _create(client: Any, job: dict[str, Any]) -> None:
    from unbroken.kube.errors import ApiRefusal

    while True:
        try:
            await client.raw("POST", JOBS, body=job)
        except ApiRefusal as error:  # The operator installs the kind first.
            if error.code != 404:
                raise
            await asyncio.sleep(0.1)
        else:
            return


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default="100,1000,5000,12500")
    parser.add_argument("--server", default="embedded")
    parser.add_argument("--plain", action="store_true", help="jobs without a key")
    parser.add_argument("--jobs", type=count, default=1, help="that share the agents")
    parser.add_argument("--incidents", type=count, default=10)
    parser.add_argument("--nproc", type=count, default=8, help="workers of an agent")
    parser.add_argument("--processes", type=count, default=2, help="that the agents live in")
    parser.add_argument("--steps", action="store_true", help="workers tell a step each second")
    parser.add_argument("--operator", nargs=argparse.REMAINDER, default=[], help="its options")
    parser.add_argument("--profile", metavar="FILE", help="profile the operator (slower)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--log", metavar="FILE", help="keep what the last operator has logged")
    options = parser.parse_args()
    # Nothing that was started stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    found = [
        asyncio.run(measure(kind, int(count), options))
        for kind in options.server.split(",")
        for count in options.agents.split(",")
    ]
    columns = (
        "stopped_p50", "stopped_p99", "started_p50", "started_p99", "operator_cpu_p50",
        "agents_cpu_p50", "requests_p50", "idle_cores", "rss_mebibytes",
    )  # fmt: skip
    print("| server | agents | " + " | ".join(columns) + " |")
    for row in found:
        figures = " | ".join(f"{row[name]:.3f}" for name in columns)
        print(f"| {row['server']} | {row['agents']} | {figures} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
