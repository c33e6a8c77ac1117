"""Faults of nodes under a running job: what is injected, and when each reaction is seen.

A line of a node's kernel log is written to the file that stands for the log. A fault of a GPU comes
from a library that stands for NVML (docs/guide/node-faults.md). If a fault ends a program on real
hardware (an illegal address, a contained memory error), the program is killed too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from recovery_launch import NODE, UP, Setting, Unavailable, end
from recovery_records import percentile
from recovery_trials import run_on
from recovery_unbroken import InProcessSnapshots
from recovery_watch import Worker

from unbroken.spec.job.incident import Incident
from unbroken.spec.keys import FAULT_DETAILS, HEALTH
from unbroken.spec.nodes.kinds import NODE_RECORD, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action, Health

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.nodes.nvml_library import build

PCI = "0000:3b:00"
BOUND_SECONDS = 180.0
CALM_SECONDS = 6.0
"""Seconds for which a job is watched that must not be touched."""
UNTOUCHED, IN_PLACE, MOVED = "untouched", "in place", "moved"
FOLLOWS = {Action.NONE: UNTOUCHED, Action.RESTART_JOB: IN_PLACE}
"""Expected outcome of the job by action. With any other action, the job moves."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject."""

    name: str
    line: str = ""
    """Line of the kernel's log; `{pid}` is that of the worker."""
    gpu: str = ""
    """State of the GPU that the library reports."""
    known_as: str = ""
    """Name in the table of faults. Empty: the name that the line contains."""
    ends_program: bool = False


def _xid(number: int, text: str, *, ends_program: bool = False) -> Fault:
    line = f"NVRM: Xid (PCI:{PCI}): {number}, pid={{pid}}, name=python, {text}"
    return Fault(f"xid{number}", line, ends_program=ends_program)


