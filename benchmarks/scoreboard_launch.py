"""The launchers that are not ours: how a trial is started, read and ended."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from recovery_launch import FtLauncher as RecoveryFtLauncher
from recovery_launch import Unavailable, free_port
from scoreboard_judge import Job
from scoreboard_logs import Word, words
from scoreboard_trials import AGENTS, RANKS_PER_AGENT, Plan

SCRIPT = Path(__file__).with_name("scoreboard_train.py")
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
STOP_SECONDS = 3.0
RESTARTS_MAX = 5


@dataclass(frozen=True)
class Trial:
    """Plan, directory and other inputs of a trial for its launcher."""

    plan: Plan
    directory: Path
    events: str
    """Name of the judge's socket."""
    is_torch: bool
    memory_groups: list[Path]

    def environment(self, uses: tuple[str, ...], collective_seconds: float) -> dict[str, str]:
        """Return the environment that the training script needs."""
        return {
            "SCOREBOARD_DIR": str(self.directory),
            "SCOREBOARD_PLAN": self.plan.to_json(),
            "SCOREBOARD_EVENTS": self.events,
            "SCOREBOARD_USE": ",".join([*uses, *(["torch"] if self.is_torch else [])]),
            "SCOREBOARD_COLLECTIVE_SECONDS": str(collective_seconds),
            "OMP_NUM_THREADS": "1",
        }


class Launcher:
    """Starts trials; one object serves all trials."""

    name: ClassVar[str]
    settings: ClassVar[str]
    """Settings that differ from the launcher's defaults, for people."""
    mode: ClassVar[str] = "told"
    """Signs of progress that the script gives: `told`, `output` or `silence`."""
    agent_mebibytes: ClassVar[int] = 300
    """Memory of an agent and its two plain workers, plus 200, for a trial with too little memory.
    """

    def prepare(self, base: Path) -> None:
        """Prepare for the first trial. Unavailable if the launcher cannot run here."""

    def start(self, trial: Trial) -> Job:
        """Start a trial."""
        raise NotImplementedError

    def close(self) -> None:
        """Clean up after the last trial."""


