"""A node with a pod of each kind of job loses its power: what continues, and what waits for whom.

docs/guide/node-repair.md has the table of what was measured. Kinds that are not of this package run
under its own controller (PyTorchJob) or under a stand-in for Trainer and JobSet (TrainJob), whose
Jobs are those of Kubernetes.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop import stock_agent
from tests.operator.conftest import Place
from tests.operator.resume import jobset_standin
from tests.operator.resume.jobset_standin import install
from tests.realnodes import machines
from tests.realnodes.machines import IMAGE
from tests.realnodes.plane import RealCluster, operator, repair_options, until
from tests.realnodes.repair_hook import KEEPS_NODES
from tests.watching import running
from unbroken.core.fencing import proof_command
from unbroken.kube.client import connect
from unbroken.kube.informer import Informers
from unbroken.local.kubeflow.controller import run_pytorchjobs
from unbroken.operator.fences import AWAITED
from unbroken.spec.job_kinds import HYPERPOD_JOB, PYTORCHJOB, TRAIN_JOB, JobKind
from unbroken.spec.keys import OUT_OF_SERVICE

NODES = 3
VICTIM = "n2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(1200),
]
Object = dict[str, Any]
Record = Callable[[str, object], None]
DIARY = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
own = folder / f"{os.environ.get('RANK', '0')}-{os.environ['NODE']}-{time.time_ns()}"
with own.open("w", buffering=1) as diary:
    while not (folder / "finish").exists():
        diary.write(f"{time.time()}\\n")
        print("alive at", time.time(), flush=True)  # an incident ends with a line that recurs
        time.sleep(0.05)
"""
"""Worker that writes the times at which it is alive; its file has its rank and its node."""
PROGRAMS = Path(stock_agent.__file__).with_name("programs")


