"""Labels and annotations of a job that are for Kueue."""

from __future__ import annotations

import pytest

from tests.job_samples import changed, job
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.types import queue_of, queue_warnings
from unbroken.spec.keys import QUEUE


def test_all_that_is_meant_for_a_kueue_that_is_not_there_is_named() -> None:
    queued = changed("metadata/labels", {QUEUE: "q", "kueue.x-k8s.io/priority-class": "high"})
    annotated = changed("metadata/annotations", {"kueue.x-k8s.io/podset-required-topology": "x"})
    assert [one.partition(": ")[0] for one in queue_warnings(queued)] == [
        f"metadata.labels[{QUEUE}]",
        "metadata.labels[kueue.x-k8s.io/priority-class]",
    ]
    (warning,) = queue_warnings(annotated)
    assert warning == (
        "metadata.annotations[kueue.x-k8s.io/podset-required-topology]: no Kueue is known to this "
        "operator: it has no effect"
    )
    assert queue_warnings(job()) == ()


@pytest.mark.parametrize("metadata", [None, [], {"labels": "q"}, {"labels": {QUEUE: 1}}])
def test_whatever_stands_there_is_read(metadata: object) -> None:
    assert queue_of({"metadata": metadata}) == ""
    assert isinstance(queue_warnings({"metadata": metadata}), tuple)


def test_a_queued_job_has_no_more_pod_sets_than_a_workload() -> None:
    template = job()["spec"]["replicaSpecs"][0]["template"]
    replicas = [{"name": f"r{n}", "replicas": 1, "template": template} for n in range(9)]
    many = changed("spec/replicaSpecs", replicas)
    assert not parse_job(many).problems
    queued = changed("metadata/labels", {QUEUE: "q"}, many)
    (problem,) = parse_job(queued).problems
    assert str(problem).startswith("spec.replicaSpecs: Forbidden: 9 of them")
