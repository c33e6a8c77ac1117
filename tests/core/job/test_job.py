"""One job from its first sight to its end."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, spec


@pytest.mark.parametrize(
    "line", ["0 job restrat=4", "0 node n0 redy", "1 pod w-0 nod=n0", "0 tick 1"]
)
def test_a_word_of_a_script_that_nothing_reads_is_an_error(line: str) -> None:
    with pytest.raises(AssertionError, match="unknown"):
        Script().run(line)


def test_pods_are_created_and_started_once_every_agent_is_ready() -> None:
    script = Script()
    script.run("""
        0 job             ->
        0 synced          -> create w-0, create w-1, status Created 0, event Created
        1 pod w-0 node=n0 ->
        1 pod w-1 node=n1 ->
        2 ready w-0       ->
        3 ready w-1       -> ledger awaited, start w-0 0 rank=0, start w-1 0 rank=1,
            status PodsRunning 0
        3.1 runs w-0 0    ->
        3.2 runs w-1 0    -> status Running 0, event Running
        9 completed w-0 0 ->
        9 completed w-1 0 -> status Completed 0, event Completed, delete w-0, delete w-1
    """)
    assert script.status.completion_time == 9
    assert script.job.deadline() is not None


def test_a_failed_worker_stops_everybody_and_the_next_attempt_starts() -> None:
    script = Script()
    script.up()
    script.run("""
        10 failed w-1 0 rank=1 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10 runs w-0 0          ->
        10.1 ready w-1 0       ->
        10.2 ready w-0 0       -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
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


def test_spare_takes_the_rank_of_a_pod_that_is_gone() -> None:
    script = Script(spec(2, 1))
    script.up()
    script.run("""
        10 gone w-1       -> stop w-0 0 keep, create w-1, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0  -> start w-0 1 rank=0, start w-2 1 rank=1, status Faulted 1,
            incident 1 open
    """)
