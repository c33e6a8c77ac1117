"""A job leaves a node that has a notice: when, with whom, at which price, and what if it cannot."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.events import RecordEvent, StartWorkers, StopWorkers
from unbroken.core.job.kueue import Admission, Placement
from unbroken.spec.job.incident import PLANNED_MOVE
from unbroken.spec.job.types import CleanPodPolicy, RunPolicy


@pytest.fixture
def script() -> Script:
    """Two pods train since 4.0, each on a node; a third node is free."""
    return trained()


def trained(replicas: int = 2, spares: int = 0, policy: RunPolicy | None = None) -> Script:
    """A job that trains; every node is known, and one more than the job has pods."""
    made = Script(spec(replicas, spares, policy))
    for index in range(replicas + spares + 1):
        made.run(f"0 node n{index} ready")
    made.up()
    return made


def moved(script: Script, at: float = 11.0) -> None:
    """Let w-2 come up on n2 and take the rank of w-0, whose node has a notice."""
    script.run(f"""
        10 node n0 ready notice=Cordon -> create w-2 avoid=n0
        10.5 pod w-2 node=n2 ->
        {at} ready w-2 -> stop w-0 w-1 in 0 keep gently, status Faulted 1, event PlannedMove,
            incident 1 open
        {at} ready w-0 0 rank=0 ->
        {at} ready w-1 0 rank=1 -> start w-2=0 w-1=1 in 1, status Faulted 1, incident 1 open
    """)


def finish(script: Script, at: float = 12.0) -> None:
    """Let the attempt after the move make progress."""
    script.run(f"""
        {at} runs w-1 1 rank=1
        {at} runs w-2 1 rank=0
        {at + 1} runs w-2 1 rank=0 trains={at + 0.5} -> delete w-0, incident 1 recovered, ledger
    """)


def test_the_place_is_made_first_and_the_old_pod_goes_last(script: Script) -> None:
    moved(script)
    finish(script)
    assert script.incidents[1].outcome == "recovered"
    script.run("15 gone w-0 ->")
    script.run("40 tick ->")
    assert script.job.deadline() is None, "nothing is left to be done for the notice"


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        (CleanPodPolicy.NONE, "delete w-0"),
        (CleanPodPolicy.ONLY_COMPLETE, "delete w-0 w-1 w-2"),
    ],
)
def test_the_old_pod_goes_also_if_the_job_completes_at_once(
    policy: CleanPodPolicy, deleted: str
) -> None:
    script = trained(policy=RunPolicy(clean_pod_policy=policy))
    moved(script)
    script.run("12 completed w-1 1")
    script.run(f"""
        12 completed w-2 1 -> status Completed 1, event Completed, incident 1 recovered, {deleted}
    """)
    script.run("13 gone w-0 ->")


def test_a_move_is_told_as_one_and_charges_nothing(script: Script) -> None:
    script.run("10 job in-process=on")
    moved(script)
    finish(script)
    incident = script.incidents[1]
    assert incident.culprit.fault == PLANNED_MOVE
    assert incident.culprit.text == "Cordon: it goes; to node n2"
    assert (incident.culprit.pod, incident.culprit.node) == ("j-w-0", "n0")
    assert incident.reason == "planned move; not charged to the budget"
    budget = script.status.restart_status
    assert budget is None or budget.restart_count == 0
    told = [e for e in script.effects if isinstance(e, RecordEvent) and e.reason == PLANNED_MOVE]
    assert [one.is_warning for one in told] == [False]
    assert script.status.latest_faulty is not None
    assert script.status.latest_faulty.faulty_instance_id_list == ()


def test_workers_are_stopped_gracefully_and_may_keep_their_process(script: Script) -> None:
    moved(script)
    stops = [e.command for e in script.effects if isinstance(e, StopWorkers)]
    assert [(one.is_graceful, one.restart_mode) for one in stops] == [
        (True, "in_process_restart"),
        (True, "in_process_restart"),
    ]


def test_the_agent_that_is_left_is_asked_for_its_copies(script: Script) -> None:
    script.run("""
        10 runs w-1 0 rank=1 copies=0
        10 node n1 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 -> stop w-0 w-1 in 0 keep gently, status Faulted 1, event PlannedMove,
            incident 1 open
        11.1 ready w-0 0 rank=0
        11.1 ready w-1 0 rank=1 copies=0
    """)
    orders = [e.command for e in script.effects if isinstance(e, StartWorkers)]
    (first,) = [one for one in orders if (one.attempt, one.rank) == (1, 0)]
    assert "10.0.0.1:8080" in first.holders


def test_a_queued_job_has_its_spares_alone() -> None:
    script = trained()
    script.gate = Admission("workload", {"w": Placement()})
    script.run("""
        9 job
        10 node n0 ready notice=Cordon ->
        11 tick ->
    """)
