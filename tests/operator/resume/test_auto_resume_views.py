"""Pods, nodes and the record in annotations, as auto-resume reads them."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.auto_resume import PodNode, PodState, Readiness, Record
from unbroken.core.losses import KEPT, Loss
from unbroken.operator.resume.jobs import concerns, node_state, picture, pod_state
from unbroken.operator.resume.record import LOSSES_BYTES_MAX, read_record, write_record
from unbroken.spec.auto_resume import RETRIES_MAX, Resume
from unbroken.spec.job_kinds import JOB_SET, PYTORCHJOB, TRAIN_JOB, TRAIN_RUNTIME, JobKind
from unbroken.spec.keys import (
    AUTO_RESUME,
    MAX_RETRIES,
    QUEUE,
    RESUME_COUNT,
    RESUME_DEFAULT,
    RESUME_LOSSES,
    RESUME_PODS,
    RESUME_SUSPENDED,
    RESUME_TIME,
)


def node(**parts: object) -> PodNode:
    """Return the view of a Node with these parts."""
    return node_state(msgspec.convert({"metadata": {"name": "n"}, **parts}, Node, builtin_types=[]))


READY = {"type": "Ready", "status": "True"}


def test_a_node_is_what_its_conditions_and_labels_say() -> None:
    at = "2026-01-31T12:00:00Z"
    down = {"type": "Ready", "status": "False", "lastTransitionTime": at}
    assert node(status={"conditions": [READY]}) == PodNode("n")
    assert node().readiness is Readiness.SILENT, "one that has never said anything"
    assert (
        node(status={"conditions": [{**down, "status": "Unknown"}]}).readiness is Readiness.SILENT
    )
    late = node(status={"conditions": [down]})
    assert (late.readiness, late.not_ready_since) == (Readiness.NOT_READY, 1769860800.0)
    broken = {"type": "NvidiaGPUUnhealthy", "status": "True", "reason": "Xid79"}
    assert node(status={"conditions": [READY, broken]}).trouble == "NvidiaGPUUnhealthy: Xid79"
    labels = {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"}
    labelled = node(metadata={"name": "n", "labels": labels}, status={"conditions": [READY]})
    assert labelled.trouble == "node-health-status UnschedulablePendingReboot"
    taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
    assert node(spec={"taints": [taint]}).is_fenced


def test_a_pod_is_what_its_status_says() -> None:
    metadata = {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-31T12:00:00Z"}
    spec = {"nodeName": "n", "restartPolicy": "Never", "containers": []}
    status = {"phase": "Failed", "reason": "Evicted"}
    whole = {"metadata": metadata, "spec": spec, "status": status}
    found = pod_state(msgspec.convert(whole, Pod, builtin_types=[]))
    assert found == PodState("p", "u", "n", "Failed", "Evicted", False, 1769860800.0)


@pytest.mark.parametrize(
    ("job", "is_over"),
    [
        ({}, False),
        ({"spec": {"runPolicy": {"suspend": True}}}, True),
        ({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, True),
        ({"status": {"conditions": [{"type": "Running", "status": "True"}]}}, False),
    ],
)
def test_a_job_that_is_over_is_left_alone(job: dict[str, object], is_over: bool) -> None:
    found = picture(PYTORCHJOB, {"metadata": {"name": "lm"}, **job}, (), {})
    assert found.is_over is is_over


OWNER = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "above"}
BOTH = {AUTO_RESUME: "true", MAX_RETRIES: "2"}


@pytest.mark.parametrize(
    ("kind", "metadata", "said"),
    [
        (JOB_SET, {"ownerReferences": [{**OWNER, "controller": True}]}, "TrainJob above"),
        (JOB_SET, {"ownerReferences": [OWNER]}, ""),
        (TRAIN_JOB, {"labels": {QUEUE: "team-a"}}, "Kueue"),
        (PYTORCHJOB, {"labels": {QUEUE: "team-a"}}, ""),
    ],
    ids=["of a TrainJob", "known by a TrainJob", "in a queue", "PyTorchJob in a queue"],
)
def test_a_job_that_must_not_be_restarted_by_itself_says_why(
    kind: JobKind, metadata: dict[str, object], said: str
) -> None:
    job = {"metadata": {"name": "lm", "annotations": BOTH, **metadata}}
    found = picture(kind, job, (), {})
    assert found.resume.is_wanted is not bool(said)
    assert [said in problem for problem in found.problems] == ([True] if said else [])


def test_a_suspended_job_concerns_auto_resume_until_it_runs_again() -> None:
    assert concerns({"metadata": {"annotations": {RESUME_SUSPENDED: "true"}}})
    assert not concerns({"metadata": {"annotations": {RESUME_COUNT: "1"}}})
    assert concerns({"metadata": {"annotations": {RESUME_DEFAULT: "1"}}})


def test_a_train_job_that_restarts_by_itself_does_not_concern_auto_resume() -> None:
    job = {"metadata": {"annotations": BOTH}, "spec": {"runtimeRef": {"name": TRAIN_RUNTIME}}}
    assert not concerns(job)
    assert concerns({**job, "spec": {"runtimeRef": {"name": "torch-distributed"}}})


@pytest.mark.parametrize(
    ("annotations", "default", "resume"),
    [
        ({}, 3, Resume(True, 3, is_default=True)),
        ({}, 0, Resume()),
        ({AUTO_RESUME: "false"}, 3, Resume()),
        ({AUTO_RESUME: "true"}, 3, Resume()),
        (BOTH, 3, Resume(True, 2)),
        ({RESUME_DEFAULT: "9"}, 3, Resume(True, 3, is_default=True)),
        ({RESUME_DEFAULT: "9"}, 0, Resume()),
    ],
)
def test_annotations_decide_where_they_are_set_else_the_default(
    annotations: dict[str, str], default: int, resume: Resume
) -> None:
    job = {"metadata": {"name": "lm", "annotations": annotations}}
    assert picture(PYTORCHJOB, job, (), {}, default).resume == resume


def test_a_job_without_annotations_that_must_not_be_restarted_is_left_alone() -> None:
    job = {"metadata": {"name": "lm", "labels": {QUEUE: "team-a"}}}
    found = picture(TRAIN_JOB, job, (), {}, 3)
    assert (found.resume, found.problems) == (Resume(), ())


UIDS = st.frozensets(st.text("abcdef0123456789-", min_size=1), max_size=4)

TIMES = st.integers(0, 2**33).map(float)
LOSSES = st.builds(
    Loss,
    at=TIMES,
    decided=TIMES,
    culprit=st.text(max_size=9),
    fault=st.text(max_size=9),
    remedy=st.text(max_size=9),
    restart=st.integers(0, 9),
    pods=st.integers(0, 9),
    ran=st.none() | TIMES,
)


@given(
    st.builds(
        Record,
        count=st.integers(0, 10**6),
        fault=st.text(max_size=9),
        at=st.none() | st.integers(0, 2**32).map(float),
        pods=UIDS,
        nodes=UIDS,
        exhausted=st.text(max_size=9),
        is_suspended=st.booleans(),
        default=st.integers(0, RETRIES_MAX),
        losses=st.lists(LOSSES, max_size=KEPT).map(tuple),
    )
)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    written = write_record(record)
    assert read_record({k: v for k, v in written.items() if v is not None}) == record


@pytest.mark.parametrize(
    "text",
    ["[", "{}", "[7]", "[" * 9999, '[{"at": 1e300}]', "\ud800", f"[{' ' * LOSSES_BYTES_MAX}]"],
)
def test_garbled_losses_are_none(text: str) -> None:
    assert read_record({RESUME_LOSSES: text}) == Record()


def test_a_loss_of_another_time_or_of_endless_words_is_none() -> None:
    loss = {"at": 1.0, "decided": 2.0, "culprit": "node n", "fault": "it is gone", "remedy": "r"}
    assert len(read_record({RESUME_LOSSES: json.dumps([loss])}).losses) == 1
    for odd in ({"at": -1}, {"ran": 1e15}, {"fault": "x" * 999}, {"restart": -1}, {"culprit": 7}):
        assert read_record({RESUME_LOSSES: json.dumps([{**loss, **odd}])}).losses == ()


def test_a_garbled_record_is_none() -> None:
    assert (
        read_record({RESUME_COUNT: "many", RESUME_TIME: "yesterday", RESUME_PODS: ""}) == Record()
    )
