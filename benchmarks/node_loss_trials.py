"""Losses of real nodes under a running job: how a node is lost, and when each reaction is seen."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from recovery_records import percentile

from tests.realnodes import images, machines
from tests.realnodes.jobs import Job, Life
from tests.realnodes.plane import RealCluster
from tests.realnodes.releases import Release
from unbroken.core.job.pods import ALIVE_SECONDS
from unbroken.spec.times import time_seconds

BOUND_SECONDS = 120.0
"""Seconds after which a job without a step counts as not recovered."""
CALM_SECONDS = 20.0
"""Seconds for which a job is watched that need not stop: more than two leases."""
SETTLE_SECONDS = 180.0
LOOK_SECONDS = 0.05
RESTARTS_MAX = 1000
BEAT_SECONDS = 0.01
MOVES, RUNS_ON = "moves", "runs on"

SCRIPT = """
import json, os, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
folder = Path(sys.argv[1])
attempt = os.environ.get("JOB_RESTART_COUNT") or os.environ["TORCHELASTIC_RESTART_COUNT"]
rank = os.environ["RANK"]
facts = {"JOB_RESTART_COUNT": attempt, "RANK": rank, "WORLD_SIZE": os.environ["WORLD_SIZE"],
         "UNBROKEN_POD": os.environ.get("UNBROKEN_POD", ""), "NODE": os.environ["NODE"]}
own = f"{attempt}-{rank}-{time.time_ns()}"
def live():
    with open(folder / f"alive.{own.replace('-', '.')}", "w", buffering=1) as file:
        while True:
            file.write(f"{time.time()}\\n")
            time.sleep(0.01)
threading.Thread(target=live, daemon=True).start()
dist.init_process_group("gloo")
with (folder / own).open("w", buffering=1) as diary:
    diary.write(json.dumps(facts) + "\\n")
    while True:
        both = torch.tensor([1.0, float((folder / "finish").exists())])
        dist.all_reduce(both)
        diary.write(f"{time.time()}\\n")
        print("step", flush=True)
        if both[1].item():
            break
        time.sleep(0.05)
dist.destroy_process_group()
"""
"""Training script: each rank writes the time of each common step, and each 10 ms that it lives."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a job that is lost, and the operator that leads on another node."""

    release: Release
    job: Job
    node: str

    @property
    def room(self) -> Path:
        """The folder of the machines."""
        return self.release.cluster.directory

    @property
    def network(self) -> str:
        """The addresses of the node's pods."""
        return machines.pods_network(self.room, self.node)

    @property
    def operator(self) -> str:
        """The address of the operator that leads."""
        return self.release.addresses()[self.release.leader()]


@dataclass(frozen=True, slots=True)
class Loss:
    """One way to lose a node. `strike` causes the loss, and undoes it when its block ends."""

    name: str
    strike: Callable[[Place], Iterator[None]]
    follows: str = MOVES


def _power_off(place: Place) -> Iterator[None]:
    machines.switch_off(place.room, place.node)
    try:
        yield
    finally:
        machines.switch_on(place.room, place.node, machines.number_of(place.room, place.node))


def _cut(place: Place) -> Iterator[None]:
    machines.cut_off(place.room, place.node, is_cut=True)
    try:
        yield
    finally:
        machines.cut_off(place.room, place.node, is_cut=False)


def _unreached(place: Place) -> Iterator[None]:
    with machines.dropped(place.operator, place.network):
        yield


def _unheard(place: Place) -> Iterator[None]:
    with machines.dropped(place.network, place.operator):
        yield


def _unheard_by_peers(place: Place) -> Iterator[None]:
    with place.release.unheard_by_peers(place.node):
        yield


def _paused(place: Place) -> Iterator[None]:
    with machines.paused(place.room, place.node):
        yield


def _no_kubelet(place: Place) -> Iterator[None]:
    machines.kill_kubelet(place.room, place.node)
    try:
        yield
    finally:
        machines.switch_off(place.room, place.node)
        machines.switch_on(place.room, place.node, machines.number_of(place.room, place.node))


LOSSES = (
    Loss("power-off", _power_off),
    Loss("cut-off", _cut),
    Loss("operator-to-node", _unreached),
    Loss("node-to-operator", _unheard),
    Loss("node-to-peers", _unheard_by_peers),
    Loss("kubelet-dead", _no_kubelet, RUNS_ON),
    Loss("paused", _paused),
)
QUICK = ("power-off", "cut-off", "paused")