@dataclass(frozen=True)
class Dying:
    """A job of some kind with a pod on the node that dies."""

    cluster: RealCluster
    name: str
    kind: JobKind
    ranks: int
    command: tuple[str, ...] = ("unbrokenrun", "--nproc-per-node=1", "--nnodes=$(NNODES)")
    mounts: tuple[str, ...] = ()
    """Folders of this host that the container sees, too."""
    waits: bool = True
    """Without a proof that nothing runs on the node, the job waits."""

    @property
    def folder(self) -> Path:
        """The folder of the script and its records, a volume that any node may mount."""
        return self.cluster.shared / self.name

    def apply(self) -> None:
        """Create the volume and the job."""
        self.folder.mkdir()
        (self.folder / "train.py").write_text(DIARY)
        self.cluster.apply(*self._volume(), self._object())

    def _volume(self) -> Iterator[Object]:
        about = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": self.name}
        size = {"storage": "1Gi"}
        meta = {"apiVersion": "v1", "metadata": {"name": self.name}}
        own = {"capacity": size, "hostPath": {"path": str(self.folder)}}
        own |= {"accessModes": about["accessModes"]}
        yield {**meta, "kind": "PersistentVolume", "spec": own}
        claim = {**about, "resources": {"requests": size}}
        yield {**meta, "kind": "PersistentVolumeClaim", "spec": claim}

    def template(self) -> Object:
        """Return the template of its pods, of which no two are on one node."""
        rules = {
            "labelSelector": {"matchLabels": {"dying": self.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        places = {"records": str(self.folder)}
        places |= {f"host-{number}": path for number, path in enumerate(self.mounts)}
        volumes = [{"name": name, "hostPath": {"path": path}} for name, path in places.items()]
        volumes[0] = {"name": "records", "persistentVolumeClaim": {"claimName": self.name}}
        container = {
            "name": "pytorch",
            "image": IMAGE,
            "command": [*self.command, f"{self.folder}/train.py", str(self.folder)],
            "env": [node],
            "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items()],
        }
        apart = {"requiredDuringSchedulingIgnoredDuringExecution": [rules]}
        spec = {"terminationGracePeriodSeconds": 2, "affinity": {"podAntiAffinity": apart}}
        spec |= {"containers": [container], "volumes": volumes}
        return {"metadata": {"labels": {"dying": self.name}}, "spec": spec}

    def _object(self) -> Object:
        about = {"apiVersion": f"{self.kind.group}/{self.kind.version}", "kind": self.kind.name}
        return {**about, "metadata": {"name": self.name}, "spec": self._spec()}

    def _spec(self) -> Object:
        if self.kind is TRAIN_JOB:
            return {"runtimeRef": {"name": "torch-distributed"}}
        if self.kind is PYTORCHJOB:
            replica = {"restartPolicy": "OnFailure", "template": self.template()}
            counts = {"Master": 1, "Worker": self.ranks - 1}
            replicas = {key: {**replica, "replicas": count} for key, count in counts.items()}
            return {"pytorchReplicaSpecs": replicas}
        replica = {"name": "pods", "replicas": self.ranks, "template": self.template()}
        return {"nprocPerNode": "1", "replicaSpecs": [replica]}

    def began(self, since: float) -> dict[int, float]:
        """Return when each rank first worked off the dead node, by records that go on after
        `since`."""
        found: dict[int, float] = {}
        for path in self.folder.glob("*-n*-*"):
            rank, node, _ = path.name.split("-")
            beats = [float(line) for line in path.read_text().splitlines() if "." in line]
            if node != VICTIM and beats and beats[-1] > since:
                found[int(rank)] = min(beats[0], found.get(int(rank), beats[0]))
        return found

    def works(self) -> bool:
        """True if all ranks work, one of them on the node that will die."""
        nodes = {path.name.split("-")[1] for path in self.folder.glob("*-n*-*")}
        ranks = {path.name.split("-")[0] for path in self.folder.glob("*-n*-*")}
        return VICTIM in nodes and len(ranks) == self.ranks

    def seconds(self, lost_at: float) -> float:
        """Wait until all ranks work off the dead node; return the seconds from its loss to the
        first step of the lost rank."""
        until(lambda: len(self.began(lost_at)) == self.ranks, f"{self.name} works elsewhere", 300)
        return max(self.began(lost_at).values()) - lost_at

    def advice(self) -> str:
        """Return the text of the event on the job that says what it waits for; empty: none yet."""
        events = self.cluster.get("events", f"--field-selector=reason={AWAITED}")["items"]
        mine = (self.kind.name, self.name)
        about = ((one["involvedObject"], one["message"]) for one in events)
        return next((text for one, text in about if (one["kind"], one["name"]) == mine), "")

    def remove(self) -> None:
        """Delete the job, and then its volume."""
        what = self.kind.resource
        self.cluster.kubectl("delete", what, self.name, "--timeout=100s", seconds=110)
        pods = ("pods", "-l", f"dying={self.name}")
        until(lambda: not self.cluster.get(*pods)["items"], f"no pod of {self.name} is left")
        self.cluster.kubectl("delete", f"pvc/{self.name}", f"pv/{self.name}", "--timeout=55s")
        shutil.rmtree(self.folder)


class RealJobs(jobset_standin.Controllers):
    """Trainer and JobSet; Kubernetes runs the Jobs, whose suspension is a parallelism of 0."""

    def __init__(self, place: Place, job: Dying) -> None:
        super().__init__(place, [], pods=job.ranks)
        self._template = job.template()

    async def _job(self, job: Object) -> None:
        """Leave it to kube-controller-manager."""

    async def _kubelet(self, pod: Object) -> None:
        """Leave it to a real one."""

    def _suspension(self, suspended: str) -> Object:
        parallelism = 0 if suspended == "true" else self._pods
        return {**super()._suspension(suspended), "spec": {"parallelism": parallelism}}

    def _new_job(self, found: Object, replicated: Object, name: str) -> Object:
        job = super()._new_job(found, replicated, name)
        labels = (
            job["spec"]["template"]["metadata"]["labels"] | self._template["metadata"]["labels"]
        )
        spec = {**self._template["spec"], "restartPolicy": "OnFailure"}
        job["spec"]["template"] = {"metadata": {"labels": labels}, "spec": spec}
        return job


def jobs_of(cluster: RealCluster) -> tuple[Dying, ...]:
    """Return a job of each kind, those of one pod first."""
    agent = stock_agent.installed().bin
    stock = (f"{agent}/hyperpodrun", *Dying.command[1:], "--tee=3", "--log_dir=/tmp/hyperpod")
    seen = (str(agent.parent), str(PROGRAMS))
    return (
        Dying(cluster, "one-node", HYPERPOD_JOB, 1),
        Dying(cluster, "trainjob", TRAIN_JOB, 1, ("python3",)),
        Dying(cluster, "pytorchjob", PYTORCHJOB, 2, ("python3",)),
        Dying(cluster, "hyperpods-agent", HYPERPOD_JOB, 2, stock, seen),
        Dying(cluster, "leased", HYPERPOD_JOB, 2, waits=False),
    )


@contextmanager
def cordoned(cluster: RealCluster, *nodes: str) -> Iterator[None]:
    """Let no new pod onto these nodes."""
    cluster.kubectl("cordon", *nodes)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", *nodes)


@asynccontextmanager
async def controllers(cluster: RealCluster, train_job: Dying) -> AsyncIterator[None]:
    """Run those of other kinds than ours."""
    async with connect(cluster.directory / "kubeconfig") as client:
        await install(client)
        informers = Informers(client)
        trainer = RealJobs(Place(client, "default"), train_job)
        async with running(informers.run(), run_pytorchjobs(client, informers), trainer.run()):
            yield


def start(jobs: Sequence[Dying]) -> None:
    """Create the jobs such that each has a pod on the node that dies, and return once all run."""
    cluster = jobs[0].cluster
    for ranks, away in ((1, ("n1", "n3")), (2, ("n3",))):
        chosen = [job for job in jobs if job.ranks == ranks]
        with cordoned(cluster, *away):
            for job in chosen:
                job.apply()
            for job in chosen:
                until(job.works, f"{job.name} works on {VICTIM}", 300)


def lose(cluster: RealCluster) -> float:
    """Take the power from the node; return the time."""
    lost_at = time.time()
    machines.switch_off(cluster.directory, VICTIM)
    return lost_at


def person_frees_them(cluster: RealCluster, jobs: Sequence[Dying], record: Record) -> None:
    """Lose the node; check what waits, and that the command frees all of them."""
    with operator(cluster):
        start(jobs)
        lost_at = lose(cluster)
        waiting = [job for job in jobs if job.waits]
        for job in jobs:
            if job.waits:
                until(job.advice, f"{job.name} says what it waits for", 300)
                assert job.advice().endswith(proof_command(VICTIM)), job.advice()
                described = cluster.kubectl("describe", job.kind.resource, job.name).stdout
                assert proof_command(VICTIM) in " ".join(described.split()), described
            else:
                record(f"{job.name}, nobody acts", f"{job.seconds(lost_at):.1f} s")
        for job in waiting:
            if job.kind is HYPERPOD_JOB:
                assert proof_command(VICTIM) in cluster.unbroken("explain", job.name).stdout
            assert len(job.began(time.time() - 1)) < job.ranks, f"{job.name} did not wait"
        record("said what they wait for", f"within {time.time() - lost_at:.0f} s")
        told_at = time.time()
        cluster.kubectl(*shlex.split(waiting[0].advice().partition("run: ")[2])[1:])
        for job in waiting:
            record(f"{job.name}, after the command", f"{job.seconds(told_at):.1f} s")
        number = machines.number_of(cluster.directory, VICTIM)
        machines.switch_on(cluster.directory, VICTIM, number)
        cluster.kubectl("taint", "node", VICTIM, f"{OUT_OF_SERVICE}-")
        until(lambda: not left(jobs), "what ran on the node is gone")
        for job in jobs:
            job.remove()


def left(jobs: Sequence[Dying]) -> list[int]:
    """Return the workers of the jobs on the node that has died."""
    return [pid for job in jobs for pid in machines.writers(VICTIM, job.folder)]


def provider_frees_them(cluster: RealCluster, jobs: Sequence[Dying], record: Record) -> None:
    """Lose the node; check that the provider's answer frees all jobs."""
    (cluster.directory / KEEPS_NODES).touch()
    with operator(cluster, *repair_options(cluster)):
        start(jobs)
        lost_at = lose(cluster)
        for job in sorted(jobs, key=lambda job: job.waits):
            record(f"{job.name}, with a provider", f"{job.seconds(lost_at):.1f} s")
        taints = cluster.get("node", VICTIM)["spec"]["taints"]
        values = [one.get("value") for one in taints if one["key"] == OUT_OF_SERVICE]
        assert values == ["machine-replaced"], taints
        for job in jobs:
            job.remove()


Way = Callable[[RealCluster, Sequence[Dying], Record], None]


@pytest.mark.parametrize("way", [person_frees_them, provider_frees_them])
async def test_each_kind_of_job_leaves_a_dead_node(
    cluster: RealCluster,
    way: Way,
    record_property: Record,
) -> None:
    jobs = jobs_of(cluster)
    async with controllers(cluster, jobs[1]):
        await asyncio.to_thread(way, cluster, jobs, record_property)
