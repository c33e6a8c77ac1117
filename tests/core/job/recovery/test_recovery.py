"""Faults of one job: what is stopped, replaced, fenced, charged, and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.recovery.recovery import story
from unbroken.core.job.recovery.signals import reason_of
from unbroken.spec.job.incident import Incident, Remedy, Signal
from unbroken.spec.job.types import RestartPolicy, RunPolicy


def running(replicas: int = 2, spares: int = 0, policy: RunPolicy | None = None) -> Script:
    """A job whose attempt 0 runs."""
    script = Script(spec(replicas, spares, policy))
    script.up()
    return script


def restart(script: Script, at: float, attempt: int, fault: str = "failed w-1") -> None:
    """Let the attempt fail, and the next one run, of a job of two pods."""
    script.run(f"""
        {at} {fault} {attempt}
        {at + 0.1} ready w-0 {attempt}
        {at + 0.1} ready w-1 {attempt}
    """)
    if script.job.phase.value == "Training":
        script.run(f"{at + 0.2} runs w-0 {attempt + 1}\n{at + 0.2} runs w-1 {attempt + 1}")


def test_spare_takes_the_rank_of_a_pod_that_is_gone() -> None:
    script = running(2, 1)
    script.run("""
        10 gone w-1       -> stop w-0 0 keep, create w-1, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0  -> start w-0 1 rank=0, start w-2 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    assert script.incidents[1].remedy is Remedy.POD
    assert script.incidents[1].reason.startswith("lost j-w-1;")


def test_a_pod_whose_containers_have_ended_is_not_waited_for() -> None:
    """Its ranks move, and its name is freed for a new pod."""
    script = running(2, 1)
    script.run("""
        10 pod w-1 deleting   -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0      ->
        10.8 pod w-1 deleting ended -> start w-0 1 rank=0, start w-2 1 rank=1, delete w-1 force,
            status Faulted 1, incident 1 open
        11 runs w-0 1
        11 runs w-2 1
        11.1 gone w-1         -> create w-1
    """)
    assert script.job.attempt == 1
    assert script.incidents[1].culprit.fault == "PodDeleted"
    assert list(script.incidents) == [1]


def test_a_name_that_is_not_wanted_again_is_left_to_the_kubelet() -> None:
    script = running()
    script.run("""
        10 job suspend=yes
        10.2 ready w-0 0            ->
        10.3 ready w-1 0            -> delete w-0, delete w-1, status Suspended 0,
            event JobSuspended, ledger
        10.4 pod w-0 deleting       ->
        10.8 pod w-0 deleting ended ->
    """)


def test_containers_that_had_ended_before_the_deletion_prove_nothing() -> None:
    running(2, 1).run("""
        10 pod w-1 deleting ended   -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
        10.1 ready w-0 0            ->
        10.8 pod w-1 deleting ended ->
        17 gone w-1                 -> start w-0 1 rank=0, start w-2 1 rank=1, create w-1,
            status Faulted 1, incident 1 open
    """)


def test_a_pod_is_waited_for_until_its_agent_has_ended_all_workers() -> None:
    running(2, 1).run("""
        10 pod w-1 deleting    -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0       ->
        10.2 shutdown w-1 0    ->
        10.6 shutdown w-1 0 ended -> start w-0 1 rank=0, start w-2 1 rank=1, status Faulted 1,
            incident 1 open
        10.7 shutdown w-1 0    ->
        10.8 lost w-1          ->
        10.9 runs w-0 1        ->
        10.9 runs w-2 1        -> status Running 1, event Running, incident 1 open
        17 gone w-1            -> create w-1
    """)


