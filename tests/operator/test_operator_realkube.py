"""The operator on a real kube-apiserver, with a scheduler, controllers and nodes of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.apiservers import CannotStartError, real_cluster
from tests.e2e.clusters import Cluster, find_kubectl, kill
from tests.job_keys import secret_of
from tests.operator.realkube import SERVICES, Node, program
from tests.operator.trained_jobs import Job, Operator, is_alive

pytestmark = [pytest.mark.slow, pytest.mark.realkube]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of a real API server with two nodes of ours and the operator as a process."""
    cluster = Cluster(tmp_path / "state", find_kubectl())
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
        for name in ("n0", "n1"):
            cluster.wait(f"node/{name}", "create", seconds=55)
            cluster.wait(f"node/{name}", "condition=Ready")
        cluster.wait_served()
        yield Job(cluster, "lm", tmp_path)


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
    secret = secret_of(job.cluster.get("pod", "lm-pods-0"))
    job.cluster.kubectl("delete", "hyperpodpytorchjobs", "lm")
    job.cluster.wait("pod/lm-pods-0", "delete")
    job.cluster.wait(f"secret/{secret}", "delete")
