"""HyperPod's own agent, for in-process restart, whose workers end before they have a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import message
from tests.e2e.test_job_starts import ENDS_EARLY, Wanted, wanted
from tests.interop.stock_agent import OPTIONS, StockAgent

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(600)]
DIES = Path(__file__).parent / "programs/dies_at_the_barrier.py"
SIZES = "--nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"


@contextmanager
def starting(cluster: Cluster, stock: StockAgent, program: Path, **more: str) -> Iterator[Wanted]:
    """A job of two pods whose agents start this program before its ranks are known."""
    command = f"exec hyperpodrun {SIZES} {OPTIONS} --inprocess-restart {program}"
    given = stock.environment | more
    container = {
        "command": ["sh", "-c", command],
        "env": [{"name": name, "value": value} for name, value in given.items()],
    }
    with wanted(cluster, container) as job:
        yield job


def test_workers_that_end_at_the_barrier_use_up_the_budget(
    cluster: Cluster, stock: StockAgent
) -> None:
    with starting(cluster, stock, DIES) as job:
        failed = job.until_standing("Failed", "Completed", "Running")
        assert message(failed).startswith("RetriesExhausted: pod ")
        assert "jobMaxRetryCount: all 2 restarts are used" in message(failed)
        assert "before the start: A training worker process has crashed" in message(failed)
        assert failed["status"]["restartCount"] == 2
        incidents = [job.incident(number) for number in (1, 2, 3)]
        assert [one["remedy"] for one in incidents] == ["process", "process", "fail"]
        assert {one["culprit"]["fault"] for one in incidents} == {"WorkerCrash"}
        assert all(one["culprit"]["pod"].endswith("-0") for one in incidents)
        assert len(job.events("Faulted")) == 3


@pytest.mark.parametrize("ends", ["import", "0"])
def test_workers_that_never_come_to_the_barrier_are_told(
    cluster: Cluster, stock: StockAgent, ends: str
) -> None:
    """The agent does not notice that they have ended."""
    with starting(cluster, stock, ENDS_EARLY, ENDS=ends) as job:
        said = ""
        while not said:  # a watch ends after 20 s without news
            with suppress(TimeoutError):
                said = job.until_said("WorkersNotReady")
        assert "not all of its workers wait for their rank" in said
        assert "`kubectl logs job-" in said
        assert "not all of its workers wait" in job.until_events("WorkersNotReady")[0]