def test_without_a_spare_the_new_pod_is_waited_for() -> None:
    running().run("""
        10 gone w-0                 -> stop w-1 0 keep, create w-0, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-1 0            -> incident 1 open
        11 pod w-0 uid=w-0.1 node=n2 ->
        12 ready w-0 agent=w-0.b    -> start w-0.1 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_second_sign_of_one_fault_changes_nothing() -> None:
    script = running(3)
    script.run("""
        10 failed w-1 0 rank=1   -> stop w-0 0 keep, stop w-1 0 keep, stop w-2 0 keep,
            status Faulted 1, event Faulted, incident 1 open
        10 failed w-1 0 rank=1   ->
        10.1 failed w-2 0 rank=2 kind=PeerLost at=9 ->
        10.2 lost w-0            ->
    """)
    assert script.job.attempt == 1
    assert list(script.incidents) == [1]


def test_culprit_is_the_first_cause_and_never_a_lost_peer() -> None:
    script = running(3)
    script.run("""
        10 failed w-1 0 rank=1 kind=PeerLost at=9
        10.1 failed w-2 0 rank=2 at=9.5 -> status Faulted 1, incident 1 open
    """)
    assert script.incidents[1].culprit.pod == "j-w-2"
    assert script.status.latest_faulty is not None
    assert script.status.latest_faulty.faulty_rank_list == ("2",)
    assert script.condition.reason == "ExitCode"


@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        ("Signal", 137, "SIGKILL"),
        ("Signal", 128 + 35, "signal35"),
        ("Signal", None, "Signal"),
        ("OutOfMemory", 137, "OutOfMemory"),
        ("ExitCode", 137, "ExitCode"),
    ],
)
def test_a_condition_names_the_signal_that_killed(fault: str, code: int | None, word: str) -> None:
    assert reason_of(Signal(1.0, fault, "killed", exit_code=code)) == word


def test_early_exit_beats_the_errors_of_its_peers() -> None:
    script = running(3)
    script.run("""
        10 failed w-1 0 rank=1 at=9
        10.1 failed w-2 0 rank=2 at=9.5 kind=EarlyExit
    """)
    assert script.incidents[1].culprit.rank == 2


def test_a_rank_of_another_pod_that_left_is_whom_a_lost_peer_means() -> None:
    script = running(3)
    script.run("""
        9 completed w-2 0 left=2 ->
        10 failed w-1 0 rank=1 kind=PeerLost at=10 -> stop w-0 0 keep, stop w-1 0 keep,
            stop w-2 0 keep, status Faulted 1, event Faulted, incident 1 open
    """)
    assert script.incidents[1].culprit.fault == "EarlyExit"
    assert (script.incidents[1].culprit.pod, script.incidents[1].culprit.rank) == ("j-w-2", 2)


def test_who_left_may_be_told_after_who_misses_it() -> None:
    script = running(3)
    script.run("""
        10 failed w-1 0 rank=1 kind=PeerLost at=10
        10.1 stopping w-2 0 left=2 -> status Faulted 1, incident 1 open
    """)
    assert script.incidents[1].culprit.fault == "EarlyExit"


def test_who_left_is_the_cause_also_where_another_rank_of_its_node_misses_it() -> None:
    script = running(3)
    script.run("""
        10 failed w-1 0 rank=1 kind=PeerLost at=10
        10.1 failed w-2 0 rank=3 kind=PeerLost at=10 left=2
    """)
    assert script.incidents[1].culprit.fault == "EarlyExit"
    assert (script.incidents[1].culprit.pod, script.incidents[1].culprit.rank) == ("j-w-2", 2)


def test_who_ended_well_is_not_blamed_for_what_others_did() -> None:
    script = running(3)
    script.run("""
        9 completed w-2 0 left=2
        10 failed w-1 0 rank=1 at=10
        10.1 stopping w-0 0 left=0
    """)
    assert script.incidents[1].culprit.rank == 1
    assert len(script.incidents[1].signals) == 1


def test_a_fault_that_an_agent_tells_while_it_stops_is_heard() -> None:
    script = running(3)
    script.run("""
        10 failed w-1 0 rank=1 kind=PeerLost at=10
        10.1 stopping w-2 0 fault=ExitCode rank=2 at=9.9
    """)
    assert script.incidents[1].culprit.rank == 2


def test_lost_agent_counts_as_alive_until_it_says_otherwise() -> None:
    running().run("""
        10 lost w-1       -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0  ->
        11 tick           -> stop w-1 0 keep
        11.5 runs w-1 0   ->
        12 tick           -> stop w-1 0 keep, status Faulted 1
        12.2 ready w-1 0  -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_agent_that_comes_back_as_another_process_is_made_sure_of_and_started() -> None:
    script = running()
    script.run("""
        10 lost w-1                -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
        10.1 ready w-0 0           ->
        10.5 ready w-1 agent=b     -> stop w-1 0 keep
        10.6 ready w-1 0 agent=b   -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    assert script.incidents[1].remedy is Remedy.PROCESS


def test_agent_that_was_restarted_unnoticed_is_a_fault() -> None:
    running().run("""
        10 ready w-1 agent=b     -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
        10.1 ready w-0 0         ->
        10.1 ready w-1 0 agent=b -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
        10.2 ready w-1 0         ->
    """)


def test_agent_that_stays_away_has_its_pod_replaced() -> None:
    script = running()
    script.run("""
        10 lost w-1       -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0  ->
        29.9 tick         -> stop w-1 0 keep, status Faulted 1
        30 tick           -> delete w-1, incident 1 open
        31 gone w-1       -> create w-1, incident 1 open
        31 pod w-1 uid=w-1.1 node=n1
        32 ready w-1 agent=b -> start w-0 1 rank=0, start w-1.1 1 rank=1, status Faulted 1,
            incident 1 open
    """)
    assert script.incidents[1].remedy is Remedy.POD


def test_pod_on_a_dead_node_is_fenced_before_its_rank_runs_again() -> None:
    script = running(2, 1)
    script.run("""
        10 lost w-1           -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0      ->
        10.2 node n1 not-ready -> delete w-1, fence n1, status Faulted 1, incident 1 open
        10.3 pod w-1 deleting ->
        10.4 node n1 fenced   -> prove n1 w-1
        10.41 proven w-1      -> start w-0 1 rank=0, start w-2 1 rank=1, delete w-1 force,
            status Faulted 1, incident 1 open
        10.5 gone w-1         -> create w-1 avoid=n1
    """)
    assert script.incidents[1].remedy is Remedy.POD


def test_node_that_must_not_be_used_is_left_at_once() -> None:
    script = running(2, 1)
    script.run("""
        10 node n1 unhealthy -> stop w-0 0 keep, stop w-1 0 keep, delete w-1, status Faulted 1,
            event NodeFault, incident 1 open
        10.1 ready w-0 0     ->
        10.2 ready w-1 0     -> start w-0 1 rank=0, start w-2 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_node_that_is_not_ready_is_no_fault_while_its_agent_answers() -> None:
    running().run("""
        10 node n1 not-ready  ->
        11 runs w-1 0         ->
        12 lost w-1           -> stop w-0 0 keep, stop w-1 0 keep, delete w-1, fence n1,
            status Faulted 1, event NodeFault, incident 1 open
    """)


def test_removed_node_is_fenced() -> None:
    running(2, 1).run("""
        10 node-gone n1  -> prove n1 w-1
        10.01 proven w-1 -> stop w-0 0 keep, delete w-1 force, status Faulted 1, event NodeFault,
            incident 1 open
        10.1 ready w-0 0 -> start w-0 1 rank=0, start w-2 1 rank=1, status Faulted 1,
            incident 1 open
    """)


@pytest.mark.parametrize(
    "sign",
    ["pod w-1 deleting", "pod w-1 phase=Failed", "gone w-1", "shutdown w-1 0", "ready w-1 0",
     "stopping w-1 0", "failed w-1 0"],
)  # fmt: skip
def test_every_sign_stops_the_others(sign: str) -> None:
    script = running()
    effects = len(script.effects)
    script.run(f"10 {sign}")
    stopped = [e for e in script.effects[effects:] if type(e).__name__ == "StopWorkers"]
    assert "w-0.0" in [e.pod for e in stopped]
    assert script.job.attempt == 1


@pytest.mark.parametrize("news", ["runs w-1 0", "ready w-1", "boots w-1", "lost w-9", "gone w-9"])
def test_old_news_and_strangers_change_nothing(news: str) -> None:
    running().run(f"10 {news} ->")


def test_fault_while_an_attempt_starts_is_another_incident() -> None:
    script = running()
    script.run("""
        10 failed w-1 0     -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0    ->
        10.1 ready w-1 0    -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
        10.2 runs w-0 1     ->
        10.3 failed w-1 1   -> stop w-0 1, stop w-1 1, status Faulted 2, event Faulted,
            incident 1 failed again, incident 2 open
    """)
    assert script.incidents[1].outcome == "failed again"
    assert script.incidents[2].outcome == ""
    assert script.status.restart_count == 2


def test_default_budget_ends_a_script_that_fails_at_once_and_shows_its_last_lines() -> None:
    script = running()
    for attempt in range(3):
        restart(script, 10.0 + attempt, attempt)
    script.run("""
        20 failed w-1 3 lines=Traceback|ValueError:x -> stop w-0 3, stop w-1 3, status Faulted 3,
            event Faulted, incident 3 failed again, incident 4 open
        20.1 ready w-0 3 ->
        20.2 ready w-1 3 -> status Failed 3, event Failed, incident 4 RetriesExhausted, delete w-0,
            delete w-1
    """)
    assert script.condition.reason == "RetriesExhausted"
    assert "ValueError:x" in script.condition.message
    assert script.incidents[4].remedy is Remedy.FAIL
    assert script.incidents[4].outcome == "RetriesExhausted"


def test_budget_is_full_again_in_the_next_period() -> None:
    script = running(policy=RunPolicy(restart_policy=RestartPolicy(3600, 3, 0)))
    for attempt in range(9):
        restart(script, 10.0 + 1500 * attempt, attempt)
    assert script.job.attempt == 9
    assert script.status.restart_status is not None
    assert script.status.restart_status.current_eval_period == 3


def test_retry_count_bounds_all_restarts() -> None:
    script = running(policy=RunPolicy(job_max_retry_count=1))
    restart(script, 10, 0)
    script.run("99999 failed w-1 1")
    assert script.incidents[2].remedy is Remedy.FAIL


def test_full_job_restart_replaces_every_pod() -> None:
    policy = RunPolicy(restart_policy=RestartPolicy(1000, 1, 1, 1))
    script = running(policy=policy)
    restart(script, 10, 0)
    script.run("""
        20 failed w-1 1   -> stop w-0 1, stop w-1 1, delete w-0, delete w-1, status Faulted 2,
            event Faulted, incident 1 failed again, incident 2 open
        20.1 ready w-0 1  ->
        20.2 gone w-0     -> create w-0 avoid=n1
        20.2 gone w-1     -> create w-1 avoid=n1, incident 2 open
        22 pod w-0 uid=w-0.1 node=n3
        22 pod w-1 uid=w-1.1 node=n4
        23 ready w-0 agent=c -> status Faulted 2
        23 ready w-1 agent=d -> start w-0.1 2 rank=0, start w-1.1 2 rank=1, status Faulted 2,
            incident 2 open
    """)
    assert script.status.latest_faulty is not None
    assert script.status.latest_faulty.restart_type == "JLR"


def test_node_that_is_found_lost_during_a_full_restart_joins_its_incident() -> None:
    policy = RunPolicy(restart_policy=RestartPolicy(1000, 1, 1, 1))
    script = running(policy=policy)
    restart(script, 10, 0)
    script.run("""
        20 failed w-1 1 kind=PeerLost -> stop w-0 1, stop w-1 1, delete w-0, delete w-1,
            status Faulted 2, event Faulted, incident 1 failed again, incident 2 open
        21 lost w-0
        21.5 gone w-1      -> create w-1 avoid=n1
        22 node n0 not-ready -> stop w-0 1, delete w-0, fence n0, status Faulted 2, incident 2 open
    """)
    assert script.incidents[2].culprit.fault == "NodeLost"
    assert script.incidents[2].culprit.node == "n0"
    assert {signal.fault for signal in script.incidents[2].signals} == {"PeerLost", "NodeLost"}


def test_workers_that_do_not_end_have_their_pod_replaced() -> None:
    running().run("""
        10 failed w-1 0     -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-1 0    ->
        69 stopping w-0 0   -> stop w-0 0 keep, status Faulted 1
        70 tick             -> stop w-0 0 keep, delete w-0, status Faulted 1, incident 1 open
    """)


def test_start_that_is_not_answered_is_a_fault() -> None:
    script = Script()
    script.up("ready")
    script.run("""
        1.5 runs w-0 0 ->
        60 tick        -> start w-1 0 rank=1
        61 tick        -> start w-1 0 rank=1, stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
    """)
    assert script.incidents[1].culprit.fault == "StartTimeout"


def test_all_of_a_completed_rank_runs_again_when_another_fails() -> None:
    running().run("""
        10 completed w-0 0 ->
        11 failed w-1 0    -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        11.1 ready w-0 0   ->
        11.1 ready w-1 0   -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_loss_of_a_pod_that_has_completed_is_no_fault() -> None:
    running().run("""
        10 completed w-0 0 ->
        11 lost w-0        ->
        12 gone w-0        -> create w-0
        13 completed w-1 0 -> status Completed 0, event Completed, delete w-1
    """)


def test_restart_on_request_costs_no_budget_and_is_followed_once() -> None:
    script = running(policy=RunPolicy(job_max_retry_count=1))
    script.run("""
        10 job restart=9  -> stop w-0 0, stop w-1 0, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0  ->
        10.1 ready w-1 0  -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
        10.2 runs w-0 1
        10.2 runs w-1 1
        11 job restart=9  ->
    """)
    restart(script, 20, 1)
    assert script.incidents[2].remedy is Remedy.PROCESS
    assert script.status.restart_count == 2


def test_pod_that_fails_before_it_trains_uses_the_budget() -> None:
    script = Script(spec(1))
    script.run("0 job\n0 synced")
    for number in range(4):
        script.run(f"""
            {number + 1} pod w-0 uid=w-0.{number} node=n0
            {number + 1}.1 pod w-0 uid=w-0.{number} phase=Failed why=Error
            {number + 1}.2 gone w-0
        """)
    assert script.condition.type == "Failed"
    assert script.condition.reason == "RetriesExhausted"


def test_attempt_that_agents_have_heard_of_from_others_is_skipped() -> None:
    running().run("""
        10 failed w-1 0   -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-1 4  -> stop w-0 4, status Faulted 5, ledger
        10.2 ready w-0 4  -> start w-0 5 rank=0, start w-1 5 rank=1, status Faulted 5,
            incident 1 open
    """)


def test_spare_that_is_lost_is_replaced_without_a_fault() -> None:
    script = running(2, 1)
    script.run("""
        10 gone w-2 -> create w-2
        11 pod w-2 uid=w-2.1 node=n2 ->
        12 ready w-2 agent=b ->
        13 failed w-1 0 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
    """)
    assert len(script.incidents) == 1


def test_pod_that_avoids_a_node_that_is_well_again_is_made_anew() -> None:
    running().run("""
        10 lost w-1            -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0       ->
        10.2 node n1 fenced    -> prove n1 w-1, delete w-1, status Faulted 1, incident 1 open
        10.25 proven w-1       -> delete w-1 force, incident 1 open
        10.3 gone w-1          -> create w-1 avoid=n1
        10.4 pod w-1 uid=w-1.1 ->
        20 node n1 ready       ->
        40.3 tick              -> delete w-1.1
        41 gone w-1            -> create w-1
    """)


def test_node_that_is_found_dead_after_its_peers_complained_is_the_culprit() -> None:
    script = running(2, 1)
    script.run("""
        10 failed w-0 0 kind=PeerLost -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
        10.1 ready w-0 0              ->
        10.5 lost w-1                 -> status Faulted 1, incident 1 open
        10.6 node n1 fenced           -> prove n1 w-1, delete w-1, status Faulted 1,
            incident 1 open
        10.7 proven w-1               -> start w-0 1 rank=0, start w-2 1 rank=1, delete w-1 force,
            status Faulted 1, incident 1 open
    """)
    assert script.incidents[1].culprit.pod == "j-w-1"
    assert script.incidents[1].remedy is Remedy.POD


def test_pod_that_fails_while_its_attempt_is_stopped_belongs_to_the_same_incident() -> None:
    script = running()
    script.run("""
        10 failed w-1 0         -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1,
            event Faulted, incident 1 open
        10.1 pod w-0 phase=Failed -> delete w-0, status Faulted 1, incident 1 open
    """)
    assert script.job.attempt == 1
    assert script.incidents[1].reason == "lost j-w-0; restart 1 of 3 without progress"


def test_agent_that_comes_back_with_the_same_words_lets_the_job_go_on() -> None:
    running().run("""
        10 failed w-1 0   -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-1 0  ->
        10.2 lost w-1     ->
        10.3 ready w-0 0  -> incident 1 open
        10.4 ready w-1 0  -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_new_pod_on_a_node_that_was_away_is_not_taken_for_dead() -> None:
    running().run("""
        10 node-gone n1              -> prove n1 w-1
        10.05 proven w-1             -> stop w-0 0 keep, delete w-1 force, status Faulted 1,
            event NodeFault, incident 1 open
        10.1 gone w-1                -> create w-1
        10.2 pod w-1 uid=w-1.1 node=n1 ->
        10.3 node n1 ready           ->
    """)


LATE_ON_A_FENCED_NODE = """
    10 gone w-1                  -> stop w-0 0 keep, create w-1, status Faulted 1, event Faulted,
        incident 1 open
    10.1 ready w-0 0             -> incident 1 open
    10.2 node n7 fenced          ->
    10.3 pod w-1 uid=w-1.1 node=n7 -> prove n7 w-1.1, delete w-1.1
"""


@pytest.mark.parametrize("late", ["node n1 fenced", "node-gone n1"])
def test_late_news_of_a_fence_is_no_proof_for_a_pod_placed_after_it(late: str) -> None:
    script = running()
    script.run(f"""
        10 gone w-1                    -> stop w-0 0 keep, create w-1, status Faulted 1,
            event Faulted, incident 1 open
        10.1 ready w-0 0               -> incident 1 open
        10.2 pod w-1 uid=w-1.1 node=n1 ->
        10.3 ready w-1 agent=b         -> start w-0 1 rank=0, start w-1.1 1 rank=1,
            status Faulted 1, incident 1 open
        10.4 runs w-0 1                ->
        10.5 runs w-1 1 agent=b        -> status Running 1, event Running, incident 1 open
        11 {late}                      -> prove n1 w-1.1
        15.9 tick                      ->
        16 tick                        -> prove n1 w-1.1
        16.1 node n1 ready             ->
        22 tick                        ->
        30 lost w-1                    -> stop w-0 1, stop w-1.1 1, status Faulted 2, event Faulted,
            incident 1 failed again, incident 2 open
        30.1 ready w-0 1               ->
    """)
    assert script.job.state.gang.unclear.keys() == {"w-1.1"}


def test_pod_seen_late_on_a_fenced_node_is_forced_once_the_fence_is_proven() -> None:
    running().run(f"""
        {LATE_ON_A_FENCED_NODE}
        10.4 proven w-1              -> delete w-1.1 force
        10.5 proven w-1              ->
    """)


def test_pod_on_a_node_that_is_back_unseen_is_never_forced() -> None:
    running().run(f"""
        {LATE_ON_A_FENCED_NODE}
        10.4 pod w-1 uid=w-1.1 deleting ->
        15.3 tick                    -> prove n7 w-1.1, status Faulted 1
        70.3 tick                    -> prove n7 w-1.1
        70.4 node n7 ready           ->
        75.4 tick                    ->
    """)


def test_agent_found_restarted_while_its_peers_complain_is_the_culprit() -> None:
    script = running()
    script.run("""
        10 failed w-0 0 kind=PeerLost
        10.1 ready w-1 agent=b -> stop w-1 0 keep, status Faulted 1, incident 1 open
    """)
    assert script.incidents[1].culprit.fault == "AgentLost"


@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        ("ValueError: bad batch", ("Traceback ...", "ValueError: bad batch"), ""),
        (
            "exit code 2",
            ("usage: train.py", "error: no --lr\n", " "),
            "; last output: error: no --lr",
        ),
        ("exit code 2", ("x" * 500,), f"; last output: {'x' * 200}"),
        ("killed by SIGKILL", (), ""),
    ],
)
def test_a_condition_tells_of_the_evidence_only_the_last_line(
    text: str, lines: tuple[str, ...], expected: str
) -> None:
    culprit = Signal(1.0, "ExitCode", text, pod="w-0", rank=0, evidence=lines)
    incident = Incident(1, 0, culprit, (culprit,), Remedy.PROCESS, "it is well", 1.0)
    first = f"rank 0, pod w-0: ExitCode: {text}; process: it is well"
    assert story(incident) == first + expected


def test_a_condition_does_not_take_a_stack_for_words() -> None:
    stack = ("get (queue.py:9)", "<module> (train.py:40)")
    silent = Signal(1.0, "Stalled", "no rank got on", evidence=stack)
    found = Incident(1, 0, silent, (silent,), Remedy.PROCESS, "it is well", 1.0, examined_at=2.0)
    assert "it said" not in story(found)
    told = replace(silent, evidence=(*stack, "last output: epoch 3"))
    assert story(replace(found, culprit=told)).endswith("; last output: epoch 3")
