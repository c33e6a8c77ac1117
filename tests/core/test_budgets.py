"""What a restart costs, and when there is none left."""

from __future__ import annotations

import pytest

from unbroken.core.budgets import charge, limits
from unbroken.spec.incident import Remedy
from unbroken.spec.job import RestartPolicy, RestartStatus, RunPolicy

P, J, F = Remedy.PROCESS, Remedy.JOB, Remedy.FAIL


def rungs(policy: RunPolicy, times: list[float]) -> list[Remedy]:
    """The rungs of faults at these times of the job's life."""
    status, found = RestartStatus(), []
    for charged, at in enumerate(times):
        charged_now = charge(limits(policy), status, charged, at)
        status = charged_now.status
        found.append(charged_now.remedy)
    return found


@pytest.mark.parametrize(
    ("policy", "times", "expected"),
    [
        (RunPolicy(), [1, 2, 3, 4], [P, P, P, F]),
        (RunPolicy(), [1, 2, 3, 3600, 3601, 3602, 3603], [P, P, P, P, P, P, F]),
        (RunPolicy(job_max_retry_count=0), [1], [F]),
        (RunPolicy(job_max_retry_count=2), [1, 9e6, 9.1e6], [P, P, F]),
        (RunPolicy(job_max_retry_count=9), [1, 2, 3, 4, 5], [P] * 5),
        (RunPolicy(restart_policy=RestartPolicy(100, 1, 2)), [1, 2, 3, 4, 5, 6],
         [P, J, P, J, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, 1, 1)), [1, 2, 101, 102], [P, J, P, J]),
        (RunPolicy(restart_policy=RestartPolicy(100, 0, 1)), [1, 2], [J, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, 1)), [1, 2, 3, 4, 5, 6, 7, 8],
         [P, J, P, J, P, J, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100)), [1, 2, 3, 4], [P, P, P, F]),
        (RunPolicy(restart_policy=RestartPolicy(100, None, 1)), [1, 2, 3, 4], [P, P, P, J]),
        (RunPolicy(job_max_retry_count=3, restart_policy=RestartPolicy(100, 1)), [1, 2, 3, 4],
         [P, J, P, F]),
    ],
)  # fmt: skip
def test_rungs(policy: RunPolicy, times: list[float], expected: list[Remedy]) -> None:
    assert rungs(policy, times) == expected


def test_what_failed_is_not_charged_and_the_reason_names_the_limit() -> None:
    spent = RestartStatus(0, 0, 3)
    last = charge(limits(RunPolicy()), spent, 3, 10)
    assert last.status == spent
    assert last.reason == (
        "restartPolicy: all 3 restarts are used in evaluation period 0 (3600 s); "
        "set jobMaxRetryCount or restartPolicy to allow more"
    )
    total = charge(limits(RunPolicy(job_max_retry_count=1)), RestartStatus(), 1, 10)
    assert total.reason == "jobMaxRetryCount: the only restart is used"


def test_clock_that_went_back_opens_no_new_period() -> None:
    assert charge(limits(RunPolicy()), RestartStatus(0, 0, 1), 1, -50).status.restart_count == 2