@dataclass
class Trial:
    """A loss, and the seconds from it to each reaction."""

    loss: str
    has_spare: bool
    marks: dict[str, float] = field(default_factory=dict)
    overlap: float = 0.0
    """Seconds for which a worker of the old attempt has run at the same time as one of the next."""
    why_wrong: str = ""


def beats(job: Job) -> dict[int, list[list[float]]]:
    """Return the times at which each worker reported that it was alive, by attempt."""
    found: dict[int, list[list[float]]] = {}
    for path in (job.cluster.shared / job.name).glob("alive.*"):
        # A worker that is killed may leave half a line.
        lines = path.read_text().rpartition("\n")[0].splitlines()
        if lines:
            attempt = int(path.name.split(".")[1])
            found.setdefault(attempt, []).append([float(line) for line in lines])
    return found


def overlap(job: Job, least: int = 0) -> float:
    """Return the longest time for which workers of two attempts ran at the same time, in seconds.

    Attempts before `least` do not count. A worker that slept meanwhile counts from when it woke.
    """
    found = {attempt: lives for attempt, lives in beats(job).items() if attempt >= least}
    longest = 0.0
    for attempt, lives in found.items():
        later = [one[0] for other in found if other > attempt for one in found[other]]
        for life in lives:
            beside = [at for at in life if at >= min(later, default=math.inf)]
            if beside:
                longest = max(longest, beside[-1] - beside[0] + BEAT_SECONDS)
    return longest


def all_ranks(job: Job, after: int) -> dict[int, Life]:
    """The newest attempt's workers, if it is newer than `after` and every rank has made a step."""
    lives = job.lives()
    newest = max((one.attempt for one in lives), default=-1)
    found = {one.rank: one for one in lives if one.attempt == newest}
    return found if newest > after and len(found) == job.replicas else {}


