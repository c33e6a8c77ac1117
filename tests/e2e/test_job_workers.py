"""Workers of a job die in all ways, and the job continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.job_events import await_end, places
from tests.e2e.jobs import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.smoke
def test_each_rank_in_turn_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path) as one:
        where = places(one.steps(0))
        agents = {event.more["agent"] for event in one.starts(0).values()}
        for rank in one.ranks:
            one.kill(one.steps(rank)[rank])
            starts = one.steps(rank + 1)
            assert places(starts) == where, "survivors keep their node ranks"
            assert {event.more["agent"] for event in starts.values()} == agents
            # The operator hears of a kill at once, and may hear of the first steps after it.
            one.incidents(rank + 1)
        ended = one.finish()
        assert ended["status"]["restartCount"] == len(one.ranks)
        incidents = one.incidents(len(one.ranks))
    for rank, incident in enumerate(incidents):
        culprit = incident["culprit"]
        assert (culprit["rank"], culprit["fault"], culprit["exitCode"]) == (rank, "Signal", 137)
        assert incident["attempt"] == rank
        assert incident["remedy"] == "process"
        assert incident["outcome"] == "recovered"


@pytest.mark.parametrize("victims", [(0, 3), (2, 3), (0, 1, 2, 3)])
def test_several_that_die_at_once_cost_one_restart(
    cluster: Cluster, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    with job(cluster, tmp_path) as one:
        starts = one.steps(0)
        one.kill(*(starts[rank] for rank in victims))
        assert places(one.steps(1)) == places(starts)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["rank"] in victims
    assert incident["remedy"] == "process"
    assert incident["signals"][0]["at"] <= incident["stoppedAt"] <= incident["startedAt"]


def test_ranks_that_come_late_after_a_restart_meet_the_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    late = [
        {"attempt": attempt, "rank": rank, "step": 0, "do": "sleep", "value": 2}
        for attempt, rank in ((1, 0), (2, 3))
    ]
    with job(cluster, tmp_path, *late) as one:
        one.kill(one.steps(0)[2])
        one.kill(one.steps(1)[0])
        one.steps(2)
        assert one.finish()["status"]["restartCount"] == 2


def test_a_process_that_left_its_family_ends_before_the_next_attempt(
    cluster: Cluster, tmp_path: Path
) -> None:
    leaves = {"attempt": 0, "rank": 1, "step": 1, "do": "daemon"}
    with job(cluster, tmp_path, leaves) as one:
        starts = one.steps(0)
        daemon = one.events.until(lambda all_: [e for e in all_ if e.what == "daemon"])[0]
        one.kill(starts[3])
        await_end(daemon.pid)
        one.steps(1)
        one.finish()
