"""Base class of all launchers, and torchrun and ft_launcher.

It starts a job, kills a process for a fault, and then does what an outside platform would do. A
kubelet starts the container again; somebody replaces a spare that was used by a new node.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from recovery_records import Recovery
from recovery_watch import Watch, Worker

from unbroken.agent.ports import hold_port

SCRIPT = Path(__file__).with_name("train_step.py")
RESTARTS_MAX = 1_000_000
START_SECONDS = 120.0
NVRX = "nvidia-resiliency-ext==0.6.0"
NVRX_NEEDS = (
    "defusedxml grpcio grpcio-tools httpx numpy nvidia-ml-py packaging protobuf psutil pyyaml"
)
UP = [sys.executable, "-m", "unbroken.cli.main"]
WORKER, RANK_0, AGENT, NODE = FAULTS = ("worker", "rank0", "agent", "node")
"""Kinds of fault by the thing that is killed. With `node`, a spare waits."""
DDP, FSDP2, HSDP = SHARDINGS = ("ddp", "fsdp2", "hsdp")
"""Replicas; shards on all ranks; shards on the ranks of a node, and each node has the whole."""


class Unavailable(Exception):
    """This launcher cannot run here; the text says why."""


@dataclass(frozen=True)
class Setting:
    """Size of the model, and of the job that trains it."""

    agents: int = 2
    ranks_per_agent: int = 2
    parameters: int = 1_000_000
    has_spare: bool = False
    sharding: str = DDP

    @property
    def ranks(self) -> int:
        """Number of ranks that train."""
        return self.agents * self.ranks_per_agent

    @property
    def is_large(self) -> bool:
        """True if a step takes seconds on a small machine."""
        return self.parameters > 10_000_000

    def environment(self, directory: Path, **uses: object) -> dict[str, str]:
        """Return the environment of the training script, the same for every launcher."""
        wanted = {
            "parameters": self.parameters,
            "batch": 4 if self.is_large else 64,
            "checkpoint_steps": 10,
            "idle_seconds": 20.0 if self.is_large else 5.0,
            "ranks": self.ranks,
            "sharding": self.sharding,
            "nodes": self.agents,
            **uses,
        }
        return {
            "UNBROKEN_BENCH_DIR": str(directory),
            "UNBROKEN_BENCH": json.dumps(wanted),
            "OMP_NUM_THREADS": "1",
        }


def free_port() -> int:
    """Return a port that is free now and outside the kernel's ephemeral range."""
    with closing(hold_port((), random.Random())) as held:
        return held.number


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def bring_up(directory: Path, nodes: int) -> str:
    """Start a local cluster; return why it did not start, empty: it did.

    An interrupt waits for the end of `unbroken up`: `unbroken down` does not find a cluster that is
    still being started.
    """
    up = [*UP, "up", "--dir", str(directory), "--nodes", str(nodes), "--detach"]
    return run_to_end(up)


def run_to_end(command: Sequence[str]) -> str:
    """Run a command that an interrupt does not end; return what it said if it failed."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate()[1]
        except BaseException:
            process.communicate()
            raise
    return said.strip() or f"exit code {process.returncode}" if process.returncode else ""


def install(folder: Path, *steps: list[str]) -> None:
    """Fill a folder once by pip steps. Unavailable has pip's last line."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    for what in steps:
        done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"{what[-1]}: {done.stderr.strip().splitlines()[-1]}")
    (folder / "done").touch()


