"""Libraries that restart within the process, or go on without who is lost: peers of our own.

Neither starts processes: the harness does what srun does for the one, and runs a torchrun for each
replica group of the other, as its own example says.
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
        """Rank 0 hosts the store of the wrapper, which ends with it; there are no agents."""
        return {
            RANK_0: "rank 0 hosts the wrapper's store: its guide calls it critical",
            AGENT: "it has no agent",
        }.get(fault, "")

    def start(self) -> None:
        """All ranks and the reserves, each by itself."""
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
        """Whether there are too few to go on."""
        alive = sum(one.poll() is None for one in self.agents)
        missing = self.setting.ranks - alive
        return f"{missing} of {self.setting.ranks} ranks are missing" if missing > 0 else ""

    def may_be_struck(self, fault: str, victim: Worker) -> bool:
        """Any rank but the one that hosts the store."""
        del fault
        return victim.pid != self.agents[0].pid

    def shares_fate(self, fault: str, victim: Worker) -> list[Worker]:
        """A node is so many ranks beside each other."""
        count = self.setting.ranks_per_agent if fault == NODE else 1
        others = [
            one
            for one in self.watch.newest.values()
            if one is not victim and self.may_be_struck(fault, one)
        ]
        return [victim, *others[: count - 1]]

    def strike(self, fault: str, victim: Worker) -> None:
        """Kill them; nobody starts another."""
        for one in self.shares_fate(fault, victim):
            os.kill(one.pid, signal.SIGKILL)

    def repair(self, fault: str) -> None:
        """It takes in nobody: a job whose reserves are used up is replaced by the harness."""

    def is_spent(self) -> bool:
        """Whether the next fault would find too few reserves."""
        alive = sum(one.poll() is None for one in self.agents)
        needed = self.setting.ranks_per_agent if self.setting.has_spare else 1
        return alive - self.setting.ranks < needed

    def stop(self) -> None:
        """Their monitors end with them."""
        for one in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


class TorchFt(Torchrun):
    """torchft: a replica group for each rank, each under its own torchrun, and a lighthouse."""

    mode = "torchft"
    setting_words = "lighthouse --min_replicas 1 --join_timeout_ms 10000; groups of one rank"
    folder: ClassVar[Path] = Path(tempfile.gettempdir()) / "unbroken-bench-torchft-0.2.0"
    extra: ClassVar[dict[str, str]] = {"PYTHONPATH": str(folder)}

    @classmethod
    def prepare(cls) -> None:
        """Fill the folder; torch is that of the others."""
        super().prepare()
        # In this order: pip leaves a folder `bin` alone that is there.
        install(cls.folder, ["--no-deps", TORCHFT], TORCHFT_NEEDS.split())

    def start(self) -> None:
        """The lighthouse, then all groups."""
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
        """A replica group of one rank."""
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
        """Any."""
        del fault, victim
        return True

    def shares_fate(self, fault: str, victim: Worker) -> list[Worker]:
        """A node is so many groups beside each other."""
        if fault != NODE:
            return [victim]
        size = self.setting.ranks_per_agent
        first = victim.rank // size * size
        return [self.watch.newest[rank] for rank in range(first, first + size)]

    def strike(self, fault: str, victim: Worker) -> None:
        """Groups that are lost are started anew at once, wherever."""
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
        """Who was lost has made a step, and the others one after it."""
        del old
        now = self.watch.newest
        if not all(now[one.rank].steps and now[one.rank] is not one for one in lost):
            return False
        whole_at = self.whole_at(lost)
        together = [one for one in now.values() if one.newest and one.newest[-1][0] >= whole_at]
        return len(together) == self.setting.ranks

    def whole_at(self, lost: list[Worker]) -> float:
        """When all who were lost had made a step."""
        now = self.watch.newest
        return max((now[one.rank].first_step_at or 0.0 for one in lost), default=0.0)

    def stepped_at(self, old: list[Worker], lost: list[Worker]) -> float:
        """The first step of each with all the others."""
        del old
        whole_at = self.whole_at(lost)
        return max(
            next(at for at, _ in one.newest if at >= whole_at) for one in self.watch.newest.values()
        )

    def repair(self, fault: str) -> None:
        """Nothing is left to do."""


PEERS = (NvrxInProcess, TorchFt)