@dataclass
class Agents:
    """Processes of a launcher on this machine, and their output."""

    directory: Path
    stack: ExitStack = field(default_factory=ExitStack)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """A master, which is not an agent."""

    def add(self, command: list[str], env: dict[str, str], group: Path | None = None) -> None:
        """Start an agent with its output and errors in one log."""
        name = self.directory / f"agent-{len(self.agents)}.log"
        self.agents.append(self.spawn(command, env, name, group))

    def spawn(
        self, command: list[str], env: dict[str, str], log: Path, group: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own."""
        if group is not None:
            command = [
                "/bin/sh",
                "-c",
                f'echo $$ > {group}/cgroup.procs && exec "$@"',
                "-",
                *command,
            ]
        out = self.stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    def ended(self) -> str:
        """Return why the job can never continue; empty while it may."""
        codes = [agent.poll() for agent in self.agents]
        if None in codes:
            return ""
        return "all agents ended: " + ", ".join(map(str, codes))

    def words(self, ranks: dict[int, int]) -> list[Word]:
        """Return the failures that the agents have logged."""
        year = time.localtime().tm_year
        found: list[Word] = []
        for log in sorted(self.directory.glob("agent-*.log")):
            lines = log.read_text(errors="replace").splitlines()
            found += words(lines, ranks, year)
        return sorted(found, key=lambda word: word.at)

    def stop(self) -> None:
        """End the agents; the judge ends remaining workers."""
        everybody = [*self.agents, *self.others]
        for process in everybody:
            process.terminate()
        until = time.monotonic() + STOP_SECONDS
        for process in everybody:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.stack.close()


class Torchrun(Launcher):
    """torchrun with its defaults."""

    name = "torchrun"
    settings = "collective timeout 20 s (its default of 30 minutes finds nothing here)"
    module: ClassVar[str] = "torch.distributed.run"
    extra: ClassVar[dict[str, str]] = {}
    options: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ()
    collective_seconds: ClassVar[float] = 20.0
    agent_mebibytes = 600

    def prepare(self, base: Path) -> None:
        """Raise Unavailable if torch is missing."""
        if importlib.util.find_spec("torch") is None:
            raise Unavailable("torch is not installed")

    def start(self, trial: Trial) -> Agents:
        """Start two agents with the rendezvous at one of them."""
        job = Agents(trial.directory)
        endpoint = f"127.0.0.1:{free_port()}"
        env = {**trial.environment(self.uses, self.collective_seconds), **self.extra}
        for number in range(AGENTS):
            command = [sys.executable, "-m", self.module, f"--nnodes={AGENTS}"]
            command += [f"--nproc-per-node={RANKS_PER_AGENT}", "--rdzv-backend=c10d"]
            command += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={trial.events}"]
            command += ["--local-addr=127.0.0.1", f"--max-restarts={RESTARTS_MAX}", *self.options]
            group = trial.memory_groups[number] if trial.memory_groups else None
            job.add([*command, str(SCRIPT)], env, group)
        return job


class TorchrunFreshStore(Torchrun):
    """torchrun with a new store for each attempt."""

    name = "torchrun-fresh-store"
    settings = f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; {Torchrun.settings}"
    extra: ClassVar[dict[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class FtLauncher(Torchrun):
    """NVIDIA's launcher, with its heartbeats in the script."""

    name = "ft_launcher"
    settings = (
        "heartbeats from the script each step, timeouts 60 s for the first and 5 s, check 1 s"
    )
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    extra: ClassVar[dict[str, str]] = RecoveryFtLauncher.extra
    options: ClassVar[tuple[str, ...]] = (
        "--ft-initial-rank-heartbeat-timeout=60",
        "--ft-rank-heartbeat-timeout=15",
        "--ft-workload-check-interval=1",
    )
    uses: ClassVar[tuple[str, ...]] = ("heartbeat",)
    collective_seconds = 1800.0
    agent_mebibytes = 2400

    def prepare(self, base: Path) -> None:
        """Install it in a folder of its own."""
        super().prepare(base)
        RecoveryFtLauncher.prepare()


class Dlrover(Launcher):
    """dlrover-run with a local master; `--standalone` fails with torch 2.13.

    Its default for a hang is to notify after ten minutes."""

    name = "dlrover-run"
    settings = "local master; collective timeout 20 s"
    package: ClassVar[str] = "dlrover==0.6.1"
    needs: ClassVar[str] = "psutil pynvml deprecated requests packaging grpcio protobuf"
    folder: ClassVar[Path] = Path(tempfile.gettempdir()) / "unbroken-bench-dlrover-0.6.1"
    agent_mebibytes = 800

    def prepare(self, base: Path) -> None:
        """Install it in a folder of its own."""
        if (self.folder / "done").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        for what in (["--no-deps", self.package], self.needs.split()):
            done = subprocess.run(
                [*PIP, str(self.folder), *what], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise Unavailable(f"{self.package}: {done.stderr.strip().splitlines()[-1]}")
        (self.folder / "done").touch()

    def start(self, trial: Trial) -> Agents:
        """Start a master and two agents."""
        job = Agents(trial.directory)
        port = free_port()
        env = {**trial.environment((), 20.0), "PYTHONPATH": str(self.folder)}
        master = [sys.executable, "-m", "dlrover.python.master.main", "--platform=local"]
        master += [f"--port={port}", f"--node_num={AGENTS}", f"--job_name={trial.events}"]
        job.others.append(job.spawn(master, env, trial.directory / "master.log"))
        for number in range(AGENTS):
            own = {
                "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}",
                "NODE_RANK": str(number),
                "NODE_ID": str(number),
                "NODE_NUM": str(AGENTS),
                "ELASTIC_JOB_NAME": trial.events,
                "POD_IP": "127.0.0.1",
            }
            command = [sys.executable, "-m", "dlrover.trainer.torch.elastic_run"]
            command += [f"--nnodes={AGENTS}", f"--nproc-per-node={RANKS_PER_AGENT}"]
            command += [f"--max-restarts={RESTARTS_MAX}", str(SCRIPT)]
            group = trial.memory_groups[number] if trial.memory_groups else None
            job.add(command, {**env, **own}, group)
        return job