def wait(holds: Callable[[], object], seconds: float) -> bool:
    """Wait until `holds()`; return False if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_SECONDS)
    return True


class Unsettled(Exception):
    """The cluster or the job is not ready for a loss; the text says why."""


def settle(release: Release, job: Job) -> Place:
    """Wait until all nodes, operators, pods and ranks are there, and choose a node to lose."""
    cluster = release.cluster
    must = {
        "all nodes are ready": lambda: _are_ready(cluster),
        "an operator leads": release.leader,
        "all pods are ready": lambda: _are_up(job),
        "all ranks make steps": lambda: job.goes_on(time.time() - 2.0),
        "no lost node is avoided any more": lambda: (
            time.time() > _last_fault(cluster) + ALIVE_SECONDS
        ),
    }
    for what, holds in must.items():
        if not wait(holds, SETTLE_SECONDS):
            raise Unsettled(f"not in {SETTLE_SECONDS:.0f} s: {what}")
    release.rolled_out()
    since = time.time()
    wait(lambda: job.goes_on(since + 3.0), SETTLE_SECONDS)
    there = release.operators()[release.leader()]
    lives = all_ranks(job, -1).values()
    node = next((one.node for one in lives if one.node != there), "")
    if not node:
        raise Unsettled(f"no node of the job is without the leading operator, which is on {there}")
    return Place(release, job, node)


def _last_fault(cluster: RealCluster) -> float:
    """Return the time at which the newest incident was detected; 0: there was none."""
    return max((times["detected"] for times in _incidents(cluster)), default=0.0)


def _incidents(cluster: RealCluster) -> list[dict[str, float]]:
    """Return the stages of each incident that it reached, with their times; the first first."""
    specs = [one["spec"] for one in cluster.get("incidents")["items"]]
    named = ({name: _seconds(spec.get(key)) for name, key in STAGES.items()} for spec in specs)
    found = [{name: at for name, at in times.items() if at} for times in named]
    return sorted(found, key=lambda times: times["detected"])


def _are_ready(cluster: RealCluster) -> bool:
    nodes = cluster.get("nodes")["items"]
    return all(cluster.condition(one["metadata"]["name"], "Ready") == "True" for one in nodes)


def _are_up(job: Job) -> bool:
    """Return whether all pods run, and each spare has reported parked workers."""
    pods = job.pods()
    phases = [
        one["status"].get("phase") for one in pods if "deletionTimestamp" not in one["metadata"]
    ]
    if phases != ["Running"] * (job.replicas + job.spares):
        return False
    ranked = {one.pod for one in all_ranks(job, -1).values()}
    spares = [one["metadata"]["name"] for one in pods if one["metadata"]["name"] not in ranked]
    logs = (job.cluster.kubectl("logs", name, check=False).stdout for name in spares)
    return all("parked" in log for log in logs)


def try_loss(release: Release, job: Job, loss: Loss) -> Trial:
    """Lose a node, and watch until the job trains again without it."""
    place, trial = settle(release, job), Trial(loss.name, job.spares > 0)
    old = job.newest()
    strike = contextmanager(loss.strike)
    began_at = time.time()
    with strike(place):
        struck_at = time.time() if loss.name == "power-off" else began_at
        if loss.follows == RUNS_ON:
            _look_on(job, trial, old)
        elif wait(lambda: all_ranks(job, old), BOUND_SECONDS):
            lives = all_ranks(job, old).values()
            trial.marks["first step"] = max(one.began_at for one in lives) - struck_at
            if place.node in {one.node for one in lives} and loss.name in ("power-off", "cut-off"):
                trial.why_wrong = "a rank is said to run on the lost node"
        else:
            trial.why_wrong = f"no step in {BOUND_SECONDS:.0f} s"
    if loss.follows == MOVES:
        _add_stages(job, trial, struck_at)
        if not _has_cleared(release.cluster, place.node):
            trial.why_wrong += "; the lost node has no blame that can be cleared"
    since = time.time()
    if not wait(lambda: job.goes_on(since + 2.0), SETTLE_SECONDS):
        trial.why_wrong += "; the job does not go on after it"
    trial.overlap = overlap(job, old)
    return trial


def _has_cleared(cluster: RealCluster, node: str) -> bool:
    """Clear the blame of a node, once it is written: a job that loses a node again and again makes
    the operator take it for bad."""
    words = ("nodes", "clear", node, "--why", "it was lost on purpose", *cluster.operator_options)
    return wait(lambda: cluster.unbroken(*words, check=False).returncode == 0, SETTLE_SECONDS)


def _look_on(job: Job, trial: Trial, old: int) -> None:
    since = time.time()
    wait(lambda: time.time() - since > CALM_SECONDS, CALM_SECONDS * 2)
    if job.newest() != old or not wait(lambda: job.goes_on(since + CALM_SECONDS), CALM_SECONDS):
        trial.why_wrong = "the job did not run on"
    trial.marks["first step"] = 0.0


def _add_stages(job: Job, trial: Trial, struck_at: float) -> None:
    """Add when the operator detected the fault, and when no worker of the old attempt was left."""
    later = (times for times in _incidents(job.cluster) if times["detected"] >= struck_at)
    trial.marks |= {name: at - struck_at for name, at in next(later, {}).items()}


STAGES = {"detected": "detectedAt", "ended": "stoppedAt", "ready": "readyAt"}


def _seconds(text: str | None) -> float | None:
    return time_seconds(text) if text else None


def figures(trials: list[Trial]) -> dict[str, Any]:
    """Figures of all trials of one loss, with or without a spare."""
    right = [one for one in trials if not one.why_wrong]
    names = dict.fromkeys(name for one in right for name in one.marks)
    marks = {name: [o.marks[name] for o in right if name in o.marks] for name in names}
    return {
        "loss": trials[0].loss,
        "spare": trials[0].has_spare,
        "trials": len(trials),
        "right": len(right),
        "wrong": [one.why_wrong for one in trials if one.why_wrong],
        "overlaps": sum(one.overlap > 0.0 for one in trials),
        "overlap_seconds_max": max(one.overlap for one in trials),
        "p50": {name: percentile(found, 0.5) for name, found in marks.items()},
        "worst": {name: max(found) for name, found in marks.items()},
        "each": [asdict(one) for one in trials],
    }


def new_job(cluster: RealCluster, *, has_spare: bool, lease: dict[str, str]) -> Job:
    """Start a job of two ranks on nodes of their own."""
    name = "spare" if has_spare else "plain"
    job = Job(
        cluster, name, script=SCRIPT, image=images.NAMES["training"], spares=int(has_spare),
        annotations=lease, retries=RESTARTS_MAX,
    )  # fmt: skip
    job.apply()
    job.running()
    return job


def load() -> str:
    """Return the load of this machine, as the kernel reports it."""
    return Path("/proc/loadavg").read_text().rsplit(" ", 2)[0]