class Launcher:
    """A job of one launcher. Call `start` first and `stop` last, in any case."""

    mode: ClassVar[str]
    setting_words: ClassVar[str] = ""
    """Settings that differ from the defaults of the launcher, for people."""
    kills_again: ClassVar[bool] = False
    """A second kill follows at once on the recovery from the first, and counts by itself."""
    shardings: ClassVar[tuple[str, ...]] = SHARDINGS
    """Ways to divide the model that its training script knows."""

    def __init__(self, directory: Path, setting: Setting) -> None:
        self.directory = directory
        self.setting = setting
        self.watch = Watch(directory, self.line)

    @classmethod
    def prepare(cls) -> None:
        """Install what is missing. Unavailable if that fails."""
        if importlib.util.find_spec("torch") is None:
            raise Unavailable("torch is not installed")

    @classmethod
    def refuses(cls, fault: str) -> str:
        """Return why this fault is not tried with the launcher; empty if it is."""
        del fault
        return ""

    def start(self) -> None:
        """Start the job. The watch is open."""
        raise NotImplementedError

    def start_and_step(self) -> None:
        """Start the job, and wait until every rank has made a step. Unavailable if none does.

        If that fails, all processes are ended.
        """
        try:
            self.start()
            steps = self.watch.wait(
                lambda: self.is_back([], []) or bool(self.ended()), START_SECONDS
            )
            if not steps:
                raise Unavailable(f"no first step in {START_SECONDS:.0f} s; see {self.directory}")
            if self.ended():
                raise Unavailable(self.ended())
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """End the job, with its workers and its watch."""
        try:
            self.stop()
        finally:
            self.watch.end_workers()
            self.watch.close()

    def line(self, line: str, at: float) -> None:
        """Handle a line of output of a process that `start` follows."""

    def ended(self) -> str:
        """Return why the job can never continue; empty while it may."""
        return ""

    def settle(self, fault: str) -> tuple[str, ...]:
        """Wait for the state that a kill needs; return what is not ready in time."""
        del fault
        return ()

    def strike(self, fault: str, victim: Worker) -> None:
        """Kill the victim, its agent, or its node."""
        del fault
        os.kill(victim.pid, signal.SIGKILL)

    def shares_fate(self, fault: str, victim: Worker) -> list[Worker]:
        """Return the workers that the fault kills."""
        newest = list(self.watch.newest.values())
        if fault in (WORKER, RANK_0):
            return [victim]
        agent = parent(victim.pid)
        return [one for one in newest if parent(one.pid) == agent]

    def may_be_struck(self, fault: str, victim: Worker) -> bool:
        """Return whether the launcher claims to survive the loss of this worker."""
        del fault, victim
        return True

    def is_back(self, old: list[Worker], lost: list[Worker]) -> bool:
        """Return whether every rank has made a step in an attempt after that of the old workers."""
        del lost
        newest = self.watch.newest.values()
        return len(newest) == self.setting.ranks and all(
            one.steps and one not in old for one in newest
        )

    def stepped_at(self, old: list[Worker], lost: list[Worker]) -> float:
        """Return when every rank had made a step again."""
        del old, lost
        return max(one.first_step_at or 0.0 for one in self.watch.newest.values())

    def told(self, recovery: Recovery) -> Recovery:
        """Add the times that only the launcher reports."""
        return recovery

    def is_spent(self) -> bool:
        """Return whether the job lacks the resources to survive another fault."""
        return False

    def repair(self, fault: str) -> None:
        """Restore what the platform would restore, once the job trains again."""

    def stop(self) -> None:
        """End the processes; the caller ends remaining workers."""
        raise NotImplementedError


def end(processes: list[subprocess.Popen[bytes]], seconds: float = 5.0) -> None:
    """Send SIGTERM, then SIGKILL to the sessions of processes that stay."""
    for one in processes:
        one.terminate()
    until = time.monotonic() + seconds
    for one in processes:
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


