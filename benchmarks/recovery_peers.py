"""Peers of our own kind: libraries that restart within the process, or train on without lost ranks.

Neither library starts processes. For the first, the harness does what srun does. For the second, it
runs a torchrun for each replica group, as the library's own example says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from recovery_launch import (
    AGENT,
    DDP,
    NODE,
    RANK_0,
    RESTARTS_MAX,
    SCRIPT,
    WORKER,
    FtLauncher,
    Torchrun,
    free_port,
    install,
)
from recovery_watch import Worker

RESERVES = 4
TORCHFT = "torchft==0.2.0"
TORCHFT_NEEDS = "opentelemetry-sdk opentelemetry-api opentelemetry-exporter-otlp-proto-http"


class NvrxInProcess(FtLauncher):
    """`nvidia_resiliency_ext.inprocess.Wrapper`: reserve ranks take the places of lost ones."""

    mode = "nvrx-inprocess"
    setting_words = (
        "soft_timeout 5 s, hard_timeout 8 s (defaults 60 and 90, which on gloo are waited for); no "
        f"LOCAL_RANK; {RESERVES} reserve ranks, a new job when they are used up"
    )

    @classmethod
    def refuses(cls, fault: str) -> str:
        """Refuse the loss of rank 0, which hosts the wrapper's store, and of agents."""
        return {
            RANK_0: "rank 0 hosts the wrapper's store: its guide calls it critical",
            AGENT: "it has no agent",
        }.get(fault, "")

    def start(self) -> None:
        """Start all ranks and the reserves, each by itself."""
        self.watch.open()
        world = self.setting.ranks + RESERVES
        ports = {
            "MASTER_PORT": str(free_port()),
            "UNBROKEN_BENCH_STORE_PORT": str(free_port()),
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(world),
        }
        env = {**os.environ, **self.setting.environment(self.directory), **ports, **self.extra}
        # Without LOCAL_RANK: with it the wrapper looks at the GPU of that number after a fault, and
        # where there is none all ranks fail the look.
        env.pop("LOCAL_RANK", None)
        for rank in range(world):
            command = [sys.executable, str(SCRIPT.with_name("train_nvrx.py"))]
            self.spawn(command, {**env, "RANK": str(rank)})

    def ended(self) -> str:
        """Return how many ranks are missing, if too few processes live to continue."""
        alive = sum(one.poll() is None for one in self.agents)
        missing = self.setting.ranks - alive
        return f"{missing} of {self.setting.ranks} ranks are missing" if missing > 0 else ""

    def may_be_struck(self, fault: str, victim: Worker) -> bool:
        """Return True for any rank but the one that hosts the store."""
        del fault
        return victim.pid != self.agents[0].pid

    def shares_fate(self, fault: str, victim: Worker) -> list[Worker]:
        """Return the ranks of the node that is lost with the victim: any ranks may share a node."""
        count = self.setting.ranks_per_agent if fault == NODE else 1
        others = [
            one
            for one in self.watch.newest.values()
            if one is not victim and self.may_be_struck(fault, one)
        ]
        return [victim, *others[: count - 1]]

    def strike(self, fault: str, victim: Worker) -> None:
        """Kill the lost ranks; no process replaces them."""
        for one in self.shares_fate(fault, victim):
            os.kill(one.pid, signal.SIGKILL)

    def repair(self, fault: str) -> None:
        """Do nothing: the wrapper admits no process. The harness replaces spent jobs."""

    def is_spent(self) -> bool:
        """Return whether too few reserves are left for the next fault."""
        alive = sum(one.poll() is None for one in self.agents)
        needed = self.setting.ranks_per_agent if self.setting.has_spare else 1
        return alive - self.setting.ranks < needed

    def stop(self) -> None:
        """End the ranks; their monitors end with them."""
        for one in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


