"""A job whose log shows a hang is restarted, and one that logs as agreed is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import GANG, Object, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_SECONDS = 3
RULE = {
    "name": "loss",
    "logPattern": r".*loss=(\S+)",
    "expectedStartCutOffInSeconds": 2 * LIMIT_SECONDS,
    "expectedRecurringFrequencyInSeconds": LIMIT_SECONDS,
}
LOGGING = f"""
import sys
sys.path.insert(0, {str(GANG.parent)!r})
import gang
tell = gang.report
def report(what, **more):
    tell(what, **more)
    if what == "step" and gang.RANK == 0 and (gang.ATTEMPT > 0 or more["step"] < 5):
        print(f"step {{more['step']}} loss=0.5", flush=True)
gang.report = report
gang.main()
"""
"""Program in which rank 0 alone logs; in the first attempt it stops logging, but trains on."""
STEPS_PAST_LIMITS = 500


def hung(found: Object) -> bool:
    """Return whether the job reports that the rule has stopped it."""
    conditions = (found.get("status") or {}).get("conditions") or []
    return "LogHang_loss" in [one.get("reason") for one in conditions]


@pytest.mark.heavy
def test_a_loss_that_stops_restarts_the_job(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOGGING)
    policy = {"jobMaxRetryCount": 100, "logMonitoringConfiguration": [RULE]}
    with job(cluster, tmp_path, program=program, policy=policy) as one:
        one.until(hung)
        one.steps(1, more=STEPS_PAST_LIMITS)
        shown = json.loads(cluster.unbroken("describe", one.name, "-o", "json").stdout)
        rules = {pod["agent"]["nodeRank"]: pod["agent"]["logRules"] for pod in shown["pods"]}
        text = cluster.unbroken("describe", one.name).stdout
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["rank"]) == ("LogRule", 0)
    assert culprit["text"].startswith("LogHang_loss: ")
    assert incident["fault"] == "LogHang_loss"
    assert culprit["evidence"] == ["step 4 loss=0.5"]
    assert incident["outcome"] == "recovered"
    ((heard,), (silent,)) = rules[0], rules[1]
    assert (heard["state"], heard["ranks"], heard["lastRank"]) == ("Healthy", "some", 0)
    assert (silent["state"], silent["matches"]) == ("Hanging", 0)
    assert "LOG RULE" in text
