"""Course of a RayJob, by the state of its cluster and the answers of its dashboard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS
from unbroken.local.ray.decisions.rayjob import (
    POLL_SECONDS,
    SILENCE_SECONDS,
    Answer,
    JobPicture,
    JobPlan,
    plan_job,
)
from unbroken.spec.times import time_text

Object = dict[str, Any]
NOW = 1_000_000.0
UNKNOWN = Answer("")


def sample() -> Object:
    """Return KubeRay's sample that deletes its cluster 10 s after the end."""
    text = (MANIFESTS / "rayjob-shutdown.yaml").read_text()
    found: Object = next(yaml.safe_load_all(text))
    return found


def new(**spec: Any) -> JobPicture:
    """Return a job that was just applied; `spec` adds to its spec."""
    given = sample()
    return JobPicture(
        *(given["metadata"]["name"], "default", "uid", 1), spec={**given["spec"], **spec}, status={}
    )


def after(seen: JobPicture, found: JobPlan) -> JobPicture:
    """Return the job once a plan's status is written."""
    assert found.status is not None
    return replace(seen, status=found.status)


def cluster(name: str, *, is_ready: bool = True) -> Object:
    """Return the job's cluster."""
    ready = {"type": "HeadPodReady", "status": str(is_ready)}
    status = {"state": "ready", "conditions": [ready], "head": {"podIP": "127.64.0.2"}}
    return {"metadata": {"name": name}, "status": status}


def begun(**spec: Any) -> JobPicture:
    """Return a job whose cluster is ready."""
    seen = new(**spec)
    seen = after(seen, plan_job(seen, None, NOW))
    return replace(seen, cluster=cluster(seen.status["rayClusterName"]))


def running(**spec: Any) -> JobPicture:
    """Return a job that runs."""
    seen = begun(**spec)
    return after(seen, plan_job(seen, Answer("RUNNING"), NOW + 5))


