"""The operator, agents and nodes together: jobs of real processes that are really killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster, find_kubectl, kill
from tests.job_keys import secret_of
from tests.operator.trained_jobs import Job, Operator, is_alive, until

pytestmark = pytest.mark.slow
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a cluster with these options of `up`, and name a job in it."""
    cluster = Cluster(tmp_path / "state", find_kubectl())

    def make(*options: str) -> Job:
        cluster.unbroken("up", "--detach", *options)
        return Job(cluster, "lm", tmp_path)

    yield make
    cluster.take_away()


def pod_uids(job: Job) -> dict[str, str]:
    """Return the uids of the job's pods, by name."""
    found = job.cluster.get("pods", "-l", f"HPJob={job.name}")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}


def test_a_job_runs_loses_a_worker_and_completes(start: Start) -> None:
    job = start("--nodes", "2")
    job.apply()
    first = job.started(0)
    assert {first[rank].pod for rank in (0, 1)} == {"lm-pods-0"}
    assert {first[rank].pod for rank in (2, 3)} == {"lm-pods-1"}
    job.wait("Running")
    pods = pod_uids(job)

    kill(first[3].pid)
    second = job.started(1)
    assert not any(is_alive(worker.pid) for worker in first.values())
    assert {rank: one.pod for rank, one in second.items()} == {r: w.pod for r, w in first.items()}
    assert second[0].store != first[0].store
    incident = job.incident(1)
    assert (incident["culprit"]["rank"], incident["culprit"]["pod"]) == (3, "lm-pods-1")
    assert incident["remedy"] == "process"
    assert pod_uids(job) == pods

    job.finish()
    job.wait("Completed")
    status = job.object()["status"]
    assert status["restartCount"] == 1
    assert "done" in job.cluster.kubectl("logs", "lm-pods-0").stdout
    secret = f"Secret/{secret_of(job.cluster.get('pod', 'lm-pods-0'))}"
    for name in (secret, "incidents/lm-1"):
        job.cluster.kubectl("get", name)
    job.cluster.kubectl("delete", "hyperpodpytorchjobs", "lm")
    for name in (secret, "incidents/lm-1", "pod/lm-pods-0"):
        job.cluster.wait(name, "delete")


def test_a_spare_takes_the_rank_of_a_dead_node(start: Start) -> None:
    job = start("--nodes", "3")
    job.apply(spares=1)
    first = job.started(0)
    victim = job.cluster.get("pod", first[2].pod)
    node = victim["spec"]["nodeName"]
    spare = ({"lm-pods-0", "lm-pods-1", "lm-pods-2"} - {one.pod for one in first.values()}).pop()

    job.cluster.kubectl("annotate", "node", node, "unbroken.dev/power=off")
    second = job.started(1)
    assert not any(is_alive(worker.pid) for worker in first.values())
    assert {second[rank].pod for rank in (0, 1)} == {first[0].pod}
    assert {second[rank].pod for rank in (2, 3)} == {spare}
    assert job.incident(1)["remedy"] == "pod"
    fence = job.cluster.get("node", node)["metadata"]["annotations"]["unbroken.dev/fence"]
    assert victim["metadata"]["name"] in fence
    assert pod_uids(job).get(first[2].pod) != victim["metadata"]["uid"]

    job.cluster.kubectl("annotate", "node", node, "unbroken.dev/power-")
    job.cluster.wait(f"pod/{first[2].pod}", "condition=Ready")
    assert job.cluster.get("pod", first[2].pod)["spec"]["nodeName"] == node
    job.finish()
    job.wait("Completed")
    assert job.workers(2) == {}


def test_a_killed_operator_finds_the_job_again(start: Start) -> None:
    job = start("--nodes", "2", "--no-operator")
    operator = Operator(job.cluster)
    try:
        job.apply()
        first = job.started(0)
        job.wait("Running")
        pods = pod_uids(job)
        operator.kill()
        # Nobody is there to see it.
        kill(first[1].pid)
        operator.restart()
        second = job.started(1)
        assert not any(is_alive(worker.pid) for worker in first.values())
        job.incident(1)

        operator.kill()
        operator.restart()
        job.cluster.kubectl("annotate", "hyperpodpytorchjobs", "lm", "touched=1")
        kill(second[0].pid)
        third = job.started(2)
        assert pod_uids(job) == pods
        job.finish()
        job.wait("Completed")
        assert job.object()["status"]["restartCount"] == 2
        assert not any(is_alive(worker.pid) for worker in third.values())
    finally:
        operator.close()


def test_a_job_recovers_while_the_api_server_is_away(start: Start) -> None:
    job = start("--nodes", "2", "--no-operator")
    operator = Operator(job.cluster)
    try:
        job.apply()
        first = job.started(0)
        job.wait("Running")
        os.kill(job.cluster.up_pid, signal.SIGSTOP)
        try:
            kill(first[0].pid)
            second = job.started(1)
            kill(second[3].pid)
            job.started(2)
        finally:
            os.kill(job.cluster.up_pid, signal.SIGCONT)
        job.incident(1)
        job.incident(2)
        until(lambda: job.object()["status"]["restartCount"] == 2, "the status catches up")
        job.finish()
        job.wait("Completed")
        assert job.workers(3) == {}
    finally:
        operator.close()


def test_the_cluster_stands_still_and_no_node_is_taken_for_dead(start: Start) -> None:
    job = start("--nodes", "2", "--node-grace", "2")
    job.apply()
    job.started(0)
    job.wait("Running")
    log = job.cluster.directory / "up.log"
    os.kill(job.cluster.up_pid, signal.SIGSTOP)
    try:
        stopped = signal.sigtimedwait([], 4.0)
    finally:
        os.kill(job.cluster.up_pid, signal.SIGCONT)
    assert stopped is None
    until(lambda: "controller was paused" in log.read_text(), "the standstill is noticed")
    job.finish()
    job.wait("Completed")
    assert "node is silent" not in log.read_text()


def test_a_killed_cluster_comes_back_and_finds_the_job_running(start: Start) -> None:
    job = start("--nodes", "2")
    job.apply()
    first = job.started(0)
    job.wait("Running")
    pods = pod_uids(job)
    kill(job.cluster.up_pid)
    start()
    # Its operator is at work again when it sees to this.
    kill(first[2].pid)
    second = job.started(1)
    assert {second[rank].pod for rank in second} == {one.pod for one in first.values()}
    job.incident(1)
    assert pod_uids(job) == pods
    kill(job.cluster.up_pid)
    start()
    job.finish()
    job.wait("Completed")
    assert job.object()["status"]["restartCount"] == 1
    assert job.workers(2) == {}


def test_a_stopped_cluster_goes_on_with_the_job(start: Start) -> None:
    job = start("--nodes", "2")
    job.apply()
    first = job.started(0)
    job.wait("Running")
    job.cluster.unbroken("down")
    assert not any(is_alive(worker.pid) for worker in first.values())
    start()
    job.started(1)
    job.finish()
    job.wait("Completed")
