"""The registry of job kinds."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.spec.job_kinds import HYPERPOD_JOB, JOB_KINDS, PYTORCHJOB, RAY_CLUSTER, JobKind


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
