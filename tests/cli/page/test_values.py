"""The contents of pages fit their schemas, and say what the commands say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.cli.test_cli_story import HUNG
from tests.cli_calls import assert_fits
from unbroken.cli.nodes.views import with_belongings
from unbroken.cli.page.node_values import links_value, node_value
from unbroken.cli.page.values import (
    JOBS_MAX,
    PODS_SHOWN,
    SAMPLE_SECONDS,
    JobPast,
    heat_map_value,
    history_value,
    incident_value,
    is_sample_due,
    past,
    pod_values,
    recovery_value,
)
from unbroken.core.page.heat_map import heat_map
from unbroken.core.page.history import MetricHistory
from unbroken.core.page.links import LinkMatrix
from unbroken.errors import SpecError
from unbroken.spec.job.incident import StackGroup
from unbroken.wire.observation import RankWatch

JOB = {"metadata": {"name": "train", "namespace": "default", "uid": "u"}}
HOSTILE = "</script><script>alert(1)</script>\u2028\x1b[31m"


def test_an_incident_is_told_as_by_explain() -> None:
    value = incident_value(JOB, [HUNG], 2, 200.0)
    assert_fits(json.loads(json.dumps(value)), ["page", "incident"])
    assert value["culprit"] == "rank 3 (a-pods-1 on node-1)"
    assert value["because"] == HUNG.blame
    assert value["evidence"] == ["step 119", "step 120"]
    assert value["cost"].startswith("13.000 s until training resumed, then 20 steps repeated")
    assert [one["stage"] for one in value["timeline"]] == ["last progress", "detected", "resumed"]
    assert value["incident"]["groups"][0]["isOutlier"] is True
    with pytest.raises(SpecError, match=r"job train has no incident 7 \(it has: 2\)"):
        incident_value(JOB, [HUNG], 7, 200.0)


def test_evidence_that_a_stack_repeats_is_shown_once() -> None:
    stack = ("forward (train.py:12)", "main (train.py:30)")
    culprit = replace(HUNG.culprit, evidence=stack)
    groups = (StackGroup("3", 1, "runs", stack, True),)
    told = replace(HUNG, culprit=culprit, signals=(culprit,), groups=groups)
    assert incident_value(JOB, [told], 2, 200.0)["evidence"] == []


def test_hostile_text_stays_text() -> None:
    """The page escapes what it shows (ui/tests); here it only has to stay whole and bounded."""
    culprit = replace(HUNG.culprit, text=HOSTILE * 1000, evidence=(HOSTILE,), pod=HOSTILE)
    value = incident_value(JOB, [replace(HUNG, culprit=culprit, signals=())], 2, 200.0)
    assert value["what"].startswith(HOSTILE)
    assert len(value["what"]) <= 2000
    assert value["evidence"] == [HOSTILE]


def test_a_recovery_has_its_stages_in_seconds_after_the_first_sign() -> None:
    value = recovery_value(replace(HUNG, stopped_at=101.0, ready_at=102.0, started_at=103.5))
    assert value["began"] == 95.0
    stages = [(one["stage"], one["from"], one["to"]) for one in value["stages"]]
    assert stages == [
        ("detect", 0.0, 5.0),
        ("stop", 5.0, 6.0),
        ("ready", 6.0, 7.0),
        ("start", 7.0, 8.5),
        ("progress", 8.5, 13.0),
    ]


def test_columns_have_equal_lengths_and_bounded_size() -> None:
    now = 100.0
    watches = [
        RankWatch(rank, HOSTILE * 9, 7, step_seconds=1e-9, sign_at=now - 1 / 3, allowed_seconds=3.0)
        for rank in range(16_384)
    ]
    value = heat_map_value(heat_map(watches, now))
    columns = [one for one in value.values() if isinstance(one, list)]
    assert {len(one) for one in columns} == {1024}
    assert all(len(one) <= 60 for one in value["phases"])
    assert len(json.dumps(value)) < 200_000
    history = MetricHistory(2.0)
    history.add(0.0, watches[:2])
    history.add(2.0, [RankWatch(0, step=8, metrics={"loss": 1.5})])
    shown = history_value(history)
    assert shown["metricNames"] == ["loss"]
    assert shown["metricValues"] == [[None, 1.5]]
    assert [len(shown[name]) for name in ("times", "steps", "rates")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("sampled", "looked", "is_due"),
    [
        (float("-inf"), float("-inf"), True),
        (98.0, 99.0, True),
        (98.0, -79.0, True),
        (98.0, -80.0, False),
        (71.0, -100.0, False),
        (70.0, float("-inf"), True),
    ],
)
def test_jobs_are_sampled_often_only_while_a_page_is_open(
    sampled: float, looked: float, *, is_due: bool
) -> None:
    assert is_sample_due(100.0, sampled, looked) is is_due


def test_samples_that_are_far_apart_have_a_rate_and_a_past() -> None:
    history = MetricHistory(SAMPLE_SECONDS)
    times = [*(30.0 * number for number in range(5)), *(120.0 + 2.0 * number for number in (1, 2))]
    for at in times:
        history.add(at, [RankWatch(0, step=int(at * 4))])
    assert [one.at for one in history.points] == times
    assert [one.rate for one in history.points] == [None, *[4.0] * 6]


def test_only_so_many_jobs_have_a_past() -> None:
    pasts: dict[str, JobPast] = {}
    for number in range(JOBS_MAX + 5):
        past(pasts, {"metadata": {"uid": f"u{number}"}})
        past(pasts, {"metadata": {"uid": "u0"}})
    assert len(pasts) == JOBS_MAX
    assert "u0" in pasts, "it was used all the time"
    assert "u1" not in pasts


def test_a_node_has_its_faults_and_its_repair() -> None:
    condition: dict[str, Any] = {"type": "Ready", "status": "False", "message": HOSTILE}
    node = {"metadata": {"name": "n"}, "status": {"conditions": [condition]}}
    value = node_value(node, None, [], 100.0)
    nodes = {"nodes": [value], "missing": [], "links": links_value(LinkMatrix())}
    assert_fits(nodes, ["page", "nodes"])
    assert value["status"] == "NotReady"
    assert value["faults"] == [f"Ready=False : {HOSTILE}"]
    assert value["repairNow"] == ""


def test_each_node_has_the_pods_of_jobs_that_are_on_it() -> None:
    def pod(name: str, spec: dict[str, Any]) -> dict[str, Any]:
        labels = {"HPJob": "lm"}
        return {"metadata": {"namespace": "a", "name": name, "labels": labels}, "spec": spec}

    pods = [pod("p-1", {"nodeName": "n"}), pod("p-0", {"nodeName": "n"}), pod("p-2", {})]
    pods += [pod("p-3", {"nodeName": "other"}), {"metadata": {"name": "odd"}, "spec": None}]
    nodes: list[dict[str, Any]] = [{"metadata": {"name": name}} for name in ("n", "other", "idle")]
    record = {"metadata": {"name": "other"}}
    found = list(with_belongings(nodes, [record], pods))
    assert node_value(*found[0], 0.0)["jobPods"] == ["a/p-0", "a/p-1"]
    of_nodes = [
        (node["metadata"]["name"], held, [pod["metadata"]["name"] for pod in mine])
        for node, held, mine in found
    ]
    assert of_nodes == [("n", None, ["p-1", "p-0"]), ("other", record, ["p-3"]), ("idle", None, [])]


def test_of_thousands_of_pods_those_that_differ_are_shown_first() -> None:
    usual = {"node": "n", "phase": "Running", "restarts": 0, "reason": ""}
    pods = [{**usual, "name": f"p-{number:04}"} for number in range(2048)]
    pods[1500]["phase"], pods[1800]["restarts"] = "Pending", 1
    found = pod_values(pods, {})
    assert len(found) == PODS_SHOWN
    assert [one["name"] for one in found[:3]] == ["p-1500", "p-1800", "p-0000"]
    assert [one["name"] for one in pod_values(pods[1500:1510], {})][:2] == ["p-1500", "p-1501"]


def test_reports_are_used_again_for_a_while() -> None:
    seen = JobPast()
    assert not seen.is_newer(0.0, 60.0)
    seen.asked_at = 100.0
    assert [seen.is_newer(now, 60.0) for now in (99.0, 100.0, 159.0, 160.0)] == [
        *(False, True, True, False)
    ]
    assert not seen.is_newer(100.0, 0.0), "a command always asks"
