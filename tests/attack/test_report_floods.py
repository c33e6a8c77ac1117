"""Agents of one job attack the operator over their links; another job must not notice.

In the attack, 20 pods of one job sent 4 MiB of empty lists as `progress`, which took 130 MB each in
the operator. The kernel killed it for its memory, and again after each restart. One agent that
reported as fast as it could took half a core from all jobs.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import pytest

from tests.attack import flooding_agents  # Before what it chooses the addresses of.

# isort: split
from control_plane_world import (
    JOBS,
    Agents,
    Kubelet,
    agents,
    client_of,
    manifest,
    server,
)

from unbroken.kube.client import KubeClient
from unbroken.kube.errors import ApiRefusal

pytestmark = pytest.mark.slow

SIZE = 100
"""Agents of the hostile job; the honest one has fewer."""
HONEST = 20
MEBIBYTES_MAX = 200
HEALTH_SECONDS_MAX = 5.0
"""Longest answer to a health check: a kubelet waits 10 s; a quiet machine takes 0.1 s."""
SLOWER_SECONDS_MAX = 1.0
"""Seconds by which the honest job's median may grow under attack, on a shared machine."""
KINDS = sorted((flooding_agents.LINKED | flooding_agents.PLAIN).keys() - {"fat"})


@dataclass
class World:
    """An operator, a running honest job, and the means to look at both."""

    pid: int
    port: int
    client: KubeClient
    honest: Agents
    number: int = 0
    """Number of the honest job's newest attempt."""
    health: list[float] = field(default_factory=list)

    def rss(self) -> tuple[float, float]:
        """Return the operator's memory, now and at most, in MiB."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    async def recover(self) -> float:
        """Let a worker of the honest job die; return the seconds until all agents start."""
        failed_at = await self.honest.fail(self.number % HONEST)
        self.number += 1
        found: dict[str, Any] = {}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = await self.honest.state()
            starts = found["tallies"].get(self.number, [0, 0, 0, 0])
            if starts[2] == HONEST and found["running"] == HONEST:
                return float(starts[3] - failed_at)
            await asyncio.sleep(0.02)
        raise AssertionError(f"attempt {self.number} has not started: {found}")

    async def ask(self) -> None:
        """Request the operator's health repeatedly."""
        async with aiohttp.ClientSession() as session:
            while True:
                began = time.monotonic()
                async with session.get(f"http://127.0.0.1:{self.port}/healthz") as answer:
                    assert answer.status == 200
                self.health.append(time.monotonic() - began)
                await asyncio.sleep(0.1)

    async def create(self, job: int, count: int) -> None:
        """Create a job without tokens, so that its agents need none."""
        made = manifest(job, count, 8, is_plain=True)
        for _ in range(300):
            with suppress(ApiRefusal):  # The operator installs the kind first.
                await self.client.raw("POST", JOBS, body=made)
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the job cannot be created")

    async def conditions(self, job: int) -> list[dict[str, Any]]:
        """Return the conditions of a job."""
        found = json.loads(await self.client.raw("GET", f"{JOBS}/job-{job}"))
        return list(found.get("status", {}).get("conditions", []))


class HonestKubelet(Kubelet):
    """Informs only honest agents of their pod; hostile agents do not need it."""

    def __init__(self, client: KubeClient, size: int, running: Agents) -> None:
        move_in = running.move_in

        async def tell(index: int, pod: Any) -> None:
            if index < HONEST:
                await move_in(index, pod)

        running.move_in = tell  # type: ignore[method-assign]
        super().__init__(client, size, running)


@asynccontextmanager
async def world(kinds: list[str]) -> AsyncIterator[World]:
    """Run a real operator and API server with a running job, and hostile agents."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"first": SIZE, "count": SIZE, "kinds": kinds}
    hostile = subprocess.Popen(
        [sys.executable, flooding_agents.__file__, json.dumps(options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with server("embedded") as (kubeconfig, folder), (folder / "operator.log").open("w") as log:
        command = (
            "operator", "--kubeconfig", str(kubeconfig), "--metrics-port", str(port),
        )  # fmt: skip
        program = subprocess.Popen(
            [str(Path(sys.executable).with_name("unbroken")), *command], stdout=log, stderr=log
        )
        client = client_of(kubeconfig)
        try:
            assert hostile.stdout is not None
            hostile.stdout.readline()
            async with agents(HONEST, 8, 1, False) as honest, asyncio.TaskGroup() as tasks:
                kubelet = tasks.create_task(HonestKubelet(client, SIZE, honest).run())
                found = World(program.pid, port, client, honest)
                await found.create(0, HONEST)
                while (await honest.state())["running"] < HONEST:
                    await asyncio.sleep(0.05)
                asking = tasks.create_task(found.ask())
                yield found
                asking.cancel()
                kubelet.cancel()
            assert program.poll() is None, "the operator has ended"
            assert "Traceback" not in (folder / "operator.log").read_text()
        finally:
            await client.close()
            program.kill()
            program.wait()
            hostile.kill()
            hostile.communicate()


def tell(name: str, found: World, before: float, usual: list[float], seen: list[float]) -> None:
    """Print the figures for the documents."""
    now, most = found.rss()
    sys.stdout.write(
        f"\n{name}: {SIZE} hostile agents; RSS {before:.0f} MiB before, {now:.0f} after, "
        f"{most:.0f} at most; honest recovery {max(usual):.2f} s at most before, "
        f"{median(seen):.2f} s in the median and {max(seen):.2f} s at most under attack; "
        f"/healthz {max(found.health):.2f} s at most\n"
    )


async def test_hostile_agents_of_one_job_harm_no_other() -> None:
    async with world(KINDS) as found:
        usual = [await found.recover() for _ in range(3)]
        before, _ = found.rss()
        found.health.clear()
        await found.create(1, SIZE)
        until, seen = time.monotonic() + 20, []
        while time.monotonic() < until:
            seen.append(await found.recover())
            await asyncio.sleep(1)
        tell("attack", found, before, usual, seen)
        assert found.rss()[1] - before < MEBIBYTES_MAX
        assert max(found.health) < HEALTH_SECONDS_MAX
        assert median(seen) < max(usual) + SLOWER_SECONDS_MAX


async def test_a_job_that_takes_too_much_memory_fails_alone() -> None:
    async with world(["fat"]) as found:
        usual = [await found.recover() for _ in range(3)]
        before, _ = found.rss()
        await found.create(1, SIZE)
        failed: list[dict[str, Any]] = []
        for _ in range(600):
            failed = [c for c in await found.conditions(1) if c["type"] == "Failed"]
            if failed:
                break
            await asyncio.sleep(0.1)
        seen = [await found.recover() for _ in range(3)]
        tell("budget", found, before, usual, seen)
        assert [c["reason"] for c in failed] == ["AgentReportsTooLarge"]
        assert "pod job-1-w-" in failed[0]["message"]
        assert found.rss()[1] - before < MEBIBYTES_MAX
        assert median(seen) < max(usual) + SLOWER_SECONDS_MAX
