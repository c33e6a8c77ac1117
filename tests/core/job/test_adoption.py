"""Adoption of a running job by a new operator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.adoption import ADOPT_SECONDS
from unbroken.core.job.events import (
    AgentReported,
    IncidentSeen,
    PodUid,
    StartWorkers,
    StopWorkers,
    WriteIncident,
)
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import JobStatus, RestartStatus, RunPolicy
from unbroken.wire.agent import AgentReport, AgentState


def left(replicas: int = 2, spares: int = 0, script: str = "") -> Script:
    """Return the successor of an operator that left a running job, or one after a script."""
    old = Script(spec(replicas, spares))
    old.up()
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    old.run(script)
    return old.successor(100)


HELD = "master=10.0.0.0 port=29000"


def test_running_job_is_left_alone() -> None:
    new = left(2, 1)
    new.run(f"""
        100 synced               ->
        100 runs w-1 0 rank=1 {HELD} ->
        100 runs w-0 0 rank=0 {HELD} ->
        100 ready w-2            ->
        101 tick                 ->
        102 failed w-1 0         -> stop w-0 0 keep, stop w-1 0 keep, stop w-2 0 keep,
            status Faulted 1, event Faulted, incident 1 open
        102 ready w-0 0          ->
        102 ready w-1 0          ->
        102 ready w-2 0          -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_agent_not_yet_heard_of_is_waited_for_and_then_missed() -> None:
    new = left()
    new.run(f"""
        100 synced ->
        101 runs w-0 0 rank=0 {HELD} ->
        102 lost w-1 ->
    """)
    assert new.job.deadline() == 100 + ADOPT_SECONDS
    new.run("""
        110 tick -> stop w-0 0 keep, status Faulted 1, event Faulted, incident 1 open
        110.5 ready w-0 0 ->
        110.6 runs w-1 0 rank=1 -> stop w-1 0 keep
    """)


