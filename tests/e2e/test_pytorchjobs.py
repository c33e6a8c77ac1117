"""Kubeflow's PyTorchJobs on the local cluster, with unmodified torchrun, torch and kubectl."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MANIFEST = Path(__file__).parents[1] / "spec/manifests/pytorchjob-fsdp-llama3-8b.yaml"
PROGRAM = Path(__file__).parent / "programs/kubeflow_train.py"
NAME = "llama3-1-8b-fsdp"
PATIENCE_SECONDS = 90
"""Seconds to wait: torch takes long to load on a busy machine."""
RESUME = {
    "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
    "sagemaker.amazonaws.com/job-max-retry-count": "2",
}
Object = dict[str, Any]


@dataclass
class Progress:
    """Steps of a job as rank 0 reports them."""

    fifo: Path
    state: Path
    handle: int
    rest: bytes = b""

    def until(self, holds: Callable[[int], bool]) -> int:
        """Wait for a step."""
        while True:
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                if holds(int(line)):
                    return int(line)
            ready, _, _ = select.select([self.handle], [], [], PATIENCE_SECONDS)
            assert ready, "the job makes no progress"
            self.rest += os.read(self.handle, 4096)


@pytest.fixture
def progress(tmp_path: Path) -> Iterator[Progress]:
    """Provide the pipe to which one job reports its steps."""
    fifo = tmp_path / "steps"
    os.mkfifo(fifo)
    handle = os.open(fifo, os.O_RDWR)
    yield Progress(fifo, tmp_path / "state", handle)
    os.close(handle)


def torchrun(progress: Progress, steps: int, *options: str) -> list[str]:
    """Return the command of a container."""
    script = [str(PROGRAM), str(progress.state), str(progress.fifo), str(steps)]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def manifest(directory: Path, command: list[str]) -> Object:
    """Return the published manifest for two nodes, with this machine's script and disk."""
    text = MANIFEST.read_text()
    filled = {"NUM_NODES": "2", "GPU_PER_NODE": "1", "EFA_PER_NODE": "1", "{IMAGE_URI}": "any"}
    for name, value in {**filled, "{HF_TOKEN}": "none"}.items():
        text = text.replace(f"${name}", value)
    text = text.replace("/mnt/k8s-disks/0", str(directory))
    job: Object = yaml.safe_load(text)
    job["metadata"]["annotations"] = RESUME
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 5
    pod["containers"][0]["command"] = command
    return job


def reasons(cluster: Cluster, name: str) -> list[str]:
    """Return reason and message of the events of a job."""
    found = cluster.get("events", "--field-selector", f"involvedObject.name={name}")
    return [f"{one['reason']}: {one['message']}" for one in found["items"]]


@pytest.mark.heavy
def test_the_published_manifest_survives_the_loss_of_a_node(
    make_cluster: Callable[..., Cluster], progress: Progress, tmp_path: Path
) -> None:
    cluster = make_cluster(
        *("--nodes", "3", "--gpu-per-node", "1", "--resource", "vpc.amazonaws.com/efa=1")
    )
    command = torchrun(progress, 60, "--nproc_per_node=1", "--nnodes=2")
    cluster.apply(manifest(tmp_path, command))
    before = progress.until(lambda step: step >= 5)
    old = cluster.get("pod", f"{NAME}-worker-0")
    lost = old["spec"]["nodeName"]
    cluster.kubectl("annotate", "node", lost, "unbroken.dev/power=off")
    cluster.wait(f"pytorchjob/{NAME}", "condition=Succeeded", seconds=PATIENCE_SECONDS)

    job = cluster.get("pytorchjob", NAME)
    annotations = job["metadata"]["annotations"]
    assert annotations["unbroken.dev/auto-resume-count"] == "1"
    assert f"node {lost} does not answer" in annotations["unbroken.dev/auto-resume-fault"]
    told = reasons(cluster, NAME)
    assert any(
        line.startswith("PyTorchJobRestarting: ") and f"node {lost} does not answer" in line
        for line in told
    ), told
    assert any(line.startswith("PyTorchJobSucceeded: ") for line in told), told
    new = cluster.get("pod", f"{NAME}-worker-0")
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert new["spec"]["nodeName"] != lost
    log = cluster.kubectl("logs", f"{NAME}-worker-0").stdout
    begun = int(log.rpartition(" begins at ")[2].split()[0])
    assert before <= begun < 60, "it went on where it was"
    assert "of 2 ends at 60" in log
    assert job["status"]["replicaStatuses"]["Worker"]["succeeded"] == 2


def test_a_master_and_a_worker_meet_without_torchrun(cluster: Cluster, progress: Progress) -> None:
    """Use MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as the oldest examples of Kubeflow do."""
    script = [str(PROGRAM), str(progress.state), str(progress.fifo), "5"]
    container = {"name": "pytorch", "image": "any", "command": [sys.executable, *script]}
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 2}}
    one = {"replicas": 1, "restartPolicy": "OnFailure", "template": template}
    cluster.apply(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "simple"},
            "spec": {
                "runPolicy": {"cleanPodPolicy": "All"},
                "pytorchReplicaSpecs": {"Master": one, "Worker": one},
            },
        }
    )
    cluster.wait("pytorchjob/simple", "condition=Succeeded", seconds=PATIENCE_SECONDS)
    assert progress.state.read_text() == "5"
    table = cluster.kubectl("get", "pytorchjobs", "simple").stdout
    assert table.split()[:5] == ["NAME", "STATE", "AGE", "simple", "Succeeded"]
    for name in ("simple-master-0", "simple-worker-0"):
        cluster.wait(f"pod/{name}", "delete")


def test_a_job_that_cannot_run_is_refused_when_it_is_applied(cluster: Cluster) -> None:
    text = yaml.safe_dump(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "bad"},
            "spec": {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": {"containers": []}}}}},
        }
    )
    refused = cluster.kubectl("apply", "-f", "-", stdin=text, check=False)
    assert refused.returncode == 1
    assert "one of them must be named pytorch" in refused.stderr


def test_a_job_leaves_a_node_that_waits_for_repair_once(cluster: Cluster) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    container = {"name": "pytorch", "image": "any", "command": command}
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
    cluster.apply(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "moves", "annotations": RESUME},
            "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 1, "template": template}}},
        }
    )
    cluster.wait("pytorchjob/moves", "condition=Running")
    before = cluster.get("pod", "moves-worker-0")["spec"]["nodeName"]
    health = "sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReboot"
    cluster.kubectl("label", "--overwrite", "node", before, health)
    path = "{.metadata.annotations.unbroken\\.dev/auto-resume-count}"
    cluster.wait("pytorchjob/moves", f"jsonpath={path}=1")
    other = next(name for name in ("node-0", "node-1") if name != before)
    cluster.wait("pod/moves-worker-0", f"jsonpath={{.spec.nodeName}}={other}")
    cluster.kubectl("delete", "pytorchjob", "moves")
    cluster.wait("pod/moves-worker-0", "delete")


def test_the_controller_is_switched_off_for_kubeflows_own(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("--nodes", "0", "--no-pytorchjobs")
    kinds = cluster.kubectl("get", "crds", "-o", "name").stdout
    assert "hyperpodpytorchjobs" in kinds
    assert "pytorchjobs.kubeflow.org" not in kinds
