"""The operator beside a real kube-apiserver, with a scheduler, controllers and nodes of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from apiservers import CannotStartError, real_cluster
from controller.trained_jobs import Job, Operator, is_alive, kill
from e2e.clusters import Cluster
from unbroken.embedded import networks
from unbroken.embedded.node.addresses import NODES_MAX

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

SERVICES = """
import asyncio, sys
from pathlib import Path
from unbroken.embedded.controllers import ControllerOptions, run_controllers
from unbroken.embedded.scheduler import run_scheduler
from unbroken.kube.client import connect
from unbroken.kube.informers import Informers

async def main():
    client = connect(sys.argv[1])
    informers = Informers(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(informers.run())
        tasks.create_task(run_scheduler(client, informers))
        tasks.create_task(run_controllers(client, ControllerOptions(Path(sys.argv[2])), informers))

asyncio.run(main())
"""
"""What kube-apiserver needs beside it; it is started alone."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of a real API server with two nodes of ours and the operator as a process."""
    kubectl = shutil.which("kubectl") or shutil.which("kubectl", path=Path(sys.executable).parent)
    assert kubectl, "kubectl is missing; `make setup` installs it"
    cluster = Cluster(tmp_path / "state", str(kubectl))
    cluster.directory.mkdir()
    plane = tmp_path / "plane"
    plane.mkdir()
    with ExitStack() as stack:
        try:
            server = stack.enter_context(real_cluster(plane))
        except CannotStartError as error:
            pytest.skip(str(error))
        kubeconfig = cluster.directory / "kubeconfig"
        kubeconfig.symlink_to(server.kubeconfig)
        services = [sys.executable, "-c", SERVICES, str(kubeconfig), str(tmp_path / "volumes")]
        stack.enter_context(program(services))
        for number in range(2):
            stack.enter_context(Node(cluster, number))
        operator = Operator(cluster)
        stack.callback(operator.close)
        for what in ("node/n0", "node/n1", "crd/hyperpodpytorchjobs.sagemaker.amazonaws.com"):
            cluster.kubectl("wait", "--for=create", what, "--timeout=60s")
        for name in ("n0", "n1"):
            cluster.wait(f"node/{name}", "condition=Ready")
        cluster.wait("crd/hyperpodpytorchjobs.sagemaker.amazonaws.com", "condition=Established")
        yield Job(cluster, "lm", tmp_path)


@contextmanager
def program(command: list[str]) -> Iterator[None]:
    """Run a program beside the block."""
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


class Node:
    """A node of ours as a process of its own; all of it ends with the block."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        directory = cluster.directory / f"n{number}"
        directory.mkdir()
        index = networks.claim(cluster.directory) * NODES_MAX + number
        module = [sys.executable, "-m", "unbroken.embedded.node", "--name", f"n{number}"]
        self._command = [*module, "--dir", str(directory), "--index", str(index), "--cpu", "8"]
        self._command += ["--kubeconfig", str(cluster.directory / "kubeconfig")]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=20)
        subprocess.run([*self._command, "--stop-pods"], check=True, timeout=30)


def test_a_job_runs_and_recovers_on_a_real_control_plane(job: Job) -> None:
    job.apply(replicas=2, nproc=1)
    first = job.started(0, size=2)
    job.wait("Running")
    kill(first[1].pid)
    second = job.started(1, size=2)
    assert not any(is_alive(worker.pid) for worker in first.values())
    assert job.incident(1)["remedy"] == "process"

    before = job.cluster.get("pod", "lm-pods-1")["metadata"]["uid"]
    job.cluster.kubectl("delete", "pod", "lm-pods-1", "--wait=false")
    third = job.started(2, size=2)
    assert not any(is_alive(worker.pid) for worker in second.values())
    assert job.cluster.get("pod", "lm-pods-1")["metadata"]["uid"] != before
    assert third[1].pod == "lm-pods-1"
    assert job.incident(2)["remedy"] == "pod"

    job.finish()
    job.wait("Completed")
    assert job.object()["status"]["restartCount"] == 2
    said = job.cluster.kubectl("describe", "hyperpodpytorchjobs", "lm").stdout
    assert "hyperpod-pytorch-job-controller" in said
    job.cluster.kubectl("delete", "hyperpodpytorchjobs", "lm")
    job.cluster.wait("pod/lm-pods-0", "delete")
    job.cluster.wait("secret/lm-agent", "delete")
