"""Our operator drives HyperPod's own agent, which knows neither links nor keys nor attempts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import Operator
from tests.e2e.jobs import JOBS, Job, job
from tests.interop.stock_agent import OPTIONS, StockAgent

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(600)]
DDP = Path(__file__).parents[1] / "e2e/programs/ddp.py"
IN_PROCESS = Path(__file__).parent / "programs/in_process.py"
RULE = {"name": "gpu", "logPattern": "CUDA error", "faultOnMatch": True}


@contextmanager
def training(
    cluster: Cluster, stock: StockAgent, directory: Path, *plan: dict[str, Any], **spec: Any
) -> Iterator[Job]:
    """A job of two pods with one worker each that trains with DDP over gloo."""
    how = {"program": DDP, "options": OPTIONS, "nproc": 1, **spec}
    with job(cluster, directory, *plan, environment=stock.environment, **how) as one:
        yield one


def test_a_killed_worker_is_recovered_and_the_job_completes(
    cluster: Cluster, stock: StockAgent, tmp_path: Path
) -> None:
    with training(cluster, stock, tmp_path) as one:
        first = one.steps(0)
        one.kill(first[1])
        second = one.steps(1)
        assert {rank: e.more["agent"] for rank, e in second.items()} == {
            rank: e.more["agent"] for rank, e in first.items()
        }, "the agents stay"
        one.kill(second[0])
        one.steps(2)
        ended = one.finish()
        assert ended["status"]["restartCount"] == 2
        incidents = one.incidents(2)
    for incident in incidents:
        assert (incident["remedy"], incident["outcome"]) == ("process", "recovered")
        assert incident["culprit"]["fault"] == "WorkerCrash"


def test_a_line_that_a_rule_waits_for_restarts_the_job(
    cluster: Cluster, stock: StockAgent, tmp_path: Path
) -> None:
    says = {"attempt": 0, "rank": 1, "step": 5, "do": "print", "value": "CUDA error: lost"}
    policy = {"jobMaxRetryCount": 3, "logMonitoringConfiguration": [RULE]}
    with training(cluster, stock, tmp_path, says, policy=policy) as one:
        one.steps(1)
        one.finish()
        (incident,) = one.incidents(1)
    assert incident["culprit"]["fault"] == "LogFault_gpu"
    assert incident["culprit"]["pod"].endswith("-1")


def test_a_job_is_suspended_and_resumed(
    cluster: Cluster, stock: StockAgent, tmp_path: Path
) -> None:
    with training(cluster, stock, tmp_path) as one:
        one.steps(0)
        one.patch({"spec": {"runPolicy": {"suspend": True}}})
        one.until_standing("Suspended")
        for pod in one.pods():
            one.api.until("pods", pod, lambda _: False)
        one.patch({"spec": {"runPolicy": {"suspend": False}}})
        one.settle()
        one.finish()


def test_an_agent_that_restarts_in_process_is_given_all_addresses(
    cluster: Cluster, stock: StockAgent, tmp_path: Path
) -> None:
    """Give the agent all addresses, without which it starts no worker.

    There is one pod: two would keep their tables in one file here.
    """
    options, shape = f"{OPTIONS} --inprocess-restart", {"replicas": 1, "nproc": 2}
    with training(cluster, stock, tmp_path, program=IN_PROCESS, options=options, **shape) as one:
        first = one.steps(0)
        (pod,) = one.pods().values()
        assert first[0].more["table"] == [pod["status"]["podIP"]]
        one.kill(first[1])
        assert one.steps(1)[0].more["agent"] == first[0].more["agent"]
        assert one.finish()["status"]["restartCount"] == 1


def test_a_new_operator_goes_on_without_a_stop(
    stock: StockAgent, tmp_path: Path, kubectl_path: str
) -> None:
    """The agents know no attempt; what the job's status says of it has to be enough."""
    cluster = Cluster(tmp_path / "cluster", kubectl_path)
    cluster.unbroken("up", "--detach", "--nodes", "2", "--cpu-per-node", "8", "--no-operator")
    operator = Operator(cluster, tmp_path / "operator.log")
    try:
        operator.start()
        place = tmp_path / "job"
        place.mkdir()
        with training(cluster, stock, place) as one:
            one.kill(one.steps(0)[1])
            before = one.steps(1)
            one.until_standing("Running")
            operator.kill()
            one.steps(1, more=20)
            operator.start()
            one.steps(1, more=20)
            one.kill(before[0])
            after = one.steps(2)
            assert after[0].more["agent"] == before[0].more["agent"]
            assert one.finish()["status"]["restartCount"] == 2
        operator.assert_well()
    finally:
        operator.kill()
        cluster.take_away()


def test_an_operator_that_requires_a_proof_says_why_the_job_waits(
    stock: StockAgent, tmp_path: Path, kubectl_path: str
) -> None:
    cluster = Cluster(tmp_path / "cluster", kubectl_path)
    cluster.unbroken("up", "--detach", "--nodes", "2", "--cpu-per-node", "8", "--no-operator")
    strict = Operator(cluster, tmp_path / "strict.log", "--agent-authentication", "required")
    usual = Operator(cluster, tmp_path / "usual.log")
    try:
        strict.start()
        place = tmp_path / "job"
        place.mkdir()
        with training(cluster, stock, place) as one:
            one.api.until(JOBS, one.name, lambda job: "AgentNotProven" in str(job.get("status")))
            said = cluster.unbroken("explain", one.name).stdout
            assert "this operator requires one" in " ".join(said.split())
            assert "must run hyperpodrun" not in said
            strict.kill()
            usual.start()
            one.steps(0)
            said = " ".join(cluster.unbroken("explain", one.name).stdout.split())
            assert "agents offer no proof of the job's key" in said
            one.finish()
    finally:
        strict.kill()
        usual.kill()
        cluster.take_away()
