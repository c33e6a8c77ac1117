"""Jobs of real nodes, and the records that their workers wrote while they lived."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import pytest

from tests.deploy.charts import NAMESPACE
from tests.realnodes import machines
from tests.realnodes.machines import IMAGE
from tests.realnodes.plane import RealCluster, until
from tests.realnodes.releases import CONTROL_PLANE

Object = dict[str, Any]

PLAIN = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
names = ("JOB_RESTART_COUNT", "RANK", "WORLD_SIZE", "UNBROKEN_POD", "NODE")
facts = {name: os.environ[name] for name in names}
own = folder / f"{facts['JOB_RESTART_COUNT']}-{facts['RANK']}-{time.time_ns()}"
with own.open("w", buffering=1) as diary:
    diary.write(json.dumps(facts) + "\\n")
    while not (folder / "finish").exists():
        diary.write(f"{time.time()}\\n")
        print("alive at", time.time(), flush=True)  # an incident ends with a line that recurs
        time.sleep(0.05)
"""
"""Worker that writes its identity, and then the times at which it is alive."""

GLOO = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
folder = Path(sys.argv[1])
names = ("JOB_RESTART_COUNT", "RANK", "WORLD_SIZE", "UNBROKEN_POD", "NODE")
facts = {name: os.environ[name] for name in names}
own = folder / f"{facts['JOB_RESTART_COUNT']}-{facts['RANK']}-{time.time_ns()}"
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
with own.open("w", buffering=1) as diary:
    diary.write(json.dumps(facts) + "\\n")
    while True:
        # All leave at one step: the sum says whether anybody has seen the file.
        both = torch.tensor([float(rank + 1), float((folder / "finish").exists())])
        dist.all_reduce(both)
        assert both[0].item() == size * (size + 1) / 2
        diary.write(f"{time.time()}\\n")
        print("alive at", time.time(), flush=True)  # an incident ends with a line that recurs
        if both[1].item():
            break
        time.sleep(0.05)
