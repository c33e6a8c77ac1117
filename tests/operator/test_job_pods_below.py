"""Pods of a job that belong to it through other objects."""

from __future__ import annotations

from typing import Any

import msgspec
from lightkube.resources.core_v1 import Pod

from tests.tables import cases
from unbroken.operator.job_pods import JobPods
from unbroken.operator.kinds import job_class
from unbroken.spec.job_kinds import JOB_SET

SINCE = "2026-01-01T00:00:10Z"
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "lm-node-0", "uid": "j"}


def found(pod: dict[str, Any]) -> list[str]:
    """Names of the pods of the JobSet `lm`, of which there may be this one."""
    pods = JobPods(JOB_SET)
    pods.changed(None, msgspec.convert(pod, Pod, builtin_types=[]))
    metadata = {"name": "lm", "namespace": "ml", "uid": "s", "creationTimestamp": SINCE}
    listed = pods.of_job(job_class(JOB_SET)({"metadata": metadata}))
    return [one.metadata.name or "" for one in listed if one.metadata]


@cases
def test_pods_of_a_jobset_are_controlled_by_jobs_and_no_older_than_it(
    changes: dict[str, Any], is_of_it: bool
) -> None:
    metadata = {
        **{"name": "p", "namespace": "ml", "uid": "u"},
        "creationTimestamp": "2026-01-01T00:00:20Z",
        "labels": {JOB_SET.pod_label: "lm"},
        "ownerReferences": [{**OWNER, "controller": True}],
        **changes,
    }
    assert found({"metadata": metadata}) == (["p"] if is_of_it else [])
