"""Jobs are parsed once for each version of their object."""

from __future__ import annotations

from typing import Any

from tests.operator.conftest import job
from unbroken.operator.jobs.views import ParsedJobs
from unbroken.operator.kinds import JobObject


def stored(uid: str, version: str, **spec: Any) -> JobObject:
    """Return a job as the API returns it, with these fields in its spec."""
    manifest = job(**spec)
    manifest["metadata"] |= {"uid": uid, "resourceVersion": version}
    found: JobObject = JobObject(manifest)
    return found


def test_a_version_is_parsed_once_and_the_next_one_anew() -> None:
    jobs = ParsedJobs()
    first = jobs.of(stored("u", "1"))
    assert jobs.of(stored("u", "1")) is first
    changed = jobs.of(stored("u", "2", nprocPerNode="4"))
    assert (first.spec.nproc_per_node, changed.spec.nproc_per_node) == ("1", "4")
    assert jobs.of(stored("v", "2")) is not changed, "another job of the same version"


def test_a_job_that_cannot_be_parsed_is_kept_like_others() -> None:
    jobs = ParsedJobs()
    good, bad = stored("good", "1"), stored("bad", "1", replicaSpecs="none")
    assert jobs.of(bad).problems
    assert jobs.of(bad) is jobs.of(bad)
    assert not jobs.of(good).problems


def test_only_existing_jobs_are_kept() -> None:
    jobs = ParsedJobs()
    for version in range(100):
        jobs.of(stored("u", str(version)))
    jobs.of(stored("v", "1"))
    assert len(jobs) == 2
    jobs.forget(stored("u", "100"))
    jobs.forget(stored("w", "1"))
    assert len(jobs) == 1