dist.destroy_process_group()
"""
"""The same worker as PLAIN, with a sum over all ranks for each line."""


@dataclass(frozen=True)
class Life:
    """The record of one worker."""

    attempt: int
    rank: int
    pod: str
    node: str
    began_at: float
    ended_at: float
    """Time of its last line."""


@dataclass(frozen=True)
class Job:
    """A job of one worker a pod and one pod a node, which runs until `finish`."""

    cluster: RealCluster
    name: str
    replicas: int = 2
    script: str = PLAIN
    spares: int = 0
    image: str = IMAGE
    command: tuple[str, ...] = ("unbrokenrun",)
    security: Mapping[str, Any] = field(default_factory=dict)
    """Security context of the container."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    retries: int = 20

    def apply(self, **more: Any) -> None:
        """Create the job; `more` is added to its pods' specification."""
        folder = self.cluster.shared / self.name
        folder.mkdir()
        folder.chmod(0o777)  # images run as nobody
        (folder / "train.py").write_text(self.script)
        arguments = ["--nproc-per-node=1", "--nnodes=$(NNODES)", f"{folder}/train.py", str(folder)]
        rules = {
            "labelSelector": {"matchLabels": {"HPJob": self.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        container = {
            "name": "pytorch",
            "image": self.image,
            "command": [*self.command, *arguments],
            "securityContext": dict(self.security),
            "env": [node],
            "volumeMounts": [{"name": "shared", "mountPath": str(folder)}],
        }
        pod = {
            "terminationGracePeriodSeconds": 2,
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rules]}
            },
            "containers": [container],
            "volumes": [{"name": "shared", "hostPath": {"path": str(folder)}}],
            **more,
        }
        replica = {
            "name": "pods",
            "replicas": self.replicas,
            "spares": self.spares,
            "template": {"spec": pod},
        }
        policy = {"cleanPodPolicy": "None", "jobMaxRetryCount": self.retries}
        self.cluster.apply(
            {
                "apiVersion": "sagemaker.amazonaws.com/v1",
                "kind": "HyperPodPyTorchJob",
                "metadata": {"name": self.name, "annotations": dict(self.annotations)},
                "spec": {"nprocPerNode": "1", "runPolicy": policy, "replicaSpecs": [replica]},
            }
        )

    def lives(self) -> list[Life]:
        """Return the records of all workers in the order of their starts."""
        found = []
        for path in (self.cluster.shared / self.name).glob("*-*-*"):
            first, *rest = path.read_text().splitlines() or [""]
            beats = [float(line) for line in rest if "." in line]
            if not beats:
                continue
            facts = json.loads(first)
            numbers = int(facts["JOB_RESTART_COUNT"]), int(facts["RANK"])
            own = facts["UNBROKEN_POD"], facts["NODE"]
            found.append(Life(*numbers, *own, beats[0], beats[-1]))
        return sorted(found, key=lambda one: one.began_at)

    def newest(self) -> int:
        """Return the newest attempt in any record."""
        return max((one.attempt for one in self.lives()), default=-1)

    def running(self, after: int = -1) -> dict[int, Life]:
        """Wait until all ranks of an attempt newer than `after` work; return them."""
        found: dict[int, Life] = {}

        def is_complete() -> bool:
            found.clear()
            newest = self.newest()
            found.update({one.rank: one for one in self.lives() if one.attempt == newest})
            return newest > after and sorted(found) == list(range(self.replicas))

        try:
            until(is_complete, f"job {self.name}: an attempt after {after} runs")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state()}") from None
        return found

    def state(self) -> str:
        """Return what a person would look at first, if the job does not run."""
        looks = (
            ("get", "nodes,pods,hyperpodpytorchjobs,incidents", "--all-namespaces", "-o", "wide"),
            ("describe", "hyperpodpytorchjobs,pods", "-l", f"HPJob={self.name}"),
            ("get", "hyperpodpytorchjobs", self.name, "-o", "jsonpath={.status}"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            *(("logs", one["metadata"]["name"], "--tail=20") for one in self.pods()),
            ("-n", NAMESPACE, "logs", "-l", CONTROL_PLANE, "--tail=60", "--prefix"),
        )
        return "\n".join(self.cluster.kubectl(*look, check=False).stdout for look in looks)

    def pods(self) -> list[Object]:
        """Return its pods, as the API has them."""
        found: list[Object] = self.cluster.get("pods", "-l", f"HPJob={self.name}")["items"]
        return found

    def workers(self, node: str) -> list[int]:
        """Return the pids of its workers on a node, without parked processes."""
        return machines.writers(node, self.cluster.shared / self.name)

    def kill_worker(self, node: str) -> None:
        """Send SIGKILL to the only worker that runs on a node."""
        [pid] = self.workers(node)
        os.kill(pid, signal.SIGKILL)

    def goes_on(self, since: float) -> bool:
        """Return whether every rank of the newest attempt has written after `since`."""
        newest = self.newest()
        last = {one.rank: one.ended_at for one in self.lives() if one.attempt == newest}
        return len(last) == self.replicas and min(last.values()) > since

    def object(self) -> Object:
        """Return the job as the API has it."""
        return self.cluster.get("hyperpodpytorchjobs", self.name)

    def incident(self, number: int) -> Object:
        """Wait until an incident has ended; return it."""
        what = f"incidents/{self.name}-{number}"
        self.cluster.wait(what, "create", seconds=55)
        self.cluster.wait(what, "jsonpath={.spec.outcome}=recovered", seconds=55)
        spec: Object = self.cluster.get("incidents", f"{self.name}-{number}")["spec"]
        return spec

    def finish(self, woken: Life | None = None) -> None:
        """Let the workers end well, and assert that no two attempts were alive at once.

        A worker that slept with its machine is excepted.
        """
        (self.cluster.shared / self.name / "finish").touch()
        self.cluster.wait(f"hyperpodpytorchjobs/{self.name}", "condition=Completed", seconds=55)
        lives = self.lives()
        assert_apart(one for one in lives if woken is None or _key(one) != _key(woken))
        self.cluster.kubectl("delete", "hyperpodpytorchjobs", self.name, "--timeout=55s")


def named(name: str, **annotations: str) -> pytest.MarkDecorator:
    """Mark a test with the name of its job, and with annotations of ours."""
    own = {f"unbroken.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return pytest.mark.parametrize("job", [(name, own)], indirect=True, ids=[""])


def _key(life: Life) -> tuple[int, int, str]:
    return life.attempt, life.rank, life.node


def assert_new_process_after_a_kill(job: Job) -> None:
    """Run a new job of two nodes, kill a worker, and assert that it resumes in the same pods."""
    first = job.running()
    assert {one.node for one in first.values()} == {"n1", "n2"}
    job.kill_worker("n2")
    second = job.running(after=0)
    assert {one.pod for one in second.values()} == {one.pod for one in first.values()}
    assert job.incident(1)["remedy"] == "process"


def assert_apart(lives: Iterable[Life]) -> None:
    """Assert that attempts did not overlap, and that no rank ran twice in one."""
    ordered = sorted(lives, key=lambda one: (one.attempt, one.rank))
    attempts = [list(group) for _, group in groupby(ordered, lambda one: one.attempt)]
    for group in attempts:
        ranks = [one.rank for one in group]
        assert len(ranks) == len(set(ranks)), f"a rank twice in one attempt: {group}"
    for before, after in pairwise(attempts):
        last = max(before, key=lambda one: one.ended_at)
        first = min(after, key=lambda one: one.began_at)
        assert last.ended_at < first.began_at, f"{last} and {first} were alive at once"
