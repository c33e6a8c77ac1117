"""Jobs of real processes in a local cluster, and the records of their workers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster_logs import assert_no_errors
from tests.e2e.clusters import UNBROKEN, Cluster, find_kubectl
from tests.watching import PATIENCE_SECONDS, wait_until

Object = dict[str, Any]

SCRIPT = """
import os, sys, time
from pathlib import Path
diary, finish = Path(sys.argv[1]), Path(sys.argv[2])
names = ("JOB_RESTART_COUNT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "UNBROKEN_POD")
line = " ".join(os.environ[name] for name in names)
with diary.open("a") as file:
    file.write(f"{line} {os.getpid()}\\n")
print("started", line, flush=True)
step = 0
while not finish.exists():
    step += 1
    print("step", step, flush=True)  # tells that it trains
    time.sleep(0.05)
print("done", flush=True)
"""


@contextmanager
def named_job(folder: Path, kind: type[Cluster] = Cluster) -> Iterator[Job]:
    """Start a local cluster of two nodes with an operator; the job `lm` is not in it yet."""
    cluster = kind(folder / "state", find_kubectl())
    cluster.unbroken("up", "--detach", "--nodes", "2")
    yield Job(cluster, "lm", folder)
    cluster.take_away()


@dataclass(frozen=True)
class Worker:
    """One start of a worker, from its own record."""

    attempt: int
    rank: int
    world_size: int
    store: tuple[str, str]
    pod: str
    pid: int


@dataclass(frozen=True)
class Job:
    """A job whose workers run until `finish`."""

    cluster: Cluster
    name: str
    folder: Path

    def apply(
        self, replicas: int = 2, spares: int = 0, nproc: int = 2, script: str = SCRIPT
    ) -> None:
        """Create the job, one pod a node."""
        (self.folder / "train.py").write_text(script)
        rules = {
            "labelSelector": {"matchLabels": {"HPJob": self.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        files = (str(self.folder / name) for name in ("train.py", "diary", "finish"))
        command = ["hyperpodrun", f"--nproc-per-node={nproc}", "--nnodes=$(NNODES)", *files]
        pod = {
            "terminationGracePeriodSeconds": 2,
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rules]}
            },
            "containers": [{"name": "main", "image": "any", "command": command}],
        }
        replica = {"name": "pods", "replicas": replicas, "spares": spares}
        policy = {"cleanPodPolicy": "None", "jobMaxRetryCount": 10}
        self.cluster.apply(
            {
                "apiVersion": "sagemaker.amazonaws.com/v1",
                "kind": "HyperPodPyTorchJob",
                "metadata": {"name": self.name},
                "spec": {
                    "nprocPerNode": str(nproc),
                    "runPolicy": policy,
                    "replicaSpecs": [{**replica, "template": {"spec": pod}}],
                },
            }
        )

    def workers(self, attempt: int) -> dict[int, Worker]:
        """Return the started workers of an attempt by rank; assert that no rank has two."""
        found: dict[int, Worker] = {}
        diary = self.folder / "diary"
        for line in diary.read_text().splitlines() if diary.exists() else ():
            one, rank, size, address, port, pod, pid = line.split()
            worker = Worker(int(one), int(rank), int(size), (address, port), pod, int(pid))
            if worker.attempt == attempt:
                assert worker.rank not in found, f"rank {rank} started twice in attempt {attempt}"
                found[worker.rank] = worker
        return found

    def started(self, attempt: int, size: int = 4) -> dict[int, Worker]:
        """Wait until all workers of an attempt have started; return them."""
        until(lambda: len(self.workers(attempt)) == size, f"attempt {attempt}: {size} workers")
        found = self.workers(attempt)
        assert sorted(found) == list(range(size))
        assert {worker.world_size for worker in found.values()} == {size}
        assert len({worker.store for worker in found.values()}) == 1
        return found

    def object(self) -> Object:
        """Return the job as the API has it."""
        return self.cluster.get("hyperpodpytorchjobs", self.name)

    def wait(self, condition: str, seconds: int = 30) -> None:
        """Wait until a condition is true."""
        self.cluster.wait(
            f"hyperpodpytorchjobs/{self.name}", f"condition={condition}", seconds=seconds
        )

    def incident(self, number: int) -> Object:
        """Wait until an incident has ended; return it."""
        what = f"incidents/{self.name}-{number}"
        self.cluster.wait(what, "create")  # it is written after the status
        self.cluster.wait(what, "jsonpath={.spec.outcome}=recovered")
        spec: Object = self.cluster.get("incidents", f"{self.name}-{number}")["spec"]
        return spec

    def finish(self) -> None:
        """Let the workers end well."""
        (self.folder / "finish").touch()


class Operator:
    """`unbroken operator` in a process of its own."""

    def __init__(self, cluster: Cluster, *options: str, log: str = "operator.log") -> None:
        self._cluster = cluster
        self._options = options
        self._path = cluster.directory.parent / log
        self._log = self._path.open("ab")
        self._start()

    def _start(self) -> None:
        command = [*UNBROKEN, "operator", "--dir", str(self._cluster.directory), *self._options]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start another operator after `kill`."""
        self._start()

    def close(self) -> None:
        """End it, and fail if its log has an error."""
        self.process.terminate()
        self.process.wait(timeout=PATIENCE_SECONDS)
        self._log.close()
        assert_no_errors(self._path)


def until(holds: Callable[[], object], what: str) -> None:
    """Poll until something holds that no event reports."""
    wait_until(holds, logs=lambda: what)


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