def test_a_new_job_names_its_cluster_and_then_makes_it() -> None:
    seen = new()
    first = plan_job(seen, None, NOW)
    assert first.create is None
    seen = after(seen, first)
    assert seen.deployment == "Initializing"
    assert seen.status["startTime"] == time_text(NOW)
    made = plan_job(seen, None, NOW).create
    assert made is not None
    assert made["metadata"]["name"] == seen.status["rayClusterName"]
    assert made["metadata"]["labels"]["ray.io/originated-from-crd"] == "RayJob"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid"
    assert made["spec"] == seen.spec["rayClusterSpec"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_the_dashboard_is_asked_when_the_head_is_ready(is_ready: bool) -> None:
    seen = begun()
    name = seen.status["rayClusterName"]
    seen = replace(seen, cluster=cluster(name, is_ready=is_ready))
    assert seen.url == ("http://127.64.0.2:8265" if is_ready else "")
    found = plan_job(seen, UNKNOWN if is_ready else None, NOW)
    assert (found.submit is not None) is is_ready
    assert (found.again_seconds == POLL_SECONDS) is is_ready


def test_the_submission_has_what_the_spec_says() -> None:
    seen = begun(entrypointNumCpus=0.5, entrypointResources='{"a": 1}', metadata={"team": "x"})
    body = plan_job(seen, UNKNOWN, NOW).submit
    assert body is not None
    assert body["entrypoint"] == "python /home/ray/samples/sample_code.py"
    assert body["submission_id"] == seen.status["jobId"]
    assert body["runtime_env"]["env_vars"] == {"counter_name": "test_counter"}
    assert (body["metadata"], body["entrypoint_num_cpus"]) == ({"team": "x"}, 0.5)
    assert body["entrypoint_resources"] == {"a": 1}
    assert "entrypoint_num_gpus" not in body


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_job_that_ray_knows_runs(status: str) -> None:
    seen = begun()
    found = plan_job(seen, Answer(status), NOW)
    assert found.submit is None
    told = after(seen, found)
    assert (told.deployment, told.status["jobStatus"]) == ("Running", status)
    assert told.status["dashboardURL"] == "127.64.0.2:8265"
    again = plan_job(told, Answer(status), NOW + 2)
    assert (again.status, again.again_seconds) == (None, POLL_SECONDS)


@pytest.mark.parametrize(
    ("answer", "limit", "deployment", "reason"),
    [
        (Answer("SUCCEEDED", "good", NOW + 9), 0, "Complete", None),
        (Answer("STOPPED", "stopped", NOW + 9), 0, "Complete", None),
        (Answer("FAILED", "exit code 3", NOW + 9), 0, "Failed", "AppFailed"),
        (Answer("FAILED", "exit code 3", NOW + 9), 1, "Retrying", "AppFailed"),
        (UNKNOWN, 0, "Failed", "AppFailed"),
        (UNKNOWN, 1, "Retrying", "AppFailed"),
    ],
)
def test_an_end_is_recorded(
    answer: Answer, limit: int, deployment: str, reason: str | None
) -> None:
    seen = running(backoffLimit=limit)
    ended = after(seen, plan_job(seen, answer, NOW + 9))
    assert (ended.deployment, ended.status.get("reason")) == (deployment, reason)
    assert ended.status["endTime"] == time_text(NOW + 9)
    assert ended.status["failed"] + ended.status["succeeded"] == 1


def test_a_retry_takes_a_new_cluster_and_the_limit_holds() -> None:
    seen = running(backoffLimit=1)
    first = seen.status["rayClusterName"]
    seen = after(seen, plan_job(seen, Answer("FAILED", "a"), NOW + 9))
    assert plan_job(seen, None, NOW + 9).delete == first
    seen = replace(seen, cluster=None)
    seen = after(seen, plan_job(seen, None, NOW + 10))
    assert seen.deployment == "Initializing"
    assert seen.status["rayClusterName"] != first
    assert not {"jobStatus", "endTime", "reason"} & seen.status.keys()
    seen = replace(seen, cluster=cluster(seen.status["rayClusterName"]))
    seen = after(seen, plan_job(seen, Answer("FAILED", "b"), NOW + 20))
    assert (seen.deployment, seen.status["failed"]) == ("Failed", 2)


def test_the_cluster_of_an_ended_job_goes_after_its_time_to_live() -> None:
    seen = running()
    seen = after(seen, plan_job(seen, Answer("SUCCEEDED", "", NOW + 9), NOW + 9))
    assert plan_job(seen, None, NOW + 12) == JobPlan(again_seconds=7.0)
    gone = plan_job(seen, None, NOW + 19)
    assert gone.delete == seen.status["rayClusterName"]
    assert plan_job(replace(seen, cluster=None), None, NOW + 20) == JobPlan()
    kept = replace(seen, spec={**seen.spec, "shutdownAfterJobFinishes": False})
    assert plan_job(kept, None, NOW + 99) == JobPlan()


def test_a_silent_dashboard_is_waited_for_and_then_given_up() -> None:
    seen = running()
    seen = after(seen, plan_job(seen, None, NOW + 10))
    assert plan_job(seen, None, NOW + 11) == JobPlan(again_seconds=POLL_SECONDS)
    heard = after(seen, plan_job(seen, Answer("RUNNING"), NOW + 12))
    assert "jobStatusCheckFailureStartTime" not in heard.status
    late = after(seen, plan_job(seen, None, NOW + 10 + SILENCE_SECONDS))
    assert late.deployment == "Failed"
    assert late.status["reason"] == "JobStatusCheckTimeoutExceeded"


def test_a_deadline_ends_the_job() -> None:
    seen = running(activeDeadlineSeconds=60, backoffLimit=5)
    assert plan_job(seen, Answer("RUNNING"), NOW + 59).again_seconds == 1.0
    late = after(seen, plan_job(seen, Answer("RUNNING"), NOW + 60))
    assert (late.deployment, late.status["reason"]) == ("Failed", "DeadlineExceeded")


def test_a_suspended_job_has_no_cluster_and_begins_anew() -> None:
    asleep = new(suspend=True)
    asleep = after(asleep, plan_job(asleep, None, NOW))
    assert asleep.deployment == "Suspended"
    assert plan_job(asleep, None, NOW + 1) == JobPlan()
    seen = running()
    seen = replace(seen, spec={**seen.spec, "suspend": True})
    assert seen.url == ""
    seen = after(seen, plan_job(seen, None, NOW + 9))
    assert seen.deployment == "Suspending"
    assert plan_job(seen, None, NOW + 9).delete
    seen = replace(seen, cluster=None)
    seen = after(seen, plan_job(seen, None, NOW + 10))
    assert seen.deployment == "Suspended"
    assert "rayClusterName" not in seen.status
    seen = replace(seen, spec={**seen.spec, "suspend": False})
    assert plan_job(seen, None, NOW + 20).status is not None


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    assert plan_job(replace(new(), is_leaving=True), None, NOW) == JobPlan()
