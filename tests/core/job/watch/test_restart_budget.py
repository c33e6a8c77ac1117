"""The restart budget of a job that sets none: what counts as progress, and what ends the job."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, restart, running
from unbroken.core.job.watch.progress import FIRST_SECONDS, made
from unbroken.spec.job.incident import Incident, Remedy, Restored, Symptom

USED = (
    "all 3 restarts without progress are used; set jobMaxRetryCount or restartPolicy to allow more"
)


def fail(script: Script, at: float, attempt: int, step: int | None = None) -> None:
    """Let an attempt report a step and fail, and the next one run."""
    if step is not None:
        script.run(f"{at - 1} runs w-1 {attempt} told={step}")
    restart(script, at, attempt, fault="kind=Signal")


def reasons(script: Script) -> list[str]:
    """Why each remedy was chosen."""
    return [one.reason.removeprefix("all pods are healthy; ") for one in script.incidents.values()]


def test_restarts_with_progress_never_end_a_job() -> None:
    script = running()
    for attempt in range(40):
        fail(script, 10.0 + 5 * attempt, attempt, step=attempt)
    assert script.status.restart_count == 40
    assert reasons(script)[-1] == "progress since the last start: step 39 (was 38)"


def test_fourth_attempt_in_a_row_without_a_new_step_ends_the_job() -> None:
    script = running()
    for attempt, step in enumerate([50, 40, 50, 49, 45]):
        fail(script, 10.0 + 5000 * attempt, attempt, step)
    assert reasons(script) == [
        "progress since the last start: step 50",
        "restart 1 of 3 without progress",
        "restart 2 of 3 without progress",
        "restart 3 of 3 without progress",
        USED,
    ]
    assert script.condition.reason == "RetriesExhausted"


def test_one_new_step_makes_the_count_start_again() -> None:
    script = running()
    for attempt, step in enumerate([50, 50, 50, 50, 51, 51, 51, 51]):
        fail(script, 10.0 + 5 * attempt, attempt, step)
    assert script.condition.type == "Running"
    fail(script, 90, 8, 51)
    assert script.condition.reason == "RetriesExhausted"


def test_attempt_that_reports_no_step_of_a_job_that_does_is_no_progress() -> None:
    script = running()
    for attempt, step in enumerate([50, None, None, None, None]):
        fail(script, 10.0 + 5000 * attempt, attempt, step)
    assert script.condition.reason == "RetriesExhausted"


def test_without_steps_an_attempt_that_runs_for_long_is_progress() -> None:
    script, now = running(), 4.0
    for attempt, ran in enumerate([9, 700, 599, 599, 601, 9, 9, 9]):
        now += ran
        fail(script, now, attempt)
        now += 0.2
    assert reasons(script)[:5] == [
        "restart 1 of 3 without progress",
        "progress since the last start: ran for 11 minutes",
        "restart 1 of 3 without progress",
        "restart 2 of 3 without progress",
        "progress since the last start: ran for 10 minutes",
    ]
    assert script.condition.type == "Running"
    fail(script, now + 9, 8)
    assert script.condition.reason == "RetriesExhausted"


def test_a_start_up_is_no_progress_if_a_line_shows_when_training_began() -> None:
    script = running()
    fail(script, 10, 0)
    script.run("400 runs w-0 1 trains=300")
    fail(script, 890, 1)
    script.run("1000 runs w-0 2 trains=990")
    fail(script, 1600, 2)
    assert reasons(script) == [
        "restart 1 of 3 without progress",
        "restart 2 of 3 without progress",
        "progress since the last start: ran for 10 minutes",
    ]


def test_restart_that_a_person_asks_for_makes_the_count_start_again() -> None:
    script = running()
    for attempt in range(3):
        fail(script, 10.0 + attempt, attempt, 50)
    script.run("""
        20 job restart=19
        20.1 ready w-0 3
        20.1 ready w-1 3
        20.2 runs w-0 4
        20.2 runs w-1 4
    """)
    for attempt in range(4, 8):
        # The script may be another one now: its steps are its own.
        fail(script, 20.0 + attempt, attempt, 7)
    assert reasons(script)[4] == "progress since the last start: step 7"
    assert script.condition.type == "Running"
    fail(script, 30.0, 8, 7)
    assert script.condition.reason == "RetriesExhausted"


def test_next_operator_knows_the_count_and_the_steps() -> None:
    script = running()
    for attempt, step in enumerate([50, 50, 50]):
        fail(script, 10.0 + attempt, attempt, step)
    new = script.successor(20)
    new.run("20 runs w-0 3 rank=0\n20 runs w-1 3 rank=1\n20 synced")
    fail(new, 22, 3, 50)
    assert list(new.incidents.values())[-1].reason.endswith("restart 3 of 3 without progress")
    fail(new, 23, 4, 51)
    assert list(new.incidents.values())[-1].reason.endswith("step 51 (was 50)")


def incident(number: int, step: int | None = None, restored: int | None = None) -> Incident:
    """One after which the next attempt began with the state of a step."""
    sign = Symptom(1.0, "Signal", "killed", "w-1", "n1", 1)
    kept = () if restored is None else (Restored("0", 1, restored, "memory", 0.1, 0),)
    return Incident(
        number, number, sign, (sign,), Remedy.PROCESS, "", 1.0, step=step, restored=kept
    )


KILLED = Symptom(9.0, "Signal", "killed", "w-1", "n1", 1)


@pytest.mark.parametrize(
    ("step", "earlier", "ran", "expected"),
    [
        (None, [], 0.0, ""),
        (None, [], FIRST_SECONDS, "ran for 10 minutes"),
        (0, [], 0.0, "step 0"),
        (5, [incident(1, 5)], 1e6, ""),
        (6, [incident(1, 5)], 0.0, "step 6 (was 5)"),
        (6, [incident(1, 9), incident(2, 5)], 0.0, ""),
        # No steps, but state: what this attempt began with was saved by the one before.
        (None, [incident(1, restored=10)], 0.0, "step 10"),
        (None, [incident(1, restored=10), incident(2, restored=10)], 1e6, ""),
        (None, [incident(1, restored=10), incident(2, restored=20)], 0.0, "step 20 (was 10)"),
    ],
)
def test_what_progress_is(
    step: int | None, earlier: list[Incident], ran: float, expected: str
) -> None:
    assert made(step, [KILLED], earlier, ran) == expected
