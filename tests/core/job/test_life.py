"""Suspending, deadlines, clean-up, expiry and what cannot be created."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.events import RecordEvent, StartWorkers, WriteLedger
from unbroken.core.job.life import FIRST_PORT, PORTS
from unbroken.spec.job.types import CleanPodPolicy, RunPolicy
from unbroken.spec.keys import ConditionType


def test_job_that_begins_suspended_creates_nothing_until_it_is_resumed() -> None:
    script = Script(spec(1))
    script.run("""
        0 job suspend=yes ->
        0 synced          -> status Suspended 0, event JobInitiallySuspended
        9 job suspend=no  -> create w-0, status Created 0, event Resumed
    """)
    assert script.status.start_time == 9


def test_suspended_job_stops_gracefully_and_starts_the_same_attempt_on_new_pods() -> None:
    script = Script()
    script.up()
    script.run("""
        10 job suspend=yes    -> stop w-0 0, stop w-1 0
        10.1 completed w-0 0  ->
        10.2 ready w-0 0      ->
        10.3 ready w-1 0      -> delete w-0, delete w-1, status Suspended 0, event JobSuspended,
            ledger
        10.4 job suspend=no   ->
        10.5 gone w-0         ->
        10.6 gone w-1         -> create w-0, create w-1, status Created 0, event Resumed
        10.7 pod w-0 uid=w-0.1 node=n0
        10.7 pod w-1 uid=w-1.1 node=n0
        10.8 ready w-0 agent=c
        10.9 ready w-1 agent=d -> start w-0.1 0 rank=0, start w-1.1 0 rank=1, status PodsRunning 0
    """)
    stops = [e.command for e in script.effects if type(e).__name__ == "StopWorkers"]
    assert all(command.is_graceful for command in stops)


def test_the_time_before_a_suspension_is_kept_once_over_operators() -> None:
    script = Script()
    script.up()
    script.run("8 runs w-0 0 output=7\n9 runs w-1 0 output=6\n10 job suspend=yes")
    script.run("10.2 ready w-0 0\n10.3 ready w-1 0")
    kept = script.job.state.ledger
    assert (kept.active_seconds, kept.startup_seconds) == (pytest.approx(10.3), 7)
    assert kept.progress_at is None
    written = [e.ledger for e in script.effects if isinstance(e, WriteLedger)]
    assert written[-1] == kept

    successor = script.successor(20)
    successor.run("20 job\n20 synced\n21 tick")
    assert not [e for e in successor.effects if isinstance(e, WriteLedger)]


def test_suspension_does_not_wait_for_ever() -> None:
    script = Script()
    script.up()
    script.run("10 job suspend=yes\n11.5 ready w-0 0\n11.6 lost w-1")
    assert script.job.deadline() is not None
    script.run("""
        70 tick -> stop w-1 0, delete w-0, delete w-1, status Suspended 0, event JobSuspended,
            ledger
    """)


@pytest.mark.parametrize(
    ("policy", "at", "reason"),
    [
        (RunPolicy(active_deadline_seconds=50), 50, "DeadlineExceeded"),
        (RunPolicy(startup_deadline_seconds=30), 30, "StartupDeadlineExceeded"),
    ],
)
def test_deadlines_end_a_job_that_does_not_start(policy: RunPolicy, at: float, reason: str) -> None:
    script = Script(spec(1, policy=policy))
    script.run("0 job\n0 synced\n1 pod w-0 node=n0 why=ImagePullBackOff")
    script.run(f"{at - 1} tick ->")
    script.run(f"{at} tick -> status Failed 0, event Failed, delete w-0")
    assert script.condition.reason == reason
    assert "ImagePullBackOff" in script.condition.message


def test_why_a_pod_does_not_come_up_is_said_once_in_an_event_and_once_at_the_end() -> None:
    script = Script(spec(1, policy=RunPolicy(startup_deadline_seconds=30)))
    script.run("0 job\n0 synced\n1 pod w-0 why=Unschedulable says=0/2-nodes")
    *_, told = [e for e in script.effects if isinstance(e, RecordEvent)]
    assert told.reason == "Unschedulable"
    assert told.message.startswith("pod j-w-0: Unschedulable: 0/2-nodes; make room")
    assert script.condition.message.startswith("the job is created; it waits: pod j-w-0: Unsch")
    script.run("30 tick -> status Failed 0, event Failed, delete w-0")
    assert "; pod j-w-0: Unschedulable: 0/2-nodes; " in script.condition.message


def test_startup_deadline_is_over_once_the_job_has_run() -> None:
    script = Script(spec(1, policy=RunPolicy(startup_deadline_seconds=30)))
    script.up()
    script.run("""
        100 tick ->
        101 failed w-0 0 -> stop w-0 0 keep, status Faulted 1, event Faulted, incident 1 open
    """)


def test_fault_deadline_ends_a_recovery_that_takes_too_long() -> None:
    script = Script(spec(2, policy=RunPolicy(fault_deadline_seconds=30)))
    script.up()
    script.run("10 gone w-1\n10.1 ready w-0 0\n10.2 pod w-1 uid=w-1.1\n39 tick -> status Faulted 1")
    script.run("""
        40 tick -> status Failed 1, event Failed, incident 1 FaultDeadlineExceeded, delete w-0,
            delete w-1.1
    """)


def test_active_deadline_stops_what_runs_before_the_job_fails() -> None:
    script = Script(spec(1, policy=RunPolicy(active_deadline_seconds=50)))
    script.up()
    script.run("""
        50 tick         -> stop w-0 0
        50.1 ready w-0 0 -> status Failed 0, event Failed, delete w-0
    """)


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        (CleanPodPolicy.ALL, ", delete w-0, delete w-1, delete w-2"),
        (CleanPodPolicy.ONLY_COMPLETE, ", delete w-0, delete w-1, delete w-2"),
        (CleanPodPolicy.NONE, ""),
    ],
)
def test_clean_up_after_completion(policy: CleanPodPolicy, deleted: str) -> None:
    script = Script(spec(2, 1, RunPolicy(clean_pod_policy=policy)))
    script.up()
    script.run("10 completed w-0 0")
    script.run(f"10 completed w-1 0 -> status Completed 0, event Completed{deleted}")


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        (CleanPodPolicy.ALL, ", delete w-0, delete w-1, delete w-2"),
        (CleanPodPolicy.ONLY_COMPLETE, ", delete w-2"),
        (CleanPodPolicy.NONE, ""),
    ],
)
def test_clean_up_after_failure(policy: CleanPodPolicy, deleted: str) -> None:
    script = Script(spec(2, 1, RunPolicy(clean_pod_policy=policy, job_max_retry_count=0)))
    script.up()
    script.run("10 failed w-0 0\n10.1 ready w-0 0")
    script.run(f"""
        10.2 ready w-1 0 -> status Failed 0, event Failed, incident 1 RetriesExhausted{deleted}
    """)


def test_pod_that_may_still_run_something_is_deleted_whatever_the_policy() -> None:
    policy = RunPolicy(clean_pod_policy=CleanPodPolicy.NONE, job_max_retry_count=0)
    script = Script(spec(2, 0, policy))
    script.up()
    script.run("10 failed w-0 0\n10.1 ready w-0 0\n10.2 lost w-1")
    script.run("""
        70 tick -> stop w-1 0, status Failed 0, event Failed, incident 1 RetriesExhausted,
            delete w-1
    """)


def test_ended_job_is_deleted_when_its_time_is_over() -> None:
    script = Script(spec(1, policy=RunPolicy(ttl_seconds_after_finished=100)))
    script.up()
    script.run("""
        10 completed w-0 0 -> status Completed 0, event Completed, delete w-0
        11 gone w-0        ->
    """)
    assert script.job.deadline() == 110
    script.run("""
        110 tick         -> delete-job
        111 tick         ->
        140 tick         -> delete-job
        141 job deleting ->
        200 tick         ->
    """)
    assert script.job.deadline() is None


@pytest.mark.parametrize("seconds", [-1, 0])
def test_job_without_expiry_is_kept(seconds: int) -> None:
    script = Script(spec(1, policy=RunPolicy(ttl_seconds_after_finished=seconds)))
    script.up()
    script.run("10 completed w-0 0\n11 gone w-0")
    assert script.job.deadline() is None


def test_deleted_job_orders_nothing() -> None:
    script = Script()
    script.up()
    script.run("""
        10 job deleting  ->
        11 failed w-0 0  ->
        12 gone w-1      ->
    """)


def test_pod_that_can_never_be_created_fails_the_job() -> None:
    script = Script()
    script.run("0 job\n0 synced")
    script.run("1 refused w-0 why=Forbidden:quota -> status Created 0, event PodRefused")
    script.run("5 tick -> create w-0, create w-1")
    script.run("6 refused w-0 final why=Invalid:image -> status Failed 0, event Failed")
    assert script.condition.reason == "PodRefused"
    assert "Invalid:image" in script.condition.message


def test_a_pod_that_the_job_can_do_without_fails_nothing_when_it_is_refused() -> None:
    script = Script(spec(2, spares=1))
    script.run("0 job\n0 synced\n0 pod w-0 node=n0\n0 pod w-1 node=n1")
    script.run("""
        1 refused w-2 final why=Invalid:quota-of-pods -> status Created 0, event PodRefused
    """)
    script.run("1 ready w-0\n1 ready w-1\n3.1 tick\n4 runs w-0 0 rank=0\n4 runs w-1 0 rank=1")
    script.run("5 refused w-2 final why=Invalid:quota-of-pods -> create w-2, event PodRefused")
    assert script.condition.type == ConditionType.RUNNING.value


def test_job_without_replicas_fails_with_the_reason() -> None:
    script = Script(spec(0))
    script.run("0 job\n0 synced -> status Failed 0, event Created, event Failed")
    assert script.condition.reason == "NoReplicas"


def test_changed_replicas_are_answered_with_a_warning() -> None:
    script = Script()
    script.up()
    script.spec = replace(script.spec, replica_specs=spec(5).replica_specs)
    script.run("10 job -> event SpecChanged")
    assert script.job.state.nnodes == 2


def test_raised_deadline_takes_effect_at_once() -> None:
    script = Script(spec(1, policy=RunPolicy(active_deadline_seconds=50)))
    script.up()
    script.spec = spec(1, policy=RunPolicy(active_deadline_seconds=500))
    script.run("10 job ->\n60 tick ->")


def test_first_start_waits_a_moment_for_the_spares() -> None:
    script = Script(spec(1, 1))
    script.run("0 job\n0 synced\n0 node n0 ready topology=b\n0 node n1 ready topology=a")
    script.run("""
        1 pod w-0 node=n0
        1 pod w-1 node=n1
        2 ready w-0 ->
        3 ready w-1 -> ledger awaited, start w-1 0 rank=0, status PodsRunning 0
    """)


def test_first_start_does_not_wait_for_spares_that_do_not_come() -> None:
    script = Script(spec(1, 1))
    script.run("0 job\n0 synced\n1 pod w-0 node=n0\n2 ready w-0 ->")
    assert script.job.deadline() == 4
    script.run("4 tick -> ledger awaited, start w-0 0 rank=0, status PodsRunning 0")


def test_port_is_waited_for_and_never_used_twice() -> None:
    script = Script(spec(1))
    script.up()
    first = script.status.master_port
    script.run("10 failed w-0 0\n11 ready w-0 0")
    assert script.status.master_port != first


def test_created_stays_true_and_gives_the_age() -> None:
    script = Script(spec(1))
    script.up()
    created = script.status.conditions[0]
    assert (created.type, created.status, created.last_transition_time) == ("Created", "True", 0)
    true = [c.type for c in script.status.conditions if c.status == "True"]
    assert true == ["Created", ConditionType.RUNNING.value]


def test_ready_counts_the_pods_that_are_ready_or_train() -> None:
    script = Script()
    script.up()

    def ready() -> str:
        found = (c.message for c in script.status.conditions if c.type == "PodsRunning")
        return next(found)

    assert ready() == "2/2"
    script.run("10 lost w-1\n10.1 ready w-0 0")
    assert ready() == "0/2"
    script.run("12 tick -> stop w-1 0 keep, status Faulted 1")
    assert ready() == "1/2"
    script.run("12.1 tick")
    script.run("13 gone w-1\n13.1 pod w-1 uid=w-1.1 node=n0\n13.2 ready w-1 agent=c")
    assert ready() == "2/2"
    script.run("20 job suspend=yes\n20.1 ready w-0 1\n20.2 ready w-1 1")
    assert script.condition.type == "Suspended"
    assert ready() == "0/2"


def test_when_every_port_was_used_the_first_ones_are_used_again() -> None:
    script = Script()
    ports = (29_000, *range(FIRST_PORT, FIRST_PORT + PORTS))
    script.job._life.masters |= {("10.0.0.0", port) for port in ports}
    script.up()
    [port] = {e.command.master_port for e in script.effects if isinstance(e, StartWorkers)}
    assert FIRST_PORT <= port < FIRST_PORT + PORTS
