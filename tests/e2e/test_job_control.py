"""Operator and API server are killed or paused while a job runs, and while it restarts.

The length of the outage decides nothing here. The operator and the nodes have no time limit on the
API server, and the agents have none on the operator. So each outage lasts until the job has shown
its behaviour alone, not a minute.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import Operator, frozen
from tests.e2e.job_events import await_end
from tests.e2e.jobs import job, standing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def operator(alone: Cluster, tmp_path: Path) -> Iterator[Operator]:
    """The operator of that cluster."""
    made = Operator(alone, tmp_path / "operator.log")
    made.start()
    try:
        yield made
        made.assert_well()
    finally:
        made.kill()


def test_a_running_job_is_untouched_by_an_operator_that_dies_and_comes_back(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        one.until_standing("Running")
        operator.kill()
        assert one.steps(0, 20) == starts
        operator.start()
        one.kill(one.steps(0, 20)[2])
        one.steps(1)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert (incident["culprit"]["fault"], incident["culprit"]["rank"]) == ("Signal", 2)


@pytest.mark.smoke
def test_a_fault_while_the_operator_is_away_is_mended_by_the_next_one(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        one.until_standing("Running")
        operator.kill()
        one.kill(starts[3])
        for event in starts.values():
            await_end(event.pid)
        operator.start()
        one.steps(1)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert (incident["culprit"]["fault"], incident["culprit"]["rank"]) == ("Signal", 3)
    assert incident["remedy"] == "process"


def test_an_operator_that_dies_in_a_restart_is_followed_by_one_that_ends_it(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        one.until_standing("Running")
        # With one agent that does not answer the restart cannot be over before the operator is.
        with frozen(starts[2].more["agent"]):
            one.kill(starts[0])
            one.until_standing("Faulted")
            one.until_there("unbroken.dev/v1:incidents", f"{one.name}-1")
            operator.kill()
        operator.start()
        one.steps(1)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert (incident["culprit"]["fault"], incident["culprit"]["rank"]) == ("Signal", 0)
    assert incident["outcome"] == "recovered"


def test_a_job_that_ends_without_an_operator_is_found_completed(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        operator.kill()
        (tmp_path / "finish").touch()
        for event in starts.values():
            await_end(event.pid)
        operator.start()
        assert one.finish()["status"]["restartCount"] == 0
        one.incidents(0)


def test_an_operator_that_stood_still_goes_on_where_it_was(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        with operator.frozen():
            # Longer than the silence after which it takes an agent for lost (3 s).
            assert one.steps(0, 200) == starts
        assert one.steps(0, 20) == starts
        with operator.frozen():
            one.kill(starts[1])
            for event in starts.values():
                await_end(event.pid)
        one.steps(1)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert (incident["culprit"]["fault"], incident["culprit"]["rank"]) == ("Signal", 1)


def test_a_job_recovers_while_the_api_server_stands_still(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    """Pause the nodes too, for longer than a node's grace (4 s).

    Their silence must not count for them afterwards.
    """
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        one.until_standing("Running")
        with frozen(alone.up_pid):
            one.kill(starts[1])
            after = one.steps(1, 250)
        assert one.steps(1, 20) == after
        one.kill(after[2])
        one.steps(2)
        assert one.finish()["status"]["restartCount"] == 2
        first, second = one.incidents(2)
    ranks = (first["culprit"]["rank"], second["culprit"]["rank"])
    assert ranks == (1, 2), [first, second]
    assert first["outcome"] == second["outcome"] == "recovered"


def test_a_killed_api_server_is_not_missed_and_comes_back(
    alone: Cluster, operator: Operator, tmp_path: Path
) -> None:
    with job(alone, tmp_path) as one:
        starts = one.steps(0)
        one.until_standing("Running")
        pid = alone.up_pid
        os.kill(pid, signal.SIGKILL)
        await_end(pid)
        one.kill(starts[3])
        after = one.steps(1)
        one.api.close()
        alone.restart()
        assert one.steps(1, 20) == after
        one.until(lambda found: standing(found) == "Running" and found["status"]["restartCount"])
        one.kill(after[0])
        one.steps(2)
        assert one.finish()["status"]["restartCount"] == 2
        first, second = one.incidents(2)
    ranks = (first["culprit"]["rank"], second["culprit"]["rank"])
    assert ranks == (3, 0), [first, second]
