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
        11 runs w-0 1 output=10.9 -> incident 1 recovered, ledger
    """)
    assert script.condition.message.endswith("remediated in 400 milliseconds")
    incident = script.incidents[1]
    assert incident.culprit.pod == "j-w-1"
    stages = (incident.detected_at, incident.stopped_at, incident.ready_at, incident.started_at)
    assert stages == (10, 10.2, 10.2, 10.4)
    assert incident.progress_at == 10.9