class Torchrun(Launcher):
    """Torchrun agents on one machine; the base of launchers that start the same way."""

    mode: ClassVar[str] = "torchrun"
    module: ClassVar[str] = "torch.distributed.run"
    extra: ClassVar[dict[str, str]] = {}
    ready_line: ClassVar[str] = "Rendezvous complete for workers"

    def __init__(self, directory: Path, setting: Setting) -> None:
        super().__init__(directory, setting)
        self.agents: list[subprocess.Popen[bytes]] = []
        self.killed: list[subprocess.Popen[bytes]] = []
        self.ready_at: list[float] = []
        self.endpoint = f"127.0.0.1:{free_port()}"

    def options(self) -> list[str]:
        """Options in addition to those of every torchrun."""
        return []

    def start(self) -> None:
        """Start the agents, the first of which hosts the rendezvous."""
        self.watch.open()
        for _ in range(self.setting.agents + self.setting.has_spare):
            self.start_agent()

    def start_agent(self) -> None:
        """Start one more agent."""
        # LOGLEVEL: the agents log when the rendezvous is complete.
        env = {**os.environ, **self.setting.environment(self.directory), "LOGLEVEL": "INFO"}
        command = [
            sys.executable,
            "-m",
            self.module,
            f"--nnodes={self.setting.agents}",
            f"--nproc-per-node={self.setting.ranks_per_agent}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            "--rdzv-id=bench",
            f"--rdzv-conf=is_host={int(not self.agents)}",
            "--local-addr=127.0.0.1",
            f"--max-restarts={RESTARTS_MAX}",
            *self.options(),
            str(SCRIPT),
        ]
        self.spawn(command, {**env, **self.extra})

    def spawn(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process of the job, and follow its standard error."""
        made = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert made.stderr is not None
        number = len(self.agents) + len(self.killed)
        self.watch.follow_lines(made.stderr, self.directory / f"agent-{number}.log")
        self.agents.append(made)
        return made

    def line(self, line: str, at: float) -> None:
        """Record when an agent was ready."""
        if self.ready_line in line:
            self.ready_at.append(at)

    def ended(self) -> str:
        """Return why the job can never continue; empty while it may."""
        codes = [agent.poll() for agent in self.agents]
        ends = [f"agent {i} ended with {code}" for i, code in enumerate(codes) if code is not None]
        return ", ".join(ends)

    def may_be_struck(self, fault: str, victim: Worker) -> bool:
        """Return False for a loss of the rendezvous host: no launcher survives it."""
        return fault in (WORKER, RANK_0) or parent(victim.pid) != self.agents[0].pid

    def strike(self, fault: str, victim: Worker) -> None:
        """Kill all processes of a container or node at once. A container then starts again."""
        if fault in (WORKER, RANK_0):
            os.kill(victim.pid, signal.SIGKILL)
            return
        lost = self.shares_fate(fault, victim)
        agent = next(one for one in self.agents if one.pid == parent(victim.pid))
        for pid in [agent.pid, *(one.pid for one in lost)]:
            os.kill(pid, signal.SIGKILL)
        self.agents.remove(agent)
        self.killed.append(agent)
        agent.wait()
        if fault == AGENT:
            self.start_agent()

    def told(self, recovery: Recovery) -> Recovery:
        """Add when all agents were ready."""
        last = recovery.stepped_at or 0.0
        marks = [at for at in self.ready_at if recovery.killed_at < at < last]
        return replace(recovery, ready_at=max(marks, default=None))

    def repair(self, fault: str) -> None:
        """Start another node as the spare."""
        if fault == NODE:
            self.start_agent()

    def stop(self) -> None:
        """End the agents; they end their workers."""
        end(self.agents)


class TorchrunFreshStore(Torchrun):
    """torchrun with the switch that gives every attempt its own store."""

    mode = "torchrun-fresh-store"
    setting_words = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    extra: ClassVar[dict[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class FtLauncher(Torchrun):
    """NVIDIA's launcher from its own folder, with the interpreter and torch of the others.

    Its wheel requires glibc 2.39, because of one module that measures GPU kernels. The launcher is
    Python and runs with an older glibc, so that tag is accepted here.
    """

    mode = "ft_launcher"
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    folder: ClassVar[Path] = Path(tempfile.gettempdir()) / "unbroken-bench-nvrx-0.6.0"
    extra: ClassVar[dict[str, str]] = {"PYTHONPATH": str(folder)}

    @classmethod
    def prepare(cls) -> None:
        """Fill the folder."""
        super().prepare()
        platform = ["--platform=manylinux_2_39_x86_64", "--only-binary=:all:", "--no-deps"]
        install(cls.folder, NVRX_NEEDS.split(), [*platform, NVRX])
