"""Agents of one job attack the operator over their links; another job must not notice.

In the attack, 20 pods of one job sent 4 MiB of empty lists as `progress`, which took 130 MB each in
the operator. The kernel killed it for its memory, and again after each restart. One agent that
reported as fast as it could took half a core from all jobs: tests/agent/test_link_rates.py holds
how fast an agent is read.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
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

from tests.watching import PATIENCE_SECONDS, until
from unbroken.kube.client import KubeClient
from unbroken.kube.errors import ApiRefusal

pytestmark = pytest.mark.slow

FAT = 24
"""Agents of the job that reports as much as each may: together more than a job may."""
HONEST = 2
MEBIBYTES_MAX = 100
"""Growth of the operator: 20 and 57 MiB were measured; one report that is read whole takes 130."""
RECOVERIES = 1
CUT = {"body": 1, "deep": 8, "headers": 4, "informed": 1, "lists": 1, "numbers": 8, "unread": 1}
"""Kinds whose messages are more than an agent may send, and MiB that the operator takes at most
before it ends the connection.  A message of `lists` has 4 MiB, and is refused by its length."""
KINDS = sorted((flooding_agents.LINKED | flooding_agents.PLAIN).keys() - {"fat"})


@dataclass
class World:
    """An operator, a running honest job, and the means to look at both."""

    pid: int
    port: int
    client: KubeClient
    honest: Agents
    hostile: subprocess.Popen[bytes]
    size: int
    """Number of hostile agents."""
    number: int = 0
    """Number of the honest job's newest attempt."""

    def rss(self) -> tuple[float, float]:
        """Return the operator's memory, now and at most, in MiB."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    async def recover(self) -> None:
        """Let workers of the honest job die, one after the other; return when all agents start."""
        async with aiohttp.ClientSession() as session:
            for _ in range(RECOVERIES):
                await self.honest.fail(self.number % HONEST)
                self.number += 1
                await until(self.honest.state, self._runs)
                async with session.get(f"http://127.0.0.1:{self.port}/healthz") as answer:
                    assert answer.status == 200

    def _runs(self, found: dict[str, Any]) -> bool:
        starts = found["tallies"].get(self.number, [0, 0, 0, 0])[2]
        return bool(starts == HONEST and found["running"] == HONEST)

    async def create(self, job: int, count: int) -> None:
        """Create a job without tokens, so that its agents need none."""
        made = manifest(job, count, 8, is_plain=True)

        async def is_made() -> bool:
            with suppress(ApiRefusal):  # The operator installs the kind first.
                await self.client.raw("POST", JOBS, body=made)
                return True
            return False

        await until(is_made)

    async def attack(self) -> dict[str, int]:
        """Create the hostile job, and return once each of its agents has attacked, and the operator
        has ended a connection of each kind in CUT; with the most bytes that it took of one."""
        await self.create(1, self.size)
        assert self.hostile.stdout is not None
        taken, cut = 0, dict.fromkeys(CUT, -1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while taken < self.size or min(cut.values()) < 0:
                words = (await asyncio.to_thread(self.hostile.stdout.readline)).decode().split()
                taken += words == ["taken"]
                if words[0] == "cut" and words[1] in cut:
                    cut[words[1]] = max(cut[words[1]], int(words[2]))
        return cut

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
async def world(kinds: list[str], size: int) -> AsyncIterator[World]:
    """Run a real operator and API server with a running job, and `size` hostile agents."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"first": size, "count": size, "kinds": kinds}
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
                kubelet = tasks.create_task(HonestKubelet(client, size, honest).run())
                found = World(program.pid, port, client, honest, hostile, size)
                await found.create(0, HONEST)
                await until(honest.state, lambda state: state["running"] == HONEST)
                await found.recover()
                yield found
                kubelet.cancel()
            assert program.poll() is None, "the operator has ended"
            assert "Traceback" not in (folder / "operator.log").read_text()
        finally:
            await client.close()
            program.kill()
            program.wait()
            hostile.kill()
            hostile.communicate()


async def test_hostile_agents_of_one_job_harm_no_other() -> None:
    async with world(KINDS, len(KINDS)) as found:
        before, _ = found.rss()
        cut = await found.attack()
        assert all(size < CUT[kind] << 20 for kind, size in cut.items()), cut
        await found.recover()
        check(found, before)


async def test_a_job_that_takes_too_much_memory_fails_alone() -> None:
    async with world(["fat"], FAT) as found:
        before, _ = found.rss()
        await found.create(1, found.size)
        conditions = await until(
            lambda: found.conditions(1), lambda all: any(one["type"] == "Failed" for one in all)
        )
        (failed,) = (one for one in conditions if one["type"] == "Failed")
        assert failed["reason"] == "AgentReportsTooLarge"
        assert "pod job-1-w-" in failed["message"]
        await found.recover()
        check(found, before)


def check(found: World, before: float) -> None:
    """Print the operator's memory, for docs/guide/security.md; fail if it took too much."""
    now, most = found.rss()
    sys.stdout.write(f"\nRSS {before:.0f} MiB before, {now:.0f} after, {most:.0f} at most\n")
    assert most - before < MEBIBYTES_MAX
