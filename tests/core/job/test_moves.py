"""A job leaves a node that has a notice: when, with whom, at which price, and what if it cannot."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.events import RecordEvent, StartWorkers, StopWorkers
from unbroken.core.job.kueue import Admission, Placement
from unbroken.core.job.moves import CHECKPOINT_SECONDS, LAST_SECONDS, STALE_SECONDS, WARM_SECONDS
from unbroken.core.job.recovery.signals import NODE_FAULT
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
        {at} ready w-2 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event PlannedMove,
            incident 1 open
        {at} ready w-0 0 rank=0 ->
        {at} ready w-1 0 rank=1 -> start w-2 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def finish(script: Script, at: float = 12.0) -> None:
    """Let the attempt after the move make progress."""
    script.run(f"""
        {at} runs w-1 1 rank=1
        {at} runs w-2 1 rank=0
        {at + 1} runs w-2 1 rank=0 output={at + 0.5} -> delete w-0, incident 1 recovered, ledger
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
        (CleanPodPolicy.ONLY_COMPLETE, "delete w-0, delete w-1, delete w-2"),
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


def test_what_workers_say_of_the_stop_is_no_fault(script: Script) -> None:
    script.run("""
        10 node n0 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event PlannedMove,
            incident 1 open
        11.1 failed w-1 0 rank=1 kind=PeerLost
        11.2 failed w-0 0 rank=0 kind=PythonException
        11.3 ready w-0 0 rank=0
        11.3 ready w-1 0 rank=1 -> start w-2 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    (incident,) = script.incidents.values()
    assert [sign.fault for sign in incident.signals] == [PLANNED_MOVE]


def test_a_spare_takes_the_rank_and_is_made_anew() -> None:
    script = trained(2, spares=1)
    script.run("""
        10 node n0 ready notice=Cordon -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event PlannedMove, incident 1 open
        10.5 ready w-0 0 rank=0 ->
        10.5 ready w-1 0 rank=1 -> start w-2 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    finish(script)
    script.run("15 gone w-0 -> create w-0 avoid=n0")


def test_a_spare_on_the_node_goes_at_once_and_is_no_place_to_move_to() -> None:
    script = trained(2, spares=1)
    script.run("""
        10 node n2 ready notice=Cordon -> delete w-2
        11 node n0 ready notice=Cordon ->
        12 gone w-2 -> create w-2 avoid=n0/n2
    """)
    assert script.incidents == {}


def test_it_waits_until_the_new_pod_is_warm_but_not_for_ever(script: Script) -> None:
    script.run("""
        9 runs w-0 0 imports=7
        10 node n0 ready notice=Cordon -> create w-2 avoid=n0
        10.5 pod w-2 node=n2
        11 ready w-2 imports=0 -> warm w-2 by=10.0.0.0:8080
        15 tick
        16 ready w-2 imports=3 ->
        17 ready w-2 imports=7 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event PlannedMove, incident 1 open
    """)
    other = trained()
    other.run("""
        9 runs w-0 0 imports=7
        10 node n0 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 imports=0 -> warm w-2 by=10.0.0.0:8080
        40 tick
    """)
    assert other.incidents == {}
    other.run(f"""
        {11 + WARM_SECONDS + 1} tick -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event PlannedMove, incident 1 open
    """)


def test_without_snapshots_it_waits_for_the_next_checkpoint(script: Script) -> None:
    script.run("""
        9 runs w-0 0 saved=100
        9 runs w-1 0 saved=100
        10 node n0 ready notice=Cordon -> create w-2 avoid=n0
        10.5 pod w-2 node=n2
        11 ready w-2 ->
        20 tick ->
        21 runs w-0 0 saved=150 ->
        22 runs w-1 0 saved=150 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event PlannedMove, incident 1 open
    """)


def test_a_checkpoint_that_never_comes_is_not_waited_for(script: Script) -> None:
    script.run("""
        9 runs w-0 0 saved=100
        10 node n0 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 ->
    """)
    script.run(f"{11 + CHECKPOINT_SECONDS - 1} tick ->")
    script.run(f"""
        {11 + CHECKPOINT_SECONDS} tick -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event PlannedMove, incident 1 open
    """)


def test_with_snapshots_no_checkpoint_is_waited_for(script: Script) -> None:
    script.run("""
        9 runs w-0 0 saved=100
        9 runs w-1 0 copies=0
        10 node n0 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event PlannedMove,
            incident 1 open
    """)


def test_without_a_place_it_trains_on_until_shortly_before_the_deadline(script: Script) -> None:
    script.run("""
        10 node n0 ready notice=AwsSpot leaves=120 -> create w-2 avoid=n0
        11 pod w-2
        60 tick ->
    """)
    assert script.incidents == {}
    last = 10 + 120 - LAST_SECONDS
    script.run(f"{last - 0.1} tick ->")
    assert script.job.deadline() == last
    script.run(f"""
        {last} tick -> stop w-0 0 keep, stop w-1 0 keep, delete w-0, status Faulted 1,
            event PlannedMove, incident 1 open
        {last + 0.5} ready w-0 0 rank=0 ->
        {last + 0.5} ready w-1 0 rank=1 -> incident 1 open
        {last + 2} gone w-0 -> status Faulted 1
        {last + 3} pod w-2 node=n2
        {last + 4} ready w-2 -> start w-2 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    assert script.incidents[1].culprit.text == "AwsSpot: it goes; no other place is free"


def test_a_pod_whose_node_goes_at_once_gets_no_rank() -> None:
    script = Script(spec(2, 1))
    script.run("""
        0 node n0 ready
        0 node n2 ready
        0 job
        0 synced
        0 pod w-0 node=n0
        0 pod w-1 node=n0
        0 pod w-2 node=n2
        1 ready w-0
        1 ready w-1
        1 ready w-2
        3 tick
    """)
    script.run_ordered(4.0)
    script.run(f"""
        10 node n0 ready notice=AwsSpot leaves={LAST_SECONDS} -> stop w-0 0 keep, stop w-1 0 keep,
            create w-3 avoid=n0, delete w-1, status Faulted 1, event PlannedMove, incident 1 open
        10.2 pod w-3 ->
        10.5 ready w-0 0 rank=0 ->
        11 gone w-1 -> incident 1 open
        30 tick -> status Faulted 1
    """)


def test_without_a_deadline_it_trains_on(script: Script) -> None:
    script.run("""
        10 node n0 ready notice=Cordon
        11 pod w-2
        100000 tick ->
    """)
    assert script.incidents == {}


def test_a_deadline_that_passed_long_ago_is_none(script: Script) -> None:
    script.run(f"""
        {20 + STALE_SECONDS} node n0 ready notice=GkeMaintenance by=10 -> create w-2 avoid=n0
        {21 + STALE_SECONDS} pod w-2
        {30 + STALE_SECONDS} tick ->
    """)
    assert script.incidents == {}


def test_a_notice_that_is_taken_back_takes_back_the_pod(script: Script) -> None:
    script.run("""
        10 node n0 ready notice=Cordon -> create w-2 avoid=n0
        10.5 pod w-2 node=n2
        11 node n0 ready -> delete w-2
        12 gone w-2 ->
        13 tick ->
    """)
    assert script.incidents == {}
    assert script.job.deadline() is None


def test_ranks_of_several_nodes_move_in_one_restart() -> None:
    script = trained(3)
    script.run("""
        10 node n0 ready notice=Cordon -> create w-3 avoid=n0
        11 node n1 ready notice=Cordon -> create w-4 avoid=n0/n1
        11 pod w-3 node=n3
        12 ready w-3 ->
        12 pod w-4 node=n3
        13.5 ready w-4 -> stop w-0 0 keep, stop w-1 0 keep, stop w-2 0 keep, status Faulted 1,
            event PlannedMove, incident 1 open
    """)
    signs = script.incidents[1].signals
    assert [(sign.pod, sign.fault) for sign in signs] == [
        ("j-w-0", PLANNED_MOVE),
        ("j-w-1", PLANNED_MOVE),
    ]


def test_the_agent_that_is_left_is_asked_for_its_copies(script: Script) -> None:
    script.run("""
        10 runs w-1 0 rank=1 copies=0
        10 node n1 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event PlannedMove,
            incident 1 open
        11.1 ready w-0 0 rank=0
        11.1 ready w-1 0 rank=1 copies=0
    """)
    orders = [e.command for e in script.effects if isinstance(e, StartWorkers)]
    (first,) = [one for one in orders if (one.attempt, one.rank) == (1, 0)]
    assert "10.0.0.1:8080" in first.holders


def test_a_job_that_recovers_moves_afterwards(script: Script) -> None:
    script.run("""
        10 failed w-1 0 rank=1
        10.5 node n0 ready notice=Cordon ->
        10.6 ready w-1 0 rank=1 ->
        10.6 ready w-0 0 rank=0 -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
        13 runs w-0 1 rank=0
        13 runs w-1 1 rank=1
        14 runs w-1 1 rank=1 output=13.5 -> create w-2 avoid=n0, incident 1 recovered, ledger
    """)


def test_a_place_that_is_lost_meanwhile_leaves_the_rank_where_it_was(script: Script) -> None:
    script.run("""
        10 node n0 ready notice=Cordon
        10.5 pod w-2 node=n2
        11 ready w-2 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event PlannedMove,
            incident 1 open
        11 gone w-2
        11 ready w-0 0 rank=0 ->
        11 ready w-1 0 rank=1 -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_a_new_operator_keeps_the_ranks_that_have_moved(script: Script) -> None:
    moved(script)
    finish(script)
    for name in ("w-1", "w-2"):
        script.run(f"14 pod {name} phase=Running")
    script.run("15 gone w-0")
    held = "master=10.0.0.2 port=29000"
    new = script.successor(20.0)
    for name in ("n1", "n2"):
        new.run(f"20 node {name} ready")
    new.run(f"""
        20 node n0 ready notice=Cordon
        20 synced
        20 runs w-1 1 rank=1 {held}
        20 runs w-2 1 rank=0 {held} ->
        30 tick ->
    """)
    assert new.job.attempt == 1


def test_a_job_that_wants_none_stays(script: Script) -> None:
    script.run("""
        9 job moves=off
        10 node n0 ready notice=Cordon by=20 ->
        30 tick ->
    """)


def test_a_job_that_wants_none_leaves_a_node_that_somebody_waits_for_at_once(
    script: Script,
) -> None:
    script.run("""
        9 job moves=off
        10 node n0 ready notice=OrderedRepair leaves=120 order -> stop w-0 0 keep, stop w-1 0 keep,
            delete w-0, status Faulted 1, event NodeFault, incident 1 open
    """)
    assert script.incidents[1].culprit.fault == NODE_FAULT


def test_a_move_from_a_node_that_somebody_waits_for_is_planned(script: Script) -> None:
    script.run("""
        10 node n0 ready notice=OrderedRepair leaves=120 order -> create w-2 avoid=n0
        10.5 pod w-2 node=n2 ->
        11 ready w-2 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event PlannedMove,
            incident 1 open
        11 ready w-0 0 rank=0 ->
        11 ready w-1 0 rank=1 -> start w-2 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    assert script.incidents[1].culprit.fault == PLANNED_MOVE
    finish(script)


def test_a_job_that_does_not_train_leaves_a_node_that_is_waited_for_at_the_deadline() -> None:
    script = Script(spec(2))
    script.run("""
        0 node n0 ready
        0 job
        0 synced
        0 pod w-0 node=n0
        0 pod w-1
        1 ready w-0
        10 node n0 ready notice=OrderedRepair leaves=120 order ->
        60 tick ->
    """)
    assert script.job.deadline() == 10 + 120
    script.run("130 tick -> delete w-0")
    assert (script.job.deadline() or 0.0) > 130
    script.run("131 gone w-0 -> create w-0 avoid=n0")


def test_a_queued_job_has_its_spares_alone() -> None:
    script = trained()
    script.gate = Admission("workload", {"w": Placement()})
    script.run("""
        9 job
        10 node n0 ready notice=Cordon ->
        11 tick ->
    """)
