"""Jobs that stand still: the culprit is named, the job goes on, and who only works is let be.

All jobs run at the same time, since a watchdog has to learn before it judges.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from e2e.clusters import Cluster
from e2e.job_events import PATIENCE_SECONDS, Event
from e2e.jobs import Job, Object, job, message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs/watched.py"
BAD_STEP = 50
BAD = {"rank": 3, "step": BAD_STEP, "do": "raise", "value": "token 70000 in batch 17"}
PLANS: dict[str, list[Object]] = {"stuck": [], "saving": [], "frozen": [], "same-error": [BAD]}


WHEN_LEARNED = ("stuck", "saving")
"""Jobs that are told to hang, by a file of that name, as soon as their silence would be noticed."""


class Running(NamedTuple):
    """A job that runs already; `end` holds what is left to do with it."""

    job: Job
    end: ExitStack
    told: Future[None] | None
    """To hang."""


@pytest.fixture(scope="module")
def running(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Running]]:
    with ExitStack() as everything:
        made = {}
        pool = everything.enter_context(ThreadPoolExecutor(len(WHEN_LEARNED)))
        for name, plan in PLANS.items():
            end = everything.enter_context(ExitStack())
            directory = tmp_path_factory.mktemp(name)
            one = end.enter_context(job(cluster, directory, *plan, program=PROGRAM))
            told = pool.submit(tell, one, name) if name in WHEN_LEARNED else None
            made[name] = Running(one, end, told)
        yield made


def shown(cluster: Cluster, *command: str) -> Any:
    """What a command says as JSON."""
    return json.loads(cluster.unbroken(*command, "-o", "json").stdout)


def watched(one: Job) -> list[Object]:
    """The ranks as their agents' watchdogs see them."""
    first_of_node = [event for event in one.workers().values() if event.rank % one.nproc == 0]
    return [rank for worker in first_of_node for rank in one.report(worker)["watch"]]


def tell(one: Job, what: str) -> None:
    """Wait until the silence of every rank would be noticed, and then give the file."""
    one.steps(0)
    while any(rank.get("allowed_seconds") is None for rank in watched(one)):
        one.steps(0, more=20)
    (one.directory / what).touch()


def stop(one: Job, victim: Event) -> None:
    """SIGSTOP."""
    assert one.signal(victim.pid, signal.SIGSTOP)


def test_the_same_error_at_the_same_step_ends_the_job(
    cluster: Cluster, running: dict[str, Running]
) -> None:
    one, end, _ = running["same-error"]
    with end:
        failed = one.until_standing("Failed")
        incidents = one.incidents(None)
    assert "SameErrorSameStep" in message(failed)
    assert "ValueError: token 70000 in batch 17" in message(failed)
    assert failed["status"]["restartCount"] <= 2
    assert incidents[-1]["remedy"] == "fail"
    for incident in incidents:
        assert (incident["culprit"]["rank"], incident["culprit"]["step"]) == (3, BAD_STEP - 1)


def test_a_stopped_rank_is_found_and_its_steps_and_seconds_are_told(
    cluster: Cluster, running: dict[str, Running]
) -> None:
    one, end, _ = running["frozen"]
    with end:
        stop(one, one.steps(0, more=50)[1])
        # The time of the job's end is told in whole seconds.
        starts = one.steps(1, more=100)
        one.finish()
        (incident,) = one.incidents(1)
        (told,) = shown(cluster, "explain", one.name)["incidents"]
        listed = shown(cluster, "jobs")
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"], incident["confidence"]) == ("Stopped", 1, "certain")
    assert [group["ranks"] for group in incident["groups"] if group.get("isOutlier")] == ["1"]
    assert incident["outcome"] == "recovered"
    assert incident["resumedStep"] == starts[0].more["step"] > 1, "from the checkpoint"
    assert told["lostSteps"] == incident["step"] - incident["resumedStep"] + 1
    (good,) = [found["goodput"] for found in listed["jobs"] if found["name"] == one.name]
    lost = good["lostSeconds"]
    assert good["lostSteps"] == told["lostSteps"]
    assert lost["Stopped"] == pytest.approx(told["seconds"], abs=0.002)
    parts = good["productiveSeconds"], good["startupSeconds"], *lost.values()
    assert sum(parts) == pytest.approx(good["totalSeconds"], abs=0.01)
    assert 0 < good["share"] < 1


@pytest.mark.heavy
def test_a_rank_that_keeps_the_others_waiting_is_blamed(
    cluster: Cluster, running: dict[str, Running]
) -> None:
    one, end, told = running["stuck"]
    with end:
        assert told
        told.result()
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


@pytest.mark.heavy
def test_a_rank_that_saves_for_long_is_let_be(
    cluster: Cluster, running: dict[str, Running]
) -> None:
    one, end, told = running["saving"]
    with end:
        assert told
        told.result()
        while not silent(one):
            one.events.more(1, seconds=PATIENCE_SECONDS / 100)
        (one.directory / "saved").touch()
        one.steps(0)
        ended = one.finish()
        assert one.incidents(None) == []
    assert not ended["status"].get("restartCount")


def silent(one: Job) -> set[int]:
    """Ranks of which the watchdog says that nothing is heard."""
    return {
        rank["rank"]
        for rank in watched(one)
        for alarm in rank.get("alarms") or ()
        if alarm["detector"] == "silent"
    }
