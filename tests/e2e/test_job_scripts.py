"""Scripts that fail, give up, or do not find their port; budgets that are used up."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import Job, job, message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def assert_over(one: Job, incidents: int, outcome: str = "RetriesExhausted") -> None:
    """The job has failed for good: nothing of it is left but its story."""
    for name in one.pods():
        one.api.until("pods", name, lambda _: False)
    assert one.pods() == {}
    last = one.incidents(incidents)[-1]
    assert (last["remedy"], last["outcome"]) == ("fail", outcome)


@pytest.mark.smoke
def test_a_script_that_fails_at_once_ends_soon_with_its_own_words(
    cluster: Cluster, tmp_path: Path
) -> None:
    fails = {"step": 0, "do": "raise", "value": "no such column"}
    with job(cluster, tmp_path, fails, policy={}) as one:
        failed = one.until_standing("Failed", "Completed")
        assert message(failed).startswith("SameErrorSameStep: rank ")
        assert message(failed).endswith("ValueError: no such column")
        assert failed["status"]["restartCount"] == 2
        assert_over(one, 3, "SameErrorSameStep")
        incidents = one.incidents(3)
    assert {e.attempt for e in one.events.all} == {0, 1, 2}
    for incident in incidents:
        assert incident["culprit"]["fault"] == "PythonException"
        evidence = [line.strip() for line in incident["culprit"]["evidence"]]
        assert evidence[-1] == "ValueError: no such column"
        assert 'raise ValueError(order["value"])' in evidence


def test_a_used_up_budget_ends_the_job_and_frees_everything(
    cluster: Cluster, tmp_path: Path
) -> None:
    fails = {"rank": 1, "step": 2, "do": "exit", "value": 7}
    with job(cluster, tmp_path, fails, policy={"jobMaxRetryCount": 2}) as one:
        failed = one.until_standing("Failed", "Completed")
        assert "jobMaxRetryCount: all 2 restarts are used" in message(failed)
        assert failed["status"]["restartCount"] == 2
        assert_over(one, 3)
        incidents = one.incidents(3)
    for attempt, incident in enumerate(incidents):
        assert sorted(one.starts(attempt)) == one.ranks
        culprit = incident["culprit"]
        assert (culprit["rank"], culprit["fault"], culprit["exitCode"]) == (1, "ExitCode", 7)
    assert one.starts(3) == {}


@pytest.mark.parametrize(("replicas", "nproc", "rank"), [(2, 2, 3), (2, 2, 0), (2, 1, 1)])
def test_a_rank_that_ends_before_the_others_is_the_culprit(
    cluster: Cluster, tmp_path: Path, replicas: int, nproc: int, rank: int
) -> None:
    leaves = {"attempt": 0, "rank": rank, "step": 5, "do": "exit", "value": 0}
    with job(cluster, tmp_path, leaves, replicas=replicas, nproc=nproc) as one:
        one.steps(1)
        one.finish()
        (incident,) = one.incidents(1)
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"], culprit["exitCode"]) == ("EarlyExit", rank, 0)


@pytest.mark.parametrize("rank", [0, 1, pytest.param(3, marks=pytest.mark.smoke)])
def test_a_rank_that_raises_is_the_culprit_not_who_misses_it(
    cluster: Cluster, tmp_path: Path, rank: int
) -> None:
    raises = {"attempt": 0, "rank": rank, "step": 5, "do": "raise", "value": "bad batch"}
    with job(cluster, tmp_path, raises) as one:
        one.steps(1)
        one.finish()
        (incident,) = one.incidents(1)
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"]) == ("PythonException", rank)
    assert culprit["evidence"][-1] == "ValueError: bad batch"


def test_a_rank_that_raises_and_takes_long_to_end_is_the_culprit_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    plan = [
        {"attempt": 0, "rank": 0, "step": 1, "do": "linger", "value": 2},
        {"attempt": 0, "rank": 0, "step": 5, "do": "raise", "value": "bad batch"},
    ]
    with job(cluster, tmp_path, *plan) as one:
        one.steps(1)
        one.finish()
        (incident,) = one.incidents(1)
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"]) == ("PythonException", 0)


def test_a_store_port_that_was_stolen_costs_one_more_restart(
    cluster: Cluster, tmp_path: Path
) -> None:
    with job(cluster, tmp_path) as one:
        starts = one.steps(0)
        port = one.report(starts[0])["offered_port"]
        with socket.create_server(("", port)):
            one.kill(starts[2])
            one.steps(2)
        assert one.finish()["status"]["restartCount"] == 2
        _, incident = one.incidents(2)
    assert one.starts(1)[0].master.endswith(f":{port}")
    assert not [e for e in one.events.all if (e.what, e.attempt) == ("step", 1)]
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"]) == ("StorePortTaken", 0)
