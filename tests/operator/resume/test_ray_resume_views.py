"""Objects and dashboards of Ray as auto-resume reads them, some of which are hostile."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from lightkube.resources.core_v1 import Pod

from unbroken.core.auto_resume import Record
from unbroken.core.ray_resume import Head, RayState, Submission
from unbroken.errors import SpecError
from unbroken.operator.resume.ray_dashboard import (
    JOBS_MAX,
    KEPT_BYTES_MAX,
    REQUEST_BYTES_MAX,
    answer_of,
    packages_of,
)
from unbroken.operator.resume.ray_views import (
    YAML_CHARACTERS_MAX,
    begun_jobs,
    dashboard_url,
    next_runtime_env,
    owner_of,
    ray_picture,
    read_state,
    request_text,
    write_ray_record,
)
from unbroken.spec.auto_resume import Resume
from unbroken.spec.job_kinds import RAY_CLUSTER, RAY_JOB
from unbroken.spec.keys import AUTO_RESUME, LOG_MONITORING, MAX_RETRIES, RESUME_RAY

Object = dict[str, Any]
HEAD = Head("ray-head", "h0", 1)
STATE = RayState("ray", "c0", HEAD, True, 2, (Submission("a", '{"entrypoint":"x"}'),), ("a",))
BOTH = {AUTO_RESUME: "true", MAX_RETRIES: "1"}


def row(id: str | None, status: str = "RUNNING", **more: Any) -> Object:
    """Return a job, as a dashboard lists it."""
    return {"type": "SUBMISSION", "submission_id": id, "status": status, "entrypoint": "x", **more}


def listed(*rows: object) -> list[msgspec.Raw]:
    """Return the rows of an answer."""
    return [msgspec.Raw(json.dumps(one).encode()) for one in rows]


def test_running_jobs_are_read_in_the_order_of_their_ids() -> None:
    found = answer_of(HEAD, listed(row("b"), row("a", "PENDING"), row("c", "SUCCEEDED")))
    assert [one.id for one in found.running] == ["a", "b"]
    assert found.ids == {"a", "b", "c"}
    request = {"entrypoint": "x", "metadata": {}, "runtime_env": {}}
    assert json.loads(found.running[0].request) == request


@pytest.mark.parametrize(
    "bad",
    [
        7,
        [],
        {"type": "SUBMISSION"},
        row(None),
        row(""),
        row("x" * 201),
        row("z", metadata={"a": 1}),
        row("z", runtime_env=[]),
        {**row("z"), "type": "DRIVER"},
        {**row("z"), "entrypoint": None},
    ],
)
def test_a_row_that_cannot_be_read_hides_no_other(bad: object) -> None:
    found = answer_of(HEAD, listed(bad, row("a")))
    assert [one.id for one in found.running] == ["a"]
    assert found.ids == {"a"}


def test_what_is_kept_is_bounded() -> None:
    many = answer_of(HEAD, listed(*(row(f"{number:03}") for number in range(100))))
    assert len(many.running) == JOBS_MAX
    assert len(many.impossible) == 100 - JOBS_MAX
    large = row("a", metadata={"k": "x" * REQUEST_BYTES_MAX})
    found = answer_of(HEAD, listed(large, row("b")))
    assert [one.id for one in found.running] == ["b"]
    assert str(REQUEST_BYTES_MAX) in found.impossible["a"]
    half = [row(f"{n}", metadata={"k": "x" * (REQUEST_BYTES_MAX // 2)}) for n in range(15)]
    kept = answer_of(HEAD, listed(*half)).running
    assert 0 < sum(len(one.request) for one in kept) <= KEPT_BYTES_MAX
    text = write_ray_record(Record(), replace(STATE, jobs=kept))[RESUME_RAY]
    assert read_state({RESUME_RAY: text or ""}).jobs == kept


def test_code_that_the_head_keeps_is_found() -> None:
    found = packages_of({"working_dir": "gcs://a.zip", "py_modules": ["gcs://b.zip", "s3://c", 7]})
    assert found == ["gcs://a.zip", "gcs://b.zip"]
    assert packages_of({"working_dir": 7, "py_modules": "gcs://b.zip"}) == []


def test_a_state_is_read_as_it_was_written() -> None:
    for state in (STATE, RayState("ray", "c0", HEAD), RayState("ray", "c0")):
        text = write_ray_record(Record(), state)[RESUME_RAY]
        assert read_state({RESUME_RAY: text or ""}) == state
    assert write_ray_record(Record(), RayState()) == {RESUME_RAY: None}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"head": 7}', '{"jobs": [{"id": "a"}]}', "[" * 10_000, " " * 200_000]
)
def test_a_malformed_state_counts_as_missing(text: str) -> None:
    assert read_state({RESUME_RAY: text}) == RayState()


# --- the environment of a RayJob


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("env_vars:\n  A: b\n", {"env_vars": {"A": "b"}}),
        ("pip: [x]\nday: 2026-01-01\n", {"pip": ["x"], "day": "2026-01-01"}),
        ('{"env_vars": null}', {}),
    ],
)
def test_the_next_attempt_has_its_environment_and_two_variables(
    text: str, expected: Object
) -> None:
    found = json.loads(next_runtime_env(text, 3))
    variables = found.pop("env_vars")
    own = expected.get("env_vars", {})
    assert variables == {**own, "UNBROKEN_RESUME": "1", "JOB_RESTART_COUNT": "3"}
    assert found == {key: value for key, value in expected.items() if key != "env_vars"}
    again = json.loads(next_runtime_env(next_runtime_env(text, 3), 4))
    assert again["env_vars"]["JOB_RESTART_COUNT"] == "4"


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\nb: *a\n",
        "[1, 2]",
        "just text",
        "a: [",
        "a: !!python/object/apply:os.system [ls]",
        "[" * 20_000,
        "a: " + "x" * YAML_CHARACTERS_MAX,
    ],
)
def test_an_environment_that_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="runtimeEnvYAML"):
        next_runtime_env(text, 1)


# --- objects


def job(**spec: Any) -> Object:
    """Return a RayJob that asks to be resumed."""
    metadata = {"name": "count", "uid": "j0", "resourceVersion": "7", "annotations": BOTH}
    status = {"jobDeploymentStatus": "Running", "rayClusterName": "ray"}
    return {"metadata": metadata, "spec": {"entrypoint": "x", **spec}, "status": status}


@pytest.mark.parametrize(
    ("deployment", "is_lost", "is_over"),
    [
        ("Running", False, False),
        ("Initializing", False, False),
        ("Failed", False, True),
        ("Failed", True, False),
        ("Complete", True, True),
        ("Retrying", True, True),
        ("", False, True),
    ],
)
def test_a_failed_rayjob_is_resumed_only_after_a_decision(
    deployment: str, is_lost: bool, is_over: bool
) -> None:
    found = job()
    found["status"]["jobDeploymentStatus"] = deployment
    state = replace(STATE, is_lost=is_lost, jobs=())
    found["metadata"]["annotations"] = {**BOTH, **write_ray_record(Record(), state)}
    assert ray_picture(RAY_JOB, found, None, [], {}).is_over is is_over


@pytest.mark.parametrize(
    "spec", [{"clusterSelector": {"a": "b"}}, {"submissionMode": "SidecarMode"}, {"suspend": True}]
)
def test_rayjobs_that_are_not_resumed(spec: Object) -> None:
    found = ray_picture(RAY_JOB, job(**spec), None, [], {})
    assert found.is_over
    assert bool(found.problems) is ("suspend" not in spec)


def test_bad_log_rules_are_told_and_losses_are_still_resumed() -> None:
    found = job()
    found["metadata"]["annotations"] = {**BOTH, LOG_MONITORING: "[7]"}
    seen = ray_picture(RAY_JOB, found, None, [], {})
    assert not seen.is_over
    (problem,) = seen.problems
    assert "logMonitoringConfiguration[0]: Invalid value" in problem


@pytest.mark.parametrize(
    ("status", "ids"),
    [
        ({"jobId": "a", "jobStatus": "RUNNING"}, {"a"}),
        ({"jobId": "a", "jobStatus": "PENDING"}, set()),
        ({"jobId": "a"}, set()),
        ({"jobStatus": "RUNNING"}, set()),
    ],
)
def test_the_log_of_a_rayjob_is_read_while_its_entrypoint_runs(
    status: Object, ids: set[str]
) -> None:
    assert begun_jobs(RAY_JOB, {"status": status}, None) == ids


def test_of_the_jobs_of_a_raycluster_those_that_run_and_succeeded_are_known() -> None:
    rows = [row("a"), row("b", "PENDING"), row("c", "SUCCEEDED"), row("d", "STOPPED")]
    found = answer_of(HEAD, listed(*rows))
    assert begun_jobs(RAY_CLUSTER, {}, found) == {"a"}
    assert found.succeeded == {"c"}
    assert found.alive == {"a", "b"}
    assert begun_jobs(RAY_CLUSTER, {}, None) == frozenset()


def test_a_cluster_belongs_to_its_rayjob_alone() -> None:
    def owned(*owners: Object) -> Object:
        return {"metadata": {"name": "ray", "ownerReferences": list(owners)}}

    assert owner_of(owned()) is None
    assert owner_of(owned({"kind": "RayJob", "name": "a", "controller": True})) == "a"
    assert owner_of(owned({"kind": "RayService", "name": "a", "controller": True})) == ""
    assert owner_of(owned({"kind": "RayJob", "name": "a"})) is None


@pytest.mark.parametrize(
    ("port", "address", "url"),
    [
        ("", "10.0.0.2", "http://10.0.0.2:8265"),
        ("8000", "10.0.0.2", "http://10.0.0.2:8000"),
        ("0", "10.0.0.2", "http://10.0.0.2:8265"),
        ("99999", "10.0.0.2", "http://10.0.0.2:8265"),
        ("8265@evil", "10.0.0.2", "http://10.0.0.2:8265"),
        ("", "fd00::2", "http://[fd00::2]:8265"),
        ("", "", ""),
    ],
)
def test_only_the_head_itself_is_asked(port: str, address: str, url: str) -> None:
    cluster = {"spec": {"headGroupSpec": {"rayStartParams": {"dashboard-port": port}}}}
    pod = Pod.from_dict({"metadata": {"name": "h"}, "status": {"podIP": address}})
    assert dashboard_url(cluster, pod) == url


def test_equal_requests_have_equal_texts() -> None:
    assert request_text({"a": 1, "b": 2}) == request_text({"b": 2, "a": 1})


def test_without_annotations_the_default_counts_where_it_is_possible() -> None:
    found = job()
    del found["metadata"]["annotations"]
    assert not ray_picture(RAY_JOB, found, None, [], {}).resume.is_wanted
    seen = ray_picture(RAY_JOB, found, None, [], {}, 3)
    assert (seen.resume, seen.watches_jobs) == (Resume(True, 3, is_default=True), False)
    found["spec"] = {"clusterSelector": {"a": "b"}}
    refused = ray_picture(RAY_JOB, found, None, [], {}, 3)
    assert (refused.resume, refused.problems) == (Resume(), ())


def test_without_annotations_the_jobs_of_a_raycluster_are_forgotten() -> None:
    text = write_ray_record(Record(), STATE)
    for given, state in ((text, RayState()), ({**text, **BOTH}, STATE)):
        metadata = {"name": "ray", "annotations": given}
        assert ray_picture(RAY_CLUSTER, {"metadata": metadata}, None, [], {}, 3).state == state
