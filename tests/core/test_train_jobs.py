"""Decisions about a TrainJob of the runtime `unbroken-torch`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.job_samples import changed
from tests.train_jobs import patch, runtime, train_job
from unbroken.core.auto_resume import Say
from unbroken.core.train_jobs import (
    CREATED,
    REFUSED,
    RESULT_CHARACTERS,
    STOPPED,
    TAKEN,
    WAITS,
    ChangeJob,
    CreateJob,
    Order,
    ResultPod,
    TrainJobPicture,
    WriteResult,
    orders_for,
)
from unbroken.spec.kubeflow.trainjob import map_train_job, read_runtime

Object = dict[str, Any]
PODS = (ResultPod("lm-result-0-0-abcde", "p-1", ""),)


def condition(type: str, message: str = "") -> Object:
    """Return the status of an object of which one condition is true."""
    return {"conditions": [{"type": type, "status": "True", "reason": "R", "message": message}]}


def job(status: Object | None = None, *, suspend: bool = False, **spec: Any) -> Object:
    """Return the HyperPodPyTorchJob of the TrainJob."""
    body = map_train_job(train_job(suspend=suspend, **spec), read_runtime(runtime())).body
    body["metadata"] |= {"uid": "j-1", "resourceVersion": "7"}
    return {**body, "status": status or {}}


def orders(
    train: Object | None = None,
    job: Object | None = None,
    pods: tuple[ResultPod, ...] = PODS,
    of: Object | None = None,
) -> list[Order]:
    """Decide on a picture; `of` is the runtime."""
    return orders_for(
        TrainJobPicture(train or train_job(), runtime() if of is None else of, job, pods)
    )


def test_a_train_job_gets_a_job_once() -> None:
    created, told = orders()
    assert isinstance(created, CreateJob)
    assert isinstance(told, Say)
    assert (told.reason, told.is_warning) == (CREATED, False)
    assert orders(job=job()) == []


@pytest.mark.parametrize(
    "train",
    [
        train_job(runtimeRef={"name": "torch-distributed"}),
        train_job(runtimeRef={"name": "unbroken-torch", "kind": "TrainingRuntime"}),
        train_job(runtimeRef={"name": "unbroken-torch", "apiGroup": "other.example"}),
        train_job(managedBy="kueue.x-k8s.io/multikueue"),
        train_job(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        {**train_job(), "status": condition("Complete")},
        {**train_job(), "status": condition("Failed")},
    ],
    ids=["runtime", "kind", "group", "multikueue", "deleted", "complete", "failed"],
)
def test_no_job_is_made_for_other_train_jobs_and_those_that_have_ended(train: Object) -> None:
    assert orders(train) == []


def test_a_job_of_somebody_else_is_never_touched() -> None:
    other = job(condition("Completed"))
    other["metadata"]["ownerReferences"] = []
    (told,) = orders(job=other)
    assert isinstance(told, Say)
    assert told.reason == TAKEN


def test_the_job_of_an_earlier_train_job_is_left_to_the_garbage_collector() -> None:
    other = job(condition("Completed"))
    other["metadata"]["ownerReferences"][0]["uid"] = "older"
    assert orders(job=other) == []


def test_a_train_job_waits_for_its_runtime() -> None:
    for found in (None, {"spec": {}}):
        (told,) = orders_for(TrainJobPicture(train_job(), found, None, PODS))
        assert isinstance(told, Say)
        assert told.reason == WAITS


def test_a_train_job_that_cannot_be_followed_fails_with_the_name_of_the_field() -> None:
    told, written = orders(train_job(initializer={"model": {}}))
    assert isinstance(told, Say)
    assert (told.reason, "spec.initializer" in told.message) == (REFUSED, True)
    assert isinstance(written, WriteResult)
    assert written.result.startswith("Failed: spec.initializer: ")
    repeated = (ResultPod("lm-result-0-0-abcde", "p-1", written.result),)
    assert orders(train_job(initializer={"model": {}}), pods=repeated) == [told]


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (condition("Completed"), "Completed"),
        (condition("Failed", "rank 3:\n  exit code 1"), "Failed: rank 3: exit code 1"),
        ({"conditions": [{"type": "Failed", "status": "True", "reason": "R"}]}, "Failed: R"),
    ],
)
def test_the_result_of_a_job_goes_to_every_pod_that_lacks_it(status: Object, result: str) -> None:
    assert orders(job=job(status)) == [WriteResult("lm-result-0-0-abcde", "p-1", result)]
    pods = (ResultPod("old", "p-1", result), ResultPod("new", "p-2", ""))
    assert orders(job=job(status), pods=pods) == [WriteResult("new", "p-2", result)]


def test_a_long_reason_is_cut() -> None:
    (written,) = orders(job=job(condition("Failed", "x" * 40_000)))
    assert isinstance(written, WriteResult)
    assert len(written.result) == RESULT_CHARACTERS


def test_a_job_that_has_ended_stays_as_it_is() -> None:
    ended = job(condition("Completed"), suspend=True)
    assert orders(job=ended, pods=()) == []
    assert orders(train_job(suspend=True), job=job(condition("Completed")), pods=()) == []


def test_a_job_is_suspended_and_resumed_with_its_train_job() -> None:
    assert orders(train_job(suspend=True), job=job(suspend=True)) == []
    assert orders(train_job(suspend=True), job=job()) == [
        ChangeJob("j-1", "7", {"spec": {"runPolicy": {"suspend": True}}})
    ]
    (resumed,) = orders(job=job(suspend=True))
    assert isinstance(resumed, ChangeJob)
    assert resumed.patch["spec"]["runPolicy"] == {"suspend": False}


def test_a_job_resumes_with_the_pods_of_the_present_patches() -> None:
    train = train_job(runtimePatches=[patch({"nodeSelector": {"pool": "b"}})])
    assert orders(train, job=job()) == [], "the pods of a running job stay as they are"
    (resumed,) = orders(train, job=job(suspend=True))
    assert isinstance(resumed, ChangeJob)
    (replica,) = resumed.patch["spec"]["replicaSpecs"]
    assert replica["template"]["spec"]["nodeSelector"] == {"pool": "b"}


def test_a_job_does_not_resume_without_its_runtime_or_with_patches_that_cannot_be() -> None:
    (told,) = orders_for(TrainJobPicture(train_job(), None, job(suspend=True), PODS))
    assert isinstance(told, Say)
    assert told.reason == WAITS
    bad = train_job(runtimePatches=[patch({"containers": [{"name": "other"}]})])
    assert [type(one) for one in orders(bad, job=job(suspend=True))] == [Say, WriteResult]


def test_changed_options_reach_a_running_job_and_newer_orders_to_restart_stay() -> None:
    annotations = {"unbroken.dev/warm": "off", "unbroken.dev/restart": "2026-01-01T00:00:00Z"}
    have = job()
    have["metadata"]["annotations"]["unbroken.dev/restart"] = "2026-02-02T00:00:00Z"
    assert orders(train_job(metadata={"annotations": annotations}), job=have) == [
        ChangeJob("j-1", "7", {"metadata": {"annotations": {"unbroken.dev/warm": "off"}}})
    ]


def test_a_running_job_does_not_need_its_runtime() -> None:
    suspended = train_job(suspend=True)
    (change,) = orders_for(TrainJobPicture(suspended, None, job(), PODS))
    assert change == ChangeJob("j-1", "7", {"spec": {"runPolicy": {"suspend": True}}})


def test_the_pods_of_a_train_job_that_has_ended_otherwise_are_stopped_once() -> None:
    ended = {**train_job(), "status": condition("Failed", "deadline exceeded")}
    change, told = orders(ended, job=job())
    assert change == ChangeJob("j-1", "7", {"spec": {"runPolicy": {"suspend": True}}})
    assert isinstance(told, Say)
    assert told.reason == STOPPED
    for done in (job(suspend=True), job(condition("Failed")), job(condition("Completed"))):
        assert orders(ended, job=done) == []


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
PLACES = ["spec", "spec/runtimeRef", "spec/trainer", "spec/suspend", "spec/managedBy", "status"]
PLACES += ["status/conditions", "status/conditions/0", "metadata/annotations", "metadata/labels"]


@given(st.sampled_from(PLACES), JSON, st.booleans())
def test_no_value_of_a_train_job_breaks_a_decision(place: str, value: Any, has_job: bool) -> None:
    train = changed(place, value, {**train_job(), "status": condition("Suspended")})
    orders(train, job=job() if has_job else None)
