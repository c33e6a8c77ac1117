"""Workers that can leave their training keep their process when another one dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.job_events import places
from tests.e2e.jobs import INCIDENTS, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs/restartable.py"
BATCH = 8
"""Samples of a step, there."""


@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, marks=pytest.mark.smoke), pytest.param(3, marks=pytest.mark.heavy)],
)
def test_all_but_the_one_that_was_killed_keep_their_process(
    cluster: Cluster, tmp_path: Path, victim: int
) -> None:
    with job(cluster, tmp_path, program=PROGRAM) as one:
        # These are enough steps for a report of each rank.
        first = one.steps(0, more=100)
        one.kill(first[victim])
        second = one.steps(1)
        assert places(second) == places(first), "survivors keep their node ranks"
        kept = {rank for rank in one.ranks if second[rank].pid == first[rank].pid}
        assert kept == set(one.ranks) - {victim}
        name = f"{one.name}-1"
        one.api.until(INCIDENTS, name, lambda found: "samplesSkipped" in found["spec"])
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
        events = [e for e in one.events.all if (e.what, e.attempt) == ("step", 1)]
    culprit = incident["culprit"]
    assert (culprit["rank"], culprit["fault"], culprit["exitCode"]) == (victim, "Signal", 137)
    assert (incident["remedy"], incident["kept"]) == ("in-process", 3)
    assert incident["reason"].startswith("3 of 4 ranks kept their process; ")
    assert set(incident["slowest"]) <= {"stopped", "ready", "started"}
    # Steps start again in all of them, the data in the new process alone.
    begun = {e.rank: e.more["seen"] - BATCH for e in events if e.more["step"] == 1}
    assert {rank for rank, samples in begun.items() if not samples} == {victim}
    assert incident["samplesSkipped"] == sum(begun.values())
    again = (max(incident["step"] * BATCH - samples, 0) for samples in begun.values())
    assert incident["samplesRepeated"] == sum(again)


@pytest.mark.heavy
def test_where_the_job_forbids_it_all_get_a_new_one(cluster: Cluster, tmp_path: Path) -> None:
    off = {"unbroken.dev/in-process": "off"}
    with job(cluster, tmp_path, program=PROGRAM, annotations=off) as one:
        first = one.steps(0)
        one.kill(first[3])
        second = one.steps(1)
        assert not {e.pid for e in first.values()} & {e.pid for e in second.values()}
        one.finish()
        (incident,) = one.incidents(1)
    assert incident["remedy"] == "process"
    assert "kept" not in incident
