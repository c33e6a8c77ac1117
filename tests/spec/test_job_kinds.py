"""The registry of job kinds."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.spec.job_kinds import (
    HYPERPOD_JOB,
    JOB_KINDS,
    JOB_SET,
    MPI_JOB,
    PYTORCHJOB,
    RAY_CLUSTER,
    TRAIN_JOB,
    JobKind,
    controller_of,
    is_pod_of_a_job,
    is_resumed_by_itself,
    names_our_runtime,
)
from unbroken.spec.keys import RESULT_LABEL


@pytest.mark.parametrize("kind", JOB_KINDS, ids=lambda kind: kind.name)
def test_a_kind_reads_the_suspension_that_it_writes(kind: JobKind) -> None:
    assert kind.is_suspended(kind.suspension(True))
    assert not kind.is_suspended(kind.suspension(False))


def test_suspension_is_in_the_field_of_the_kind() -> None:
    assert HYPERPOD_JOB.suspension(True) == {"spec": {"runPolicy": {"suspend": True}}}
    assert RAY_CLUSTER.suspension(False) == {"spec": {"suspend": False}}


@pytest.mark.parametrize("job", [{}, {"spec": None}, {"spec": 7}, {"spec": {"runPolicy": [1]}}])
def test_a_job_that_does_not_say_so_is_not_suspended(job: dict[str, Any]) -> None:
    assert not any(kind.is_suspended(job) for kind in JOB_KINDS)


@pytest.mark.parametrize(
    ("type", "status", "has_ended"),
    [("Succeeded", "True", True), ("Failed", "False", False), ("Running", "True", False)],
)
def test_a_job_has_ended_by_a_condition_of_its_kind(
    type: str, status: str, has_ended: bool
) -> None:
    job = {"status": {"conditions": [{"type": type, "status": status}]}}
    assert PYTORCHJOB.has_ended(job) is has_ended
    assert not RAY_CLUSTER.has_ended(job)


def test_a_job_says_how_it_has_ended() -> None:
    job = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    assert TRAIN_JOB.end_of(job) == "Complete"
    assert JOB_SET.end_of(job) == ""
    assert TRAIN_JOB.end_of({"status": None}) == ""


def test_an_object_is_controlled_by_a_job_of_any_kind() -> None:
    def owned(**more: Any) -> dict[str, Any]:
        owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "lm"}
        return {"metadata": {"ownerReferences": [{**owner, "controller": True, **more}]}}

    assert controller_of(owned()) == (TRAIN_JOB, "lm")
    assert controller_of(owned(apiVersion="trainer.kubeflow.org/v9")) == (TRAIN_JOB, "lm")
    for other in ({"controller": False}, {"kind": "Runtime"}, {"apiVersion": "v1"}):
        assert controller_of(owned(**other)) is None
    assert controller_of({"metadata": {}}) is None


@pytest.mark.parametrize(
    ("reference", "is_ours"),
    [
        ({"name": "unbroken-torch"}, True),
        (
            {
                "name": "unbroken-torch",
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
            },
            True,
        ),
        ({"name": "torch-distributed"}, False),
        ({"name": "unbroken-torch", "kind": "TrainingRuntime"}, False),
        (None, False),
    ],
)
def test_a_train_job_of_our_runtime_is_not_resumed_by_its_annotations(
    reference: dict[str, str] | None, is_ours: bool
) -> None:
    job = {"metadata": {"name": "lm"}, "spec": {"runtimeRef": reference}}
    assert names_our_runtime(job) is is_ours
    assert is_resumed_by_itself(TRAIN_JOB, job) is not is_ours


def test_pods_of_mpi_jobs_are_pods_of_a_job() -> None:
    # mpi-operator 0.6 (v2beta1), and the training operator 1.8 (v1).
    labels = {
        "training.kubeflow.org/operator-name": "mpi-operator",
        "training.kubeflow.org/job-name": "nccl-tests",
        "training.kubeflow.org/job-role": "worker",
    }
    assert is_pod_of_a_job(labels, "Running")
    assert not is_pod_of_a_job(labels, "Succeeded")
    for version in ("v1", "v2beta1"):
        owner = {"apiVersion": f"kubeflow.org/{version}", "kind": "MPIJob", "name": "nccl-tests"}
        launcher = {"metadata": {"ownerReferences": [{**owner, "controller": True}]}}
        assert controller_of(launcher) == (MPI_JOB, "nccl-tests")


def test_a_pod_that_only_waits_for_a_result_is_no_pod_of_a_job() -> None:
    labels = {TRAIN_JOB.pod_label: "lm"}
    assert is_pod_of_a_job(labels, "Running")
    assert not is_pod_of_a_job({**labels, RESULT_LABEL: "true"}, "Running")
