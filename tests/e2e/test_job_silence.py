"""Ranks that fall silent: who keeps the others waiting is blamed, and who only works is let be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.job_events import PATIENCE_SECONDS
from tests.e2e.jobs import Job, Object, job

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs/watched.py"


def watched(one: Job) -> list[Object]:
    """The ranks as their agents' watchdogs see them."""
    first_of_node = [event for event in one.workers().values() if event.rank % one.nproc == 0]
    return [rank for worker in first_of_node for rank in one.report(worker)["watch"]]


def tell(one: Job, what: str) -> None:
    """Let a rank hang, by a file of that name, once silence of every rank would be noticed."""
    one.steps(0)
    while any(rank.get("allowed_seconds") is None for rank in watched(one)):
        one.steps(0, more=20)
    (one.directory / what).touch()


def test_a_rank_that_keeps_the_others_waiting_is_blamed(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path, program=PROGRAM) as one:
        tell(one, "stuck")
        one.steps(1)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
        text = cluster.unbroken("explain", one.name).stdout
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"]) == ("Stalled", 2)
    assert culprit["evidence"][-1] == "last output: asks for a batch"
    outlier, *others = incident["groups"]
    assert (outlier["ranks"], outlier["isOutlier"]) == ("2", True)
    assert "Loader.next_batch" in outlier["doing"]
    assert any("Loader.next_batch" in frame for frame in outlier["stack"])
    assert sum(group["count"] for group in others) == 3
    assert not any(group.get("isOutlier") for group in others)
    assert incident["outcome"] == "recovered"
    assert "differs    rank 2: waits for a lock in Loader.next_batch" in text


def test_a_rank_that_saves_for_long_is_let_be(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path, program=PROGRAM) as one:
        tell(one, "saving")
        while not silent(one):
            one.events.more(1, seconds=PATIENCE_SECONDS / 100)
        (one.directory / "saved").touch()
        one.steps(0)
        ended = one.finish()
        assert one.incidents(None) == []
    assert not ended["status"].get("restartCount")


def silent(one: Job) -> set[int]:
    """Return the ranks that the watchdog reports as silent."""
    return {
        rank["rank"]
        for rank in watched(one)
        for alarm in rank.get("alarms") or ()
        if alarm["detector"] == "silent"
    }
