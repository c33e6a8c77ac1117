"""One job from its first sight to its end."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, running


@pytest.mark.parametrize(
    "line", ["0 job restrat=4", "0 node n0 redy", "1 pod w-0 nod=n0", "0 tick 1"]
)
def test_a_word_of_a_script_that_nothing_reads_is_an_error(line: str) -> None:
    with pytest.raises(AssertionError, match="unknown"):
        Script().run(line)


def test_a_failed_worker_stops_everybody_and_the_next_attempt_starts() -> None:
    script = running()
    script.run("""
        10 failed w-1 0 rank=1 -> stop w-0 w-1 in 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10 runs w-0 0          ->
        10.1 ready w-1 0       ->
        10.2 ready w-0 0       -> start w-0=0 w-1=1 in 1, status Faulted 1, incident 1 open
        10.3 runs w-1 1        ->
        10.4 runs w-0 1        -> status Running 1, event Running, incident 1 open
        11 runs w-0 1 trains=10.9 -> incident 1 recovered, ledger
    """)
    assert script.condition.message.endswith("remediated in 400 milliseconds")
    incident = script.incidents[1]
    assert incident.culprit.pod == "j-w-1"
    stages = (incident.detected_at, incident.stopped_at, incident.ready_at, incident.started_at)
    assert stages == (10, 10.2, 10.2, 10.4)
    assert incident.progress_at == 10.9


BROKEN = """
    10 failed w-1 0 rank=1
    10.1 ready w-1 0
    10.2 ready w-0 0
    10.3 runs w-1 1
    10.4 runs w-0 1 output=10.35
"""


def test_an_incident_without_a_sign_of_training_is_closed_with_its_first_output() -> None:
    script = running()
    script.run(BROKEN)
    script.run("""
        20 runs w-0 1 output=10.35 ->
        70.4 tick -> incident 1 recovered
        71 runs w-0 1 output=10.35 ->
    """)
    found = script.incidents[1]
    assert (found.first_output_at, found.progress_at) == (10.35, None)
    assert script.job.state.ledger.progress_at is None


def test_training_that_resumes_after_the_incident_was_closed_completes_it() -> None:
    script = running()
    script.run(BROKEN)
    script.run("""
        70.4 tick -> incident 1 recovered
        95 runs w-0 1 trains=94.5 -> incident 1 recovered, ledger
        96 runs w-0 1 trains=94.5 ->
    """)
    found = script.incidents[1]
    assert (found.progress_at, found.ended_at, found.first_output_at) == (94.5, 70.4, 10.35)


def test_training_of_the_next_attempt_does_not_complete_an_older_incident() -> None:
    script = running()
    script.run(BROKEN)
    script.run("70.4 tick\n80 failed w-1 1 rank=1\n80.1 ready w-1 1\n80.2 ready w-0 1")
    script.run("80.3 runs w-1 2\n80.4 runs w-0 2\n90 runs w-0 2 trains=89")
    assert [script.incidents[n].progress_at for n in (1, 2)] == [None, 89]


def test_a_job_that_completes_before_a_sign_of_training_has_no_known_cost() -> None:
    script = running()
    script.run(BROKEN)
    script.run("12 completed w-0 1 output=10.35\n12.1 completed w-1 1")
    found = script.incidents[1]
    assert (found.outcome, found.progress_at, found.first_output_at) == ("recovered", None, 10.35)