def test_ranks_come_from_the_agents() -> None:
    new = left()
    new.run(f"""
        100 synced ->
        100 runs w-0 0 rank=1 {HELD} ->
        100 runs w-1 0 rank=0 {HELD} ->
        102 failed w-1 0 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        102 ready w-0 0  ->
        102 ready w-1 0  -> start w-1 1 rank=0, start w-0 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_start_that_was_under_way_goes_on_with_the_same_address() -> None:
    old = Script()
    old.up("ready")
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    new = old.successor(100)
    new.run("""
        100 synced ->
        100 runs w-0 0 rank=0 master=10.9.9.9 port=777 ->
        100 ready w-1 -> start w-1 0 rank=1, status PodsRunning 0
        101 runs w-1 0 rank=1 -> status Running 0, event Running
    """)
    assert new.status.master_addr == "10.9.9.9"
    assert new.status.master_port == "777"


def test_restart_that_was_under_way_goes_on_and_is_charged_once() -> None:
    new = left(script="10 failed w-1 0\n10.1 ready w-0 0")
    new.run("""
        100 synced          ->
        100 ready w-0 0     ->
        100 failed w-1 0 rank=1 -> stop w-1 0 keep
        101 ready w-1 0     -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
        102 runs w-0 1
        102 runs w-1 1      -> status Running 1, event Running, incident 1 open
        163 tick            -> incident 1 recovered
    """)
    assert new.status.restart_status is not None
    assert new.status.restart_status.restart_count == 1


def test_attempt_that_ran_is_not_prepared_again_where_its_fault_was_never_written() -> None:
    old = Script(spec(1, policy=RunPolicy(job_max_retry_count=1)))
    old.up()
    old.run("10 failed w-0 0\n11 ready w-0 0\n12 runs w-0 1")
    written = old.incidents[1]
    assert written.started_at == 12
    old.run("""
        20 shutdown w-0 1 -> stop w-0 1, status Faulted 1, event Faulted, incident 1 failed again,
            incident 2 open
    """)
    new = Script(old.spec, old.status)
    new.give(IncidentSeen(written), 100)
    new.run("""
        100 job    ->
        100 synced -> create w-0, status Faulted 2, event Faulted, incident 1 failed again,
            incident 2 open
        101 pod w-0 node=n0
        102 ready w-0 -> status Faulted 2, ledger awaited, start w-0 2 rank=0, status Faulted 2,
            incident 2 open
    """)
    assert new.incidents[1].ready_at == written.ready_at


def test_fault_of_the_meantime_is_found_and_charged() -> None:
    new = left()
    new.run("""
        100 synced ->
        100 runs w-0 0 rank=0 ->
        100 failed w-1 0 rank=1 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
    """)
    assert new.incidents[1].culprit.fault == "ExitCode"


@pytest.mark.parametrize(
    "heard",
    ["runs w-0 0 rank=0 told=12\n100.2 boots w-1 agent=other", "failed w-0 0 rank=0 told=12"],
    ids=["others run it", "it has failed"],
)
def test_progress_that_was_never_written_is_not_charged(heard: str) -> None:
    new = left(1 if heard.startswith("failed") else 2)
    new.job.state.set_status(restart_status=RestartStatus(restart_count=3))
    new.run(f"100 synced\n100.1 {heard}\n112 tick")
    incident = new.incidents[1]
    assert (incident.step, incident.remedy) == (12, Remedy.PROCESS)
    assert new.status.restart_status == RestartStatus()


def test_two_addresses_of_one_attempt_are_stopped() -> None:
    left().run("""
        100 synced ->
        100 runs w-0 0 rank=0 master=10.0.0.0 port=1 ->
        100 runs w-1 0 rank=1 master=10.0.0.0 port=2 -> stop w-0 0 keep, stop w-1 0 keep,
            status Faulted 1, event Faulted, incident 1 open
    """)


def test_pods_that_went_in_the_meantime_are_a_fault() -> None:
    old = Script()
    old.up()
    old.views.clear()
    new = old.successor(100)
    new.run("""
        100 synced -> create w-0, create w-1, status Faulted 1, event Faulted, incident 1 open
    """)


def test_newest_attempt_is_the_agents_where_the_status_is_behind() -> None:
    new = left()
    new.run("""
        100 synced ->
        100 runs w-0 7 rank=0 master=a port=1 ->
        100 runs w-1 7 rank=1 master=a port=1 -> status Running 7, event Running
    """)


def test_stopped_attempt_is_not_started_again() -> None:
    new = left()
    new.run("""
        100 synced ->
        100 ready w-0 0 ->
        100 ready w-1 0 -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1, event Faulted,
            incident 1 open
    """)


@pytest.mark.parametrize("state", ["Completed", "Failed"])
def test_job_that_has_ended_is_only_cleaned_up(state: str) -> None:
    old = Script(spec(1))
    old.up()
    old.run("5 pod w-0 phase=Running\n10 completed w-0 0")
    old.successor(100).run("""
        100 synced -> delete w-0
        101 failed w-0 0 ->
        102 gone w-0 ->
    """)


def test_status_that_is_no_status_of_ours_is_no_reason_to_stop() -> None:
    script = Script(spec(1), JobStatus(restart_count=3))
    script.run("""
        0 job ->
        0 synced -> create w-0, status Created 3, event Created
        1 pod w-0 node=n0
        2 ready w-0 -> ledger awaited, start w-0 3 rank=0, status PodsRunning 3
    """)


def test_pod_that_ran_before_and_cannot_be_asked_counts_as_alive() -> None:
    old = Script()
    old.up("ready")
    for name in old.views:
        old.run(f"1 pod {name} phase=Running")
    new = old.successor(100)
    new.run("""
        100 synced  ->
        100 ready w-0 ->
        110 tick    ->
        111 ready w-1 -> start w-0 0 rank=0, start w-1 0 rank=1, status PodsRunning 0
    """)


def test_request_to_restart_is_not_followed_again_by_the_next_operator() -> None:
    old = Script()
    old.up()
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    old.run("10 job restart=9\n10.1 ready w-0 0\n10.1 ready w-1 0\n11 runs w-0 1\n11 runs w-1 1")
    new = old.successor(100)
    new.run("""
        100 job restart=9 ->
        100 synced ->
        100 runs w-0 1 rank=0 ->
        100 runs w-1 1 rank=1 -> status Running 1, event Running, incident 1 open
        101 job restart=9 ->
        102 job restart=99 -> stop w-0 1, stop w-1 1, status Faulted 2, event Faulted,
            incident 1 failed again, incident 2 open
    """)


def test_request_to_restart_is_not_followed_again_though_its_incident_was_never_written() -> None:
    old = Script()
    old.up()
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    old.run("10 job restart=9\n10.1 ready w-0 0\n10.1 ready w-1 0")
    old.effects = [one for one in old.effects if not isinstance(one, WriteIncident)]
    new = old.successor(100)
    new.run("""
        100 job restart=9 ->
        100 synced ->
        100 runs w-0 1 rank=0 ->
        100 runs w-1 1 rank=1 -> status Running 1, event Running
        101 job restart=99 -> stop w-0 1, stop w-1 1, status Faulted 2, event Faulted,
            incident 1 open
    """)


def test_request_that_joins_a_recovery_is_written_at_once() -> None:
    script = Script()
    script.up()
    script.run("10 failed w-1 0")
    script.run("11 job restart=10.5 -> stop w-0 0, stop w-1 0, incident 1 open")


def test_pod_without_a_place_is_made_anew_once_for_nobody_knows_what_it_avoids() -> None:
    old = Script(spec(1))
    old.run("0 job\n0 synced\n1 pod w-0")
    old.successor(100).run("""
        100 synced           ->
        130 tick             -> delete w-0
        131 gone w-0         -> create w-0
        132 pod w-0 uid=w-0.1 ->
        999 tick             ->
    """)


def test_rank_that_an_unheard_agent_may_run_is_given_to_nobody() -> None:
    old = Script(spec(2, 1))
    old.up("ready")
    for name in old.views:
        old.run(f"1 pod {name} phase=Running")
    new = old.successor(100)
    new.run(f"""
        100 synced                   ->
        100 runs w-0 0 rank=0 {HELD} ->
        100 ready w-2                ->
        110 tick                     -> stop w-0 0 keep, stop w-2 0 keep, status Faulted 1,
            event Faulted, incident 1 open
        110.1 ready w-0 0            ->
        110.1 ready w-2 0            ->
        110.2 runs w-1 0 rank=1      -> stop w-1 0 keep
    """)


def test_of_two_that_report_one_rank_the_one_with_the_newer_attempt_keeps_it() -> None:
    left(2, 1).run("""
        100 ready w-0 1 rank=0 ->
        100 ready w-1 0 rank=1 ->
        100 ready w-2 1 rank=1 ->
        100 synced             -> stop w-1 1 keep, status Faulted 2, event Faulted, incident 1 open
        100.1 ready w-1 1      -> start w-0 2 rank=0, start w-2 2 rank=1, status Faulted 2,
            incident 1 open
    """)


def test_rank_that_is_told_late_is_kept() -> None:
    new = left(2, 1)
    new.run("""
        100 synced                 ->
        100 ready w-0 0            ->
        100 ready w-2 0            ->
        110 tick                   -> status Faulted 1, event Faulted, incident 1 open
        110.1 failed w-1 0 rank=0  -> stop w-1 0 keep, status Faulted 1, incident 1 open
        110.2 ready w-1 0 rank=0   -> start w-1 1 rank=0, start w-0 1 rank=1, status Faulted 1,
            incident 1 open
    """)


@pytest.mark.parametrize("spares", [0, 1])
def test_free_rank_of_a_start_under_way_is_given_where_it_can_only_have_been_given(
    spares: int,
) -> None:
    old = Script(spec(2, spares))
    old.up()
    old.run("10 gone w-1\n10.1 pod w-1 node=n1\n10.2 ready w-0 0")
    for name in old.views:
        old.run(f"11 pod {name} phase=Running")
    new = old.successor(100)
    new.run("""
        100 synced
        100 ready w-2
        100 runs w-0 1 rank=0 master=a port=5
    """)
    goes_on, starts_again = (
        "start w-1 1 rank=1, status Faulted 1",
        """stop w-0 1, stop w-1 1, stop w-2 1, status Faulted 2, event Faulted,
            incident 1 failed again, incident 2 open""",
    )
    new.run(f"100 ready w-1 agent=b -> {starts_again if spares else goes_on}")


def test_first_start_under_way_is_begun_anew_where_a_spare_may_have_been_given_the_rank() -> None:
    old = Script(spec(2, 1))
    old.up("ready")
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    new = old.successor(100)
    new.run("""
        100 synced
        100 ready w-1
        100 ready w-2
        100 runs w-0 0 rank=0 master=a port=5 -> stop w-0 0 keep, stop w-1 0 keep, stop w-2 0 keep,
            status Faulted 1, event Faulted, incident 1 open
    """)


def test_suspension_ends_an_adoption_and_its_deadline() -> None:
    new = left()
    new.run(f"""
        100 synced                   ->
        100 runs w-0 0 rank=0 {HELD} ->
        101 job suspend=yes          -> stop w-0 0
    """)
    assert new.job.deadline() == 102
    new.run("111 tick")
    assert (new.job.deadline() or 0) > 111


def test_free_rank_0_goes_to_the_pod_whose_address_the_others_have() -> None:
    old = Script(spec(2, 1))
    old.up()
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    old.run("10 failed w-0 0\n10.1 ready w-0 0\n10.1 ready w-1 0")
    new = old.successor(100)
    new.run("""
        100 synced
        100 ready w-2
        100 runs w-1 1 rank=1 master=10.0.0.0 port=5
        100 ready w-0 agent=b -> start w-0 1 rank=0, status Faulted 1
    """)


def test_ranks_wait_for_an_agent_that_may_yet_tell_its_own() -> None:
    new = left(2, 2)
    new.run("""
        100 synced                 ->
        100 ready w-2 0            ->
        100 ready w-3 0            ->
        110 tick                   -> status Faulted 1, event Faulted, incident 1 open
        112 ready w-0 0 rank=1     ->
        113 ready w-1 0 rank=0     -> start w-1 1 rank=0, start w-0 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_stock_agents_get_no_port_that_an_older_attempt_had() -> None:
    """Offer no old port: attempt 0 may have had several, and the status has only the last."""
    stock = AgentReported(PodUid("w-0.0"), AgentReport("stock-w-0", AgentState.READY))
    old = Script(spec(1))
    old.run("0 job\n0 synced\n0 pod w-0 node=n0")
    old.give(stock, 1)
    first = int(old.status.master_port or 0)
    assert first
    status = replace(old.status, restart_count=1, master_port=str(first + 2))
    new = Script(old.spec, status)
    new.run("100 pod w-0 node=n0\n100 job\n100 synced")
    new.give(stock, 100)
    new.give(stock, 101)
    new.run("110 tick")
    assert new.status.master_port == str(first + 3)


def test_attempt_of_stock_agents_that_not_all_run_is_stopped() -> None:
    """Stop the attempt: a ready stock agent may have run it before, and been stopped."""
    old = Script()
    old.up("ready")
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    new = old.successor(100)
    new.run("100 synced")
    effects = []
    for name, state in (("w-0", AgentState.RUNNING), ("w-1", AgentState.READY)):
        report = AgentReport(f"stock-{name}", state, rank=int(name[-1]))
        effects += new.give(AgentReported(new.views[name].uid, report), 100)
    both = {view.uid for view in new.views.values()}
    assert {e.pod for e in effects if isinstance(e, StopWorkers)} == both
    assert not any(isinstance(e, StartWorkers) for e in effects)


def test_the_rank_of_a_stock_agent_that_shuts_down_is_not_given_to_a_second_pod() -> None:
    """Its workers may not have ended yet, though nothing was written of their start."""
    new = Script(spec(1, 1), Script(spec(1, 1)).status)
    new.run("""
        100 pod w-0 node=n0 phase=Running
        100 pod w-1 node=n1 phase=Running
        100 job
        100 synced
    """)
    effects = []
    shutdown = AgentReport("stock-w-0", AgentState.SHUTDOWN, rank=0)
    ready = AgentReport("stock-w-1", AgentState.READY)
    for name, report in (("w-0", shutdown), ("w-1", ready)):
        effects += new.give(AgentReported(new.views[name].uid, report), 101)
    assert {e.pod for e in effects if isinstance(e, StopWorkers)} == {"w-0.0", "w-1.0"}
    assert not any(isinstance(e, StartWorkers) for e in effects)


@pytest.mark.parametrize("seen", ["before", "after"])
def test_operator_that_dies_with_a_node_leaves_the_node_to_be_blamed(seen: str) -> None:
    """Blame the node, though the new operator has received no report from its agent."""
    new = left()
    if seen == "before":
        new.run("100 node n1 not-ready")
    new.run(f"""
        100 synced
        100 runs w-0 0 rank=0 {HELD}
        110 tick
        110.1 ready w-0 0
        112 node n1 not-ready
        112 tick
    """)
    assert new.incidents[1].culprit.fault == "NodeLost"
    assert new.incidents[1].culprit.node == "n1"
    assert new.job.attempt == 1


def test_node_without_workers_is_not_blamed_for_the_operators_absence() -> None:
    new = left(2, 1)
    new.run(f"""
        100 synced
        100 runs w-0 0 rank=0 {HELD}
        100 ready w-2
        110 tick
        112 node n2 not-ready
        112 lost w-2
    """)
    assert new.incidents[1].culprit.fault == "OperatorRestarted"