class TorchFt(Torchrun):
    """torchft: a replica group for each rank, each under its own torchrun, and a lighthouse."""

    mode = "torchft"
    setting_words = "lighthouse --min_replicas 1 --join_timeout_ms 10000; groups of one rank"
    shardings: ClassVar[tuple[str, ...]] = (DDP,)
    folder: ClassVar[Path] = Path(tempfile.gettempdir()) / "unbroken-bench-torchft-0.2.0"
    extra: ClassVar[dict[str, str]] = {"PYTHONPATH": str(folder)}

    @classmethod
    def prepare(cls) -> None:
        """Fill the folder; torch is that of the other launchers."""
        super().prepare()
        # In this order: pip leaves a folder `bin` alone that is there.
        install(cls.folder, ["--no-deps", TORCHFT], TORCHFT_NEEDS.split())

    def start(self) -> None:
        """Start the lighthouse, then all groups."""
        self.watch.open()
        self.port = free_port()
        program = str(self.folder / "bin/torchft_lighthouse")
        words = ["--min_replicas", "1", "--join_timeout_ms", "10000"]
        command = [sys.executable, program, *words, "--bind", f"127.0.0.1:{self.port}"]
        self.spawn(command, {**os.environ, **self.extra})
        self.groups: dict[int, subprocess.Popen[bytes]] = {}
        for group in range(self.setting.ranks):
            self.start_group(group)

    def start_group(self, group: int) -> None:
        """Start a replica group of one rank."""
        command = [
            sys.executable,
            "-m",
            self.module,
            "--nnodes=1",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            f"--max-restarts={RESTARTS_MAX}",
            str(SCRIPT.with_name("train_torchft.py")),
        ]
        own = {
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(self.setting.ranks),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}",
        }
        env = {**os.environ, **self.setting.environment(self.directory), **own, **self.extra}
        self.groups[group] = self.spawn(command, env)

    def may_be_struck(self, fault: str, victim: Worker) -> bool:
        """Return True: any rank may be lost."""
        del fault, victim
        return True

    def shares_fate(self, fault: str, victim: Worker) -> list[Worker]:
        """Return the workers of a node: as many neighbouring groups as it has ranks."""
        if fault != NODE:
            return [victim]
        size = self.setting.ranks_per_agent
        first = victim.rank // size * size
        return [self.watch.newest[rank] for rank in range(first, first + size)]

    def strike(self, fault: str, victim: Worker) -> None:
        """Kill the lost groups, and start each again at once."""
        lost = self.shares_fate(fault, victim)
        for one in lost:
            if fault not in (WORKER, RANK_0):
                group = self.groups[one.rank]
                group.kill()
                self.agents.remove(group)
                self.killed.append(group)
            os.kill(one.pid, signal.SIGKILL)
        if fault not in (WORKER, RANK_0):
            for one in lost:
                self.groups[one.rank].wait()
                self.start_group(one.rank)

    def is_back(self, old: list[Worker], lost: list[Worker]) -> bool:
        """Return whether the lost ranks have made a step, and the others one after it."""
        del old
        now = self.watch.newest
        if not all(now[one.rank].steps and now[one.rank] is not one for one in lost):
            return False
        whole_at = self.whole_at(lost)
        together = [one for one in now.values() if one.newest and one.newest[-1][0] >= whole_at]
        return len(together) == self.setting.ranks

    def whole_at(self, lost: list[Worker]) -> float:
        """Return when all lost ranks had made a step."""
        now = self.watch.newest
        return max((now[one.rank].first_step_at or 0.0 for one in lost), default=0.0)

    def stepped_at(self, old: list[Worker], lost: list[Worker]) -> float:
        """Return when each rank had made its first step together with all others."""
        del old
        whole_at = self.whole_at(lost)
        return max(
            next(at for at, _ in one.newest if at >= whole_at) for one in self.watch.newest.values()
        )

    def repair(self, fault: str) -> None:
        """Do nothing: `strike` has started the groups again."""


PEERS = (NvrxInProcess, TorchFt)