FAULTS = (
    _xid(79, "GPU has fallen off the bus."),
    _xid(48, "An uncorrectable double bit error (DBE) has been detected on GPU"),
    _xid(94, "Contained: CE User Channel (0x9). RST: No, D-RST: No", ends_program=True),
    _xid(31, "Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS", ends_program=True),
    _xid(13, "Graphics Exception: ESR 0x504648=0x1000e", ends_program=True),
    Fault(
        "ext4-error", "EXT4-fs error (device nvme1n1p1): ext4_lookup:1855: inode #2: comm python"
    ),
    Fault("read-only", "EXT4-fs (nvme1n1p1): Remounting filesystem read-only"),
    Fault("gpu-lost", gpu="error=15", known_as="GpuLost"),
    Fault("row-remap", gpu="failed=1", known_as="GpuRemapFailed"),
)
QUICK = ("xid79", "read-only", "xid31")


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected name and action of a fault, from the table of faults."""

    name: str
    action: Action

    @property
    def job(self) -> str:
        """Expected outcome of the job."""
        return FOLLOWS.get(self.action, MOVED)


@dataclass
class Trial:
    """A fault, and the seconds from its injection to each reaction."""

    fault: str
    action: str
    node: str
    job: str = ""
    """Outcome of the job."""
    marks: dict[str, float] = field(default_factory=dict)
    lost_steps: int | None = None
    why_wrong: str = ""


def explained(fault: Fault) -> Expected:
    """Return what `unbroken faults explain` says of a fault."""
    asked = fault.known_as or fault.line.format(pid=1)
    command = [*UP, "faults", "explain", asked, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (entry,) = json.loads(done.stdout)
    return Expected(entry["name"], Action(entry["action"]))


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """State of a node at one moment."""

    at: float
    name: str
    health: str
    conditions: str
    """Conditions that are True."""
    details: str


class FaultyNodes(InProcessSnapshots):
    """A job on a cluster with faulty nodes; one node more than its pods need."""

    mode = "node faults"

    def __init__(self, directory: Path, setting: Setting) -> None:
        super().__init__(directory, setting)
        self.library = build(directory.parent)
        self.seen: list[NodeSeen] = []
        self.followed: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the cluster and the job, and watch the nodes."""
        super().start()
        parts = (
            "{.metadata.name}",
            f"{{.metadata.labels.{_escaped(HEALTH)}}}",
            '{.status.conditions[?(@.status=="True")].type}',
            f"{{.metadata.annotations.{_escaped(FAULT_DETAILS)}}}",
        )
        # Not by tabs, which kubectl makes columns of.
        shown = "jsonpath=" + "|".join(parts) + '{"\\n"}'
        program = self.kubectl_program()
        assert program is not None
        environment = {**os.environ, "KUBECONFIG": str(self.cluster / "kubeconfig")}
        command = [program, "get", "nodes", "--watch", "-o", shown]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, bufsize=0)
        self.followed.append(process)
        stream: IO[bytes] | None = process.stdout
        assert stream is not None
        self.watch.follow_lines(stream, self.directory / "nodes.txt")

    def line(self, line: str, at: float) -> None:
        """Record a change of a node."""
        self.seen.append(NodeSeen(at, *line.split("|", 3)))

    def stop(self) -> None:
        """Remove the job and the cluster."""
        end(self.followed)
        super().stop()

    def settle(self, fault: str) -> tuple[str, ...]:
        """Wait until job, spare and nodes are as before the fault."""
        if not self.until(self.is_calm, BOUND_SECONDS):
            raise Unavailable(f"nodes or pods were not well within {BOUND_SECONDS:.0f} s")
        notes = super().settle(NODE)
        if not self.until(self.are_warm, BOUND_SECONDS):
            raise Unavailable(f"the spare was not warm within {BOUND_SECONDS:.0f} s")
        return notes

    def are_warm(self) -> bool:
        """Return whether the agent of each pod, spares included, has logged parked workers."""
        logs = self.cluster.glob("nodes/*/pods/*/containers/train/*/log")
        warm = {log.parts[-5] for log in logs if b" are parked" in log.read_bytes()}
        return {one["metadata"]["uid"] for one in self.listed("pods")} <= warm

    def is_calm(self) -> bool:
        """Return whether all pods run, and all nodes are there and take pods."""
        nodes = self.listed("nodes")
        healthy = [
            one
            for one in nodes
            if one["metadata"]["labels"].get(HEALTH) == Health.SCHEDULABLE.value
            and not one["spec"].get("taints")
        ]
        return len(healthy) == len(nodes) == self.nodes and self.has_spare()

    def node_of(self, worker: Worker) -> str:
        """The node that a worker runs on."""
        words = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
        pod = next(one for one in words if one.startswith(b"UNBROKEN_POD=")).partition(b"=")[2]
        name = pod.decode()
        at = next(one for one in self.listed("pods") if one["metadata"]["name"] == name)
        return str(at["spec"]["nodeName"])

    def plant(self, fault: Fault, node: str, worker: Worker) -> float:
        """Inject the fault into a node; return the time."""
        folder = self.cluster / "nodes" / node
        if fault.gpu:
            if self.library is None:
                raise Unavailable("no gcc, which compiles the library that stands for NVML")
            (folder / "gpus.txt").write_text(f"gpu 0000{PCI.upper()}.0 {fault.gpu}\n")
            shutil.copy(self.library, folder / "part")
            (folder / "part").rename(folder / "libnvidia-ml.so.1")
            return time.time()
        with (folder / "kernel.log").open("a") as log:
            log.write(fault.line.format(pid=worker.pid) + "\n")
        at = time.time()
        if fault.ends_program:
            os.kill(worker.pid, signal.SIGKILL)
        return at

    def told_at(self, node: str, since: float, holds: Callable[[NodeSeen], bool]) -> float | None:
        """Return when the node first had a state that fits; None if it never had."""
        found = (one.at for one in self.seen if one.name == node and one.at >= since and holds(one))
        return next(found, None)

    def repair_of(self, node: str, since: float) -> RepairRecord | None:
        """Return the finished repair of a fault of the node since a time."""
        for found in self.listed("noderecords.unbroken.dev"):
            if found["metadata"]["name"] == node:
                history = NODE_RECORD.spec_of(found)[0].history
                return next((one for one in history if one.began_at >= since), None)
        return None

    def renew(self, node: str) -> None:
        """Replace a repaired node, so that each trial begins with a node without history."""
        words = ["nodes", "replace", node, "--yes", "--wait", "--dir", str(self.cluster)]
        done = subprocess.run([*UP, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"unbroken nodes replace: {done.stderr.strip()}")


def _escaped(key: str) -> str:
    return key.replace(".", "\\.")


def try_fault(job: FaultyNodes, fault: Fault, number: int) -> Trial:
    """Inject one fault under the job, and watch until all expected reactions are seen."""
    job.settle(fault.name)
    if not run_on(job.watch, 0.0, BOUND_SECONDS):
        raise Unavailable("the job makes no steps")
    expected = explained(fault)
    old = list(job.watch.newest.values())
    victim = job.watch.newest[number % job.setting.ranks]
    node, places = job.node_of(victim), {one.rank: job.node_of(one) for one in old}
    at = job.struck_at = job.plant(fault, node, victim)
    trial = Trial(fault.name, expected.action.value, node)
    _await_told(job, trial, expected, at)
    if expected.job == UNTOUCHED:
        job.watch.wait(lambda: False, CALM_SECONDS)
    else:
        job.watch.wait(lambda: job.is_back(old, []), BOUND_SECONDS)
    trial.job = _became(job, old, places)
    if trial.job != UNTOUCHED:
        _look_at_job(job, trial, old, at)
    if expected.job == MOVED:
        _follow_repair(job, trial, at)
    elif job.repair_of(node, at) is not None:
        trial.why_wrong += "; the node was repaired"
    if trial.job != expected.job:
        trial.why_wrong += f"; the job is {trial.job}, was to be {expected.job}"
    trial.why_wrong = trial.why_wrong.removeprefix("; ")
    if expected.action in (Action.RESET_GPU, Action.REBOOT) and not trial.why_wrong:
        job.renew(node)
    return trial


def _await_told(job: FaultyNodes, trial: Trial, expected: Expected, at: float) -> None:
    """Wait until the node shows the fault: a condition, or an entry in its details."""

    def shows(seen: NodeSeen) -> bool:
        if expected.job == MOVED:
            return "Unhealthy" in seen.conditions
        return f'"{expected.name}"' in seen.details

    if job.watch.wait(lambda: job.told_at(trial.node, at, shows) is not None, BOUND_SECONDS):
        trial.marks["told"] = (job.told_at(trial.node, at, shows) or at) - at
    else:
        trial.why_wrong += "; the node never showed it"


def _became(job: FaultyNodes, old: list[Worker], places: Mapping[int, str]) -> str:
    newest = list(job.watch.newest.values())
    if newest == old and not any(one.died_at for one in old):
        return UNTOUCHED
    if not job.is_back(old, []):
        return "lost"
    return IN_PLACE if {one.rank: job.node_of(one) for one in newest} == places else MOVED


def _look_at_job(job: FaultyNodes, trial: Trial, old: list[Worker], at: float) -> None:
    incidents: list[Incident] = []

    def are_told() -> bool:
        nonlocal incidents
        incidents = [one for one in job.incidents() if one.detected_at >= at]
        return bool(incidents) and all(one.started_at is not None for one in incidents)

    if not job.until(are_told, BOUND_SECONDS):
        trial.why_wrong += "; no incident tells of it"
        return
    if len(incidents) > 1:
        trial.why_wrong += f"; {len(incidents)} incidents"
    trial.marks["detected"] = incidents[0].detected_at - at
    trial.marks["stopped"] = (incidents[-1].stopped_at or at) - at
    trial.marks["running"] = job.stepped_at(old, []) - at
    before = max(step for one in old for _, step in one.newest)
    resumed = min(one.first_step or 0 for one in job.watch.newest.values())
    trial.lost_steps = before + 1 - resumed


def _follow_repair(job: FaultyNodes, trial: Trial, at: float) -> None:
    """Wait until the node is back in service, or another one has replaced it."""
    if not job.until(lambda: job.repair_of(trial.node, at) is not None, BOUND_SECONDS):
        trial.why_wrong += "; the node was not repaired"
        return
    repair = job.repair_of(trial.node, at)
    assert repair is not None
    made = {
        "ordered": repair.acted_at,
        "back": repair.returned_at,
        "in service": repair.ended_at,
    }
    trial.marks |= {name: when - at for name, when in made.items() if when is not None}
    if (repair.action.value, repair.state) != (trial.action, RepairState.DONE):
        said = f"{repair.action.value} {repair.state.value}: {repair.message}"
        trial.why_wrong += f"; repaired otherwise: {said}"


def figures(trials: list[Trial]) -> dict[str, Any]:
    """Figures of all trials of one fault."""
    right = [one for one in trials if not one.why_wrong]
    marks: dict[str, list[float]] = {}
    for one in right:
        for name, seconds in one.marks.items():
            marks.setdefault(name, []).append(seconds)
    return {
        "fault": trials[0].fault,
        "action": trials[0].action,
        "job": right[0].job if right else "",
        "trials": len(trials),
        "right": len(right),
        "wrong": [one.why_wrong for one in trials if one.why_wrong],
        "p50": {name: percentile(found, 0.5) for name, found in marks.items()},
        "p95": {name: percentile(found, 0.95) for name, found in marks.items()},
        "lost_steps_max": max(
            (one.lost_steps for one in right if one.lost_steps is not None), default=None
        ),
    }
