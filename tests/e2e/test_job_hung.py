"""One rank hangs for good while the others wait in a collective: found soon, whatever it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import Job, Object, job
from tests.watching import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs/hung.py"


def hang(one: Job, how: str, steps: int) -> Object:
    """Let rank 3 hang after so many steps; return its incident: the job has no timeout for it."""
    one.steps(0, more=steps)
    (one.directory / how).touch()
    one.steps(1)
    one.finish()
    (incident,) = one.incidents(1)
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"], incident["confidence"]) == ("Stalled", 3, "certain")
    return incident


def test_a_thread_that_keeps_the_gil_is_found_and_named(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path, program=PROGRAM) as one:
        (one.directory / "told").touch()
        incident = hang(one, "gil", 25)
        text = cluster.unbroken("explain", one.name).stdout
    assert "rank 3 holds the GIL (thread holder) in keep_gil" in incident["blame"]
    outlier, others = incident["groups"]
    assert (outlier["ranks"], others["ranks"]) == ("3", "0-2")
    assert any("keep_gil" in frame for frame in outlier["stack"])
    assert "holds the GIL" in text


def test_a_rank_that_sleeps_in_a_job_that_only_prints_is_found(
    cluster: Cluster, tmp_path: Path
) -> None:
    with job(cluster, tmp_path, program=PROGRAM) as one:
        incident = hang(one, "sleep", 140)
    assert "rank 3 sleeps in hang" in incident["blame"]


def test_a_rank_that_evaluates_while_the_others_wait_is_let_be(
    cluster: Cluster, tmp_path: Path
) -> None:
    with job(cluster, tmp_path, program=PROGRAM) as one:
        (one.directory / "told").touch()
        one.steps(0, more=25)
        (one.directory / "rest").touch()
        wait_until((one.directory / "rested").exists)
        one.steps(0)
        ended = one.finish()
        assert one.incidents(None) == []
    assert not ended["status"].get("restartCount")
