"""What `unbroken jobs` shows of a job of another kind."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.cli.job.resumed import RESUMED, summary
from unbroken.core.auto_resume import FAULT_LENGTH
from unbroken.spec.job_kinds import JOB_SET, PYTORCHJOB, TRAIN_JOB
from unbroken.spec.keys import (
    AUTO_RESUME,
    MAX_RETRIES,
    RESUME_COUNT,
    RESUME_EXHAUSTED,
    RESUME_FAULT,
    RESUME_SUSPENDED,
)

BOTH = {AUTO_RESUME: "true", MAX_RETRIES: "2"}
HELD = {RESUME_COUNT: "1", RESUME_FAULT: "node n1 is gone", RESUME_SUSPENDED: "true"}


def test_every_kind_that_is_resumed_is_listed() -> None:
    assert {PYTORCHJOB, TRAIN_JOB, JOB_SET} <= set(RESUMED)


@pytest.mark.parametrize(
    ("annotations", "job", "state", "fault"),
    [
        ({}, {}, "Active", ""),
        ({}, {"spec": {"suspend": True}}, "Suspended", ""),
        (HELD, {"spec": {"suspend": True}}, "Restarting", "node n1 is gone"),
        ({**HELD, RESUME_EXHAUSTED: "node n2 is gone"}, {}, "Restarting", "node n2 is gone"),
        ({RESUME_FAULT: "a\n\tb " + "c" * 999}, {}, "Active", "a b " + "c" * (FAULT_LENGTH - 4)),
        (HELD, {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, "Failed", None),
    ],
    ids=["runs", "by its user", "by auto-resume", "no retry left", "by a stranger", "has failed"],
)
def test_a_state_is_the_end_or_who_has_suspended_the_job(
    annotations: dict[str, str], job: dict[str, Any], state: str, fault: str | None
) -> None:
    metadata = {"name": "lm", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"}
    shown = summary(TRAIN_JOB, {"metadata": metadata, **job}, {**BOTH, **annotations})
    assert shown["state"] == state
    assert fault in (None, shown["lastFault"])
    assert (shown["restarts"], shown["restartsMax"]) == (int(RESUME_COUNT in annotations), 2)
