"""Pods that say that they are a job's, by its label or by an owner reference.

Who may create pods in the namespace of a job can give them both. That is no more than such a user
can do to the job anyway; nobody reaches a job of another namespace so.
"""

from __future__ import annotations

import pytest
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.core_v1 import Pod

from unbroken.kube.cache import Key
from unbroken.operator.job_pods import JobPods
from unbroken.operator.jobs.views import pod_view
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.spec.keys import INDEX_LABEL, JOB_LABEL, REPLICA_LABEL

JOB = Key("team", "lm")
UID = "uid-of-the-job"


def pod(namespace: str = "team", owner: str | None = None) -> Pod:
    """Return a pod with the label of the job `lm`, and perhaps an owner."""
    owners = None if owner is None else [OwnerReference("v1", HYPERPOD_JOB.name, "lm", owner)]
    labels = {JOB_LABEL: "lm", REPLICA_LABEL: "pods", INDEX_LABEL: "0"}
    metadata = ObjectMeta(
        name="claimed", namespace=namespace, uid="p", labels=labels, ownerReferences=owners
    )
    return Pod(metadata=metadata)


def of_the_job(claimed: Pod) -> list[Pod]:
    """List the pods of the job after the pod was seen."""
    pods = JobPods(HYPERPOD_JOB)
    pods.changed(None, claimed)
    return pods.of(JOB, UID)


@pytest.mark.parametrize("owner", [None, "", "uid-of-another"])
def test_a_pod_with_a_jobs_label_alone_is_none_of_its_pods(owner: str | None) -> None:
    assert of_the_job(pod(owner=owner)) == []


def test_a_pod_of_another_namespace_is_none_of_its_pods_whatever_it_says() -> None:
    assert of_the_job(pod(namespace="evil", owner=UID)) == []


def test_a_pod_of_the_namespace_that_names_the_job_as_its_owner_is_taken_for_one() -> None:
    (taken,) = of_the_job(pod(owner=UID))
    view = pod_view(taken)
    assert view is not None
    assert (view.name, view.replica_spec, view.index) == ("claimed", "pods", 0)
