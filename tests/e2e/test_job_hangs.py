"""Jobs that hang: the culprit is named, and the job continues.

Both jobs run at the same time, since a watchdog has to learn before it judges.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.job_events import Event
from tests.e2e.jobs import Job, Object, job, message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs/watched.py"
BAD_STEP = 50
BAD = {"rank": 3, "step": BAD_STEP, "do": "raise", "value": "token 70000 in batch 17"}
PLANS: dict[str, list[Object]] = {"frozen": [], "same-error": [BAD]}


class Running(NamedTuple):
    """A job that runs already; `end` is the rest of its test."""

    job: Job
    end: ExitStack


@pytest.fixture(scope="module")
def running(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Running]]:
    with ExitStack() as everything:
        made = {}
        for name, plan in PLANS.items():
            end = everything.enter_context(ExitStack())
            directory = tmp_path_factory.mktemp(name)
            one = end.enter_context(job(cluster, directory, *plan, program=PROGRAM))
            made[name] = Running(one, end)
        yield made


def shown(cluster: Cluster, *command: str) -> Any:
    """Return the JSON that a command prints."""
    return json.loads(cluster.unbroken(*command, "-o", "json").stdout)


def stop(one: Job, victim: Event) -> None:
    """Send SIGSTOP to a worker."""
    assert one.signal(victim.pid, signal.SIGSTOP)


def test_the_same_error_at_the_same_step_ends_the_job(
    cluster: Cluster, running: dict[str, Running]
) -> None:
    one, end = running["same-error"]
    with end:
        failed = one.until_standing("Failed")
        restarts = failed["status"]["restartCount"]
        incidents = one.incidents(restarts + 1)  # they are written after the status
    assert "SameErrorSameStep" in message(failed)
    assert "ValueError: token 70000 in batch 17" in message(failed)
    assert restarts <= 2
    assert incidents[-1]["remedy"] == "fail"
    for incident in incidents:
        assert (incident["culprit"]["rank"], incident["culprit"]["step"]) == (3, BAD_STEP - 1)


@pytest.mark.smoke
def test_a_stopped_rank_is_found_and_its_steps_and_seconds_are_told(
    cluster: Cluster, running: dict[str, Running]
) -> None:
    one, end = running["frozen"]
    with end:
        stop(one, one.steps(0, more=50)[1])
        # The time of the job's end is given in whole seconds.
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
