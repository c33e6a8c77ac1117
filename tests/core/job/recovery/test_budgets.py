"""Cost of restarts, and the end of the budget."""

from __future__ import annotations

import pytest

from unbroken.core.job.recovery.decision import charge, restart_limits, waive
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import RestartPolicy, RestartStatus, RunPolicy

P, J, F = Remedy.PROCESS, Remedy.JOB, Remedy.FAIL


def rungs(policy: RunPolicy, times: list[float]) -> list[Remedy]:
    """Return the rungs of faults at these times of the job's life."""
    status, found = RestartStatus(), []
    for charged, at in enumerate(times):
        charged_now = charge(restart_limits(policy), status, charged, at, "")
        status = charged_now.status
        found.append(charged_now.remedy)
    return found


@pytest.mark.parametrize(
    ("policy", "times", "expected"),
    [
        (RunPolicy(), [1, 2, 3, 4], [P, P, P, F]),
        (RunPolicy(), [1, 9e3, 9e5, 9e7], [P, P, P, F]),
        (RunPolicy(job_max_retry_count=0), [1], [F]),
        (RunPolicy(job_max_retry_count=2), [1, 9e6, 9.1e6], [P, P, F]),
        (RunPolicy(job_max_retry_count=9), [1, 2, 3, 4, 5], [P] * 5),
        (RunPolicy(restart_policy=RestartPolicy(100, 1, 2)), [1, 2, 3, 4, 5, 6],
         [P, J, P, J, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, 1, 1)), [1, 2, 101, 102], [P, J, P, J]),
        (RunPolicy(restart_policy=RestartPolicy(100, 0, 1)), [1, 2], [J, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, 1)), [1, 2, 3, 4, 5, 6, 7, 8],
         [P, J, P, J, P, J, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100)), [1, 101, 201, 301], [P, P, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, 3, 0)), [1, 2, 3, 101, 102, 103, 104],
         [P, P, P, P, P, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, None, 1)), [1, 2, 3, 4], [P, P, P, J]),
        (RunPolicy(job_max_retry_count=3, restart_policy=RestartPolicy(100, 1)), [1, 2, 3, 4],
         [P, J, P, F]),
    ],
)  # fmt: skip
def test_rungs(policy: RunPolicy, times: list[float], expected: list[Remedy]) -> None:
    assert rungs(policy, times) == expected


PERIOD = RunPolicy(restart_policy=RestartPolicy(3600, 3, 0))


def test_what_failed_is_not_charged_and_the_reason_names_the_limit() -> None:
    spent = RestartStatus(0, 0, 3)
    last = charge(restart_limits(PERIOD), spent, 3, 10, "")
    assert last.status == spent
    assert last.reason == (
        "restartPolicy: all 3 restarts are used in evaluation period 0 (3600 s); "
        "set jobMaxRetryCount or restartPolicy to allow more"
    )
    total = charge(restart_limits(RunPolicy(job_max_retry_count=1)), RestartStatus(), 1, 10, "")
    assert total.reason == "jobMaxRetryCount: the only restart is used"


def test_clock_that_went_back_opens_no_new_period() -> None:
    assert (
        charge(restart_limits(PERIOD), RestartStatus(0, 0, 1), 1, -50, "").status.restart_count == 2
    )


def test_progress_makes_the_count_start_again_where_the_job_sets_no_limit() -> None:
    spent, free = RestartStatus(0, 0, 3), restart_limits(RunPolicy())
    assert charge(free, RestartStatus(0, 0, 1), 1, 10, "").reason == (
        "restart 2 of 3 without progress"
    )
    last = charge(free, spent, 3, 10, "")
    assert (last.remedy, last.status) == (F, spent)
    assert last.reason == (
        "all 3 restarts without progress are used; "
        "set jobMaxRetryCount or restartPolicy to allow more"
    )
    new = charge(free, spent, 300, 10, "step 9 (was 8)")
    assert (new.remedy, new.status) == (P, RestartStatus())
    assert new.reason == "progress since the last start: step 9 (was 8)"


@pytest.mark.parametrize("policy", [PERIOD, RunPolicy(job_max_retry_count=3)])
def test_limits_of_a_manifest_are_kept_whatever_the_progress(policy: RunPolicy) -> None:
    assert (
        charge(restart_limits(policy), RestartStatus(0, 0, 3), 3, 10, "step 9 (was 8)").remedy is F
    )


def test_restart_that_is_not_charged_starts_the_count_again_if_it_was_asked_for() -> None:
    spent, free = RestartStatus(0, 0, 3), restart_limits(RunPolicy())
    assert waive(free, spent, "", is_asked=True) == RestartStatus()
    assert waive(free, spent, "step 9", is_asked=False) == RestartStatus()
    assert waive(free, spent, "", is_asked=False) == spent
    assert waive(restart_limits(PERIOD), spent, "step 9", is_asked=True) == spent
