"""Commands on jobs of other kinds with auto-resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unbroken.cli.job.resumed import (
    RESUMED,
    Resumed,
    chosen,
    explanation,
    listing,
    loss_line,
    summary,
)
from unbroken.cli.show import Paper
from unbroken.core.auto_resume import FAULT_LENGTH, Record
from unbroken.core.losses import Loss, ResumedJob
from unbroken.errors import SpecError
from unbroken.operator.resume.record import resumed_job, write_record
from unbroken.spec.job_kinds import (
    JOB_SET,
    PYTORCHJOB,
    RAY_CLUSTER,
    RAY_JOB,
    TRAIN_JOB,
    JobKind,
)
from unbroken.spec.keys import (
    AUTO_RESUME,
    MAX_RETRIES,
    RESUME_COUNT,
    RESUME_DEFAULT,
    RESUME_EXHAUSTED,
    RESUME_FAULT,
    RESUME_SUSPENDED,
)

Object = dict[str, Any]
BOTH = {AUTO_RESUME: "true", MAX_RETRIES: "2"}
HELD = {RESUME_COUNT: "1", RESUME_FAULT: "node n1 is gone", RESUME_SUSPENDED: "true"}
OPEN = Loss(1e9, 1e9 + 2, "node n1", "node n1 is gone", "deletes all 2 pods", 1, 2)
CLOSED = replace(OPEN, ran=1e9 + 24.5)
SPENT = Loss(2e9, 2e9 + 2, "pod lm-0", "pod lm-0 failed", "no action")


def shown(kind: JobKind, annotations: dict[str, str] | None = None, **parts: Any) -> ResumedJob:
    """A job of a kind with auto-resume as it is shown."""
    metadata = {
        **{"name": "lm", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "annotations": {**BOTH, **(annotations or {})},
    }
    found = resumed_job(kind, {"metadata": metadata, **parts})
    assert found is not None
    return found


def recorded(*losses: Loss) -> dict[str, str]:
    """The annotations of a job with these losses."""
    record = Record(len([one for one in losses if one.restart]), "node n1 is gone", losses=losses)
    return {key: text for key, text in write_record(record).items() if text is not None}


def test_every_kind_that_is_resumed_is_listed() -> None:
    assert set(RESUMED) == {PYTORCHJOB, TRAIN_JOB, JOB_SET, RAY_JOB, RAY_CLUSTER}


@pytest.mark.parametrize(
    ("annotations", "most"),
    [({}, None), ({AUTO_RESUME: "false", RESUME_DEFAULT: "9"}, None), ({RESUME_DEFAULT: "9"}, 9)],
)
def test_a_job_without_annotations_is_shown_with_the_default_that_the_operator_noted(
    annotations: dict[str, str], most: int | None
) -> None:
    metadata = {"name": "lm", "namespace": "a", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = resumed_job(PYTORCHJOB, {"metadata": {**metadata, "annotations": annotations}})
    assert (found.restarts_max if found else None) == most


@pytest.mark.parametrize(
    ("annotations", "job", "state", "fault"),
    [
        ({}, {}, "Active", ""),
        ({}, {"spec": {"suspend": True}}, "Suspended", ""),
        (HELD, {"spec": {"suspend": True}}, "Restarting", "node n1 is gone"),
        ({**HELD, RESUME_EXHAUSTED: "node n2 is gone"}, {}, "Restarting", "node n2 is gone"),
        ({RESUME_FAULT: "a\n\tb " + "c" * 999}, {}, "Active", "a b " + "c" * (FAULT_LENGTH - 4)),
        (HELD, {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, "Failed", None),
        (recorded(OPEN), {}, "Restarting", None),
        (recorded(CLOSED), {}, "Active", None),
        (recorded(OPEN), {"spec": {"suspend": True}}, "Suspended", None),
        (recorded(CLOSED, SPENT), {}, "Active", None),
    ],
    ids=[
        *("runs", "by its user", "by auto-resume", "no retry left", "by a stranger", "has failed"),
        *("does not run again", "runs again", "suspended in a restart", "with an older restart"),
    ],
)
def test_a_state_is_the_end_or_who_has_suspended_the_job(
    annotations: dict[str, str], job: Object, state: str, fault: str | None
) -> None:
    found = summary(shown(TRAIN_JOB, annotations, **job))
    assert found["state"] == state
    assert fault in (None, found["lastFault"])
    assert (found["restarts"], found["restartsMax"]) == (int(RESUME_COUNT in annotations), 2)


@pytest.mark.parametrize(
    ("status", "state"),
    [("Running", "Active"), ("Retrying", "Active"), ("Complete", "Complete"), (["x"], "Active")],
)
def test_a_rayjob_ends_by_its_deployment_status(status: object, state: str) -> None:
    assert shown(RAY_JOB, status={"jobDeploymentStatus": status}).state == state
    assert shown(RAY_CLUSTER, status={"state": "ready"}).state == "Active"


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        (RAY_CLUSTER, {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "lm"}),
        (RAY_CLUSTER, {"apiVersion": "ray.io/v1", "kind": "RayService", "name": "lm"}),
        (JOB_SET, {"apiVersion": TRAIN_JOB.path[5:], "kind": TRAIN_JOB.name, "name": "lm"}),
    ],
)
def test_a_part_of_another_job_is_not_listed(kind: JobKind, owner: Object) -> None:
    metadata = {
        "name": "lm",
        "annotations": BOTH,
        "ownerReferences": [{**owner, "controller": True}],
    }
    assert resumed_job(kind, {"metadata": metadata}) is None
    plain = {"name": "lm", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"}
    assert resumed_job(kind, {"metadata": plain}) is None


def test_the_list_says_when_a_job_ran_again() -> None:
    def cell(*losses: Loss, **parts: Any) -> object:
        job = Resumed(RAY_JOB, shown(RAY_JOB, recorded(*losses), **parts), {})
        table = listing([job], 1e9, every=False, is_wide=True)
        assert table.names == ["rayjob/lm"]
        return table.rows[0][table.titles.index("RAN AGAIN")]

    assert cell() == "-"
    assert cell(OPEN) == "not yet"
    assert cell(CLOSED) == "after 24.5 s"
    assert cell(CLOSED, SPENT) == "no"


def test_a_loss_is_told_in_a_line_and_in_full() -> None:
    job = shown(RAY_JOB, recorded(CLOSED, replace(OPEN, at=1.5e9, restart=2)))
    first, last = job.losses
    line = loss_line(job, first).partition("  ")[2]
    told = "restart 1: node n1 is gone; deletes all 2 pods; ran again after 24.5 s"
    assert line == told
    text = "\n".join(explanation(job, chosen(job, None, every=False), Paper()))
    assert text.startswith("RayJob lm: Restarting, 2 restarts of at most 2\n\n  ")
    assert told in text
    assert "outcome    does not run again yet" in text
    full = "\n".join(explanation(job, chosen(job, 1, every=False), Paper()))
    for part in ("culprit    node n1", "decided     +2.000 s", "runs again  +24.500 s"):
        assert part in full
    assert chosen(job, None, every=True) == (first, last)
    with pytest.raises(SpecError, match=r"restart 7 \(it has: 1, 2\)"):
        chosen(job, 7, every=False)


def test_a_record_of_an_older_operator_is_told_as_far_as_it_goes() -> None:
    job = shown(PYTORCHJOB, {RESUME_COUNT: "1", RESUME_FAULT: "node n1 is gone"})
    text = "\n".join(explanation(job, chosen(job, None, every=False), Paper()))
    assert "fault      node n1 is gone" in text
    assert "no losses so far" in "\n".join(explanation(shown(PYTORCHJOB), (), Paper()))


def test_words_of_an_object_stay_in_one_line() -> None:
    loss = replace(CLOSED, culprit="node\nn1", fault="a\n\tb", remedy="c\r\nd")
    job = shown(PYTORCHJOB, recorded(loss))
    assert "a b; c d; ran" in loss_line(job, job.losses[0])
    (row,) = listing([Resumed(PYTORCHJOB, job, {})], 1e9, every=True, is_wide=True).rows
    assert not any("\n" in str(cell) for cell in row)
