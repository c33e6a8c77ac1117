"""Meaning of a Workload for its job, and the reaction of the job's machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, running, spec
from unbroken.core.job.events import CreatePod, DeletePod, JobSeen, StopWorkers, Synced
from unbroken.core.job.kueue import (
    Admission,
    Ask,
    Domain,
    GiveBack,
    Hold,
    Move,
    Placement,
    QueuedJob,
    Report,
    Withdraw,
    Workload,
    WorkloadCondition,
    decide_gate,
    with_conditions,
)
from unbroken.spec.keys import ConditionType

ADMISSION = Admission("wl", {"w": Placement()})
JOB = QueuedJob("team-a", "s1")
RUNS = replace(JOB, condition=ConditionType.RUNNING, is_idle=False)
YES = WorkloadCondition(True, "R", "text")
PENDING = Workload("wl", "team-a", "s1")
ADMITTED = replace(
    PENDING,
    conditions={
        "QuotaReserved": YES,
        "Admitted": YES,
        "PodsReady": WorkloadCondition(True, "Started"),
    },
    has_admission=True,
    admission=ADMISSION,
)


def with_said(workload: Workload, **conditions: WorkloadCondition) -> Workload:
    """Return the Workload with more conditions."""
    return replace(workload, conditions={**workload.conditions, **conditions})


def test_a_job_waits_until_its_workload_is_admitted() -> None:
    asked = decide_gate(JOB, None, None)
    assert isinstance(asked.gate, Hold)
    assert asked.order == Ask()
    waits = decide_gate(JOB, PENDING, asked.gate)
    assert waits.order is None
    why = WorkloadCondition(False, "Pending", "insufficient quota for nvidia.com/gpu")
    told = decide_gate(JOB, with_said(PENDING, QuotaReserved=why), waits.gate)
    assert told.gate == Hold("Queued", "queue team-a: insufficient quota for nvidia.com/gpu")
    checks = decide_gate(JOB, with_said(PENDING, QuotaReserved=YES), waits.gate)
    assert isinstance(checks.gate, Hold)
    assert "admission checks" in checks.gate.message
    assert decide_gate(JOB, ADMITTED, waits.gate).gate == ADMISSION


def test_quota_is_given_back_only_when_nothing_runs() -> None:
    evicted = with_said(
        ADMITTED, Evicted=WorkloadCondition(True, "Preempted", "by a higher priority")
    )
    stop = decide_gate(RUNS, evicted, ADMISSION)
    assert stop.gate == Hold("Evicted", "queue team-a: Preempted: by a higher priority")
    assert stop.order is None
    idle = decide_gate(replace(RUNS, is_idle=True), evicted, stop.gate)
    assert idle.order == GiveBack("Preempted", "by a higher priority", is_requeued=True)
    after = with_conditions(evicted.conditions, idle.order)
    assert not after["QuotaReserved"].is_true
    assert not after["Admitted"].is_true
    assert not after["PodsReady"].is_true
    assert after["Requeued"].is_true
    given = replace(evicted, conditions=after, has_admission=False)
    assert decide_gate(replace(RUNS, is_idle=True), given, stop.gate).order is None


@pytest.mark.parametrize(
    ("reason", "waits_until", "is_requeued"),
    [
        ("NodeFailures", False, True),
        ("PodsReadyTimeout", False, False),
        ("Deactivated", False, False),
        ("ClusterQueueStopped", False, False),
        ("AdmissionCheck", False, True),
        ("AdmissionCheck", True, False),
    ],
)
def test_only_some_evictions_queue_the_job_again_by_themselves(
    reason: str, waits_until: bool, is_requeued: bool
) -> None:
    evicted = replace(
        with_said(ADMITTED, Evicted=WorkloadCondition(True, reason)), waits_until=waits_until
    )
    order = decide_gate(replace(RUNS, is_idle=True), evicted, None).order
    assert order == GiveBack(reason, "", is_requeued)


def test_a_deactivated_job_says_how_it_is_queued_again() -> None:
    gate = decide_gate(JOB, replace(PENDING, is_active=False), None).gate
    assert isinstance(gate, Hold)
    assert gate.reason == "Deactivated"
    assert "kubectl patch workload wl" in gate.message
    # One that runs stops even before Kueue has evicted it.
    assert isinstance(decide_gate(RUNS, replace(ADMITTED, is_active=False), ADMISSION).gate, Hold)


def test_a_workload_that_was_deleted_stops_the_job_only_once_there_is_a_new_one() -> None:
    gone = decide_gate(RUNS, None, ADMISSION)
    assert gone.gate == ADMISSION
    assert gone.order == Ask()
    assert isinstance(decide_gate(RUNS, PENDING, ADMISSION).gate, Hold)


def test_a_job_that_ran_before_there_was_a_queue_goes_on() -> None:
    before = replace(RUNS, has_own_pods=True)
    assert decide_gate(before, None, None).gate is None
    assert decide_gate(before, None, None).order is None


def test_a_job_that_its_user_suspends_leaves_the_queue_when_nothing_runs() -> None:
    suspended = replace(RUNS, is_suspended=True)
    assert decide_gate(suspended, ADMITTED, ADMISSION).order is None
    left = decide_gate(replace(suspended, is_idle=True), ADMITTED, None)
    assert left.gate is None
    assert isinstance(left.order, Withdraw)


def test_a_changed_job_is_queued_anew() -> None:
    changed = decide_gate(replace(RUNS, shape="s2"), ADMITTED, ADMISSION)
    assert isinstance(changed.gate, Hold)
    assert changed.order is None
    assert isinstance(decide_gate(replace(JOB, shape="s2"), ADMITTED, None).order, Withdraw)
    assert decide_gate(replace(JOB, queue="team-b"), PENDING, None).order == Move()


@pytest.mark.parametrize(
    ("standing", "reason"),
    [(ConditionType.COMPLETED, "Succeeded"), (ConditionType.FAILED, "Failed")],
)
def test_the_end_of_a_job_is_reported_once(standing: ConditionType, reason: str) -> None:
    ended = replace(JOB, condition=standing, message="all done")
    assert decide_gate(ended, ADMITTED, None).order == Report("Finished", True, reason, "all done")
    assert decide_gate(ended, with_said(ADMITTED, Finished=YES), None).order is None


def test_readiness_is_told_as_kueue_knows_it() -> None:
    new = replace(ADMITTED, conditions={"QuotaReserved": YES, "Admitted": YES})
    told = []
    for is_ready in (False, False, True, True, False, True):
        job = replace(RUNS, are_pods_ready=is_ready)
        order = decide_gate(job, new, ADMISSION).order
        if isinstance(order, Report):
            told.append((order.is_true, order.reason))
            new = replace(new, conditions=with_conditions(new.conditions, order))
    assert told == [
        (False, "WaitForStart"),
        (True, "Started"),
        (False, "WaitForRecovery"),
        (True, "Recovered"),
    ]


def test_a_flavor_that_is_missing_holds_a_new_job_and_stops_none() -> None:
    missing = replace(ADMITTED, admission="there is no ResourceFlavor h100")
    held = decide_gate(JOB, missing, None)
    assert held.gate == Hold("Queued", "queue team-a: there is no ResourceFlavor h100")
    assert decide_gate(RUNS, missing, ADMISSION).gate == ADMISSION


def test_pods_fill_the_domains_in_the_order_of_their_indexes() -> None:
    domains = (Domain({"rack": "a"}, 2), Domain({"rack": "b"}, 1))
    placement = Placement({"gpu": "h100"}, domains=domains)
    found = [placement.of_pod(index).get("rack") for index in range(4)]
    assert found == ["a", "a", "b", None]
    assert placement.of_pod(3) == {"gpu": "h100"}


# --- the job's machine


def test_a_new_operator_keeps_an_evicted_job_stopped() -> None:
    script = running()
    script.run("10 job hold=Evicted:preempted")
    new = script.successor(20)
    new.run("20 job hold=Evicted:preempted")
    new.give(Synced(), 20.0)
    new.run("21 runs w-0 0 -> stop w-0 in 0 gently\n21 runs w-1 0 -> stop w-1 in 0 gently")
    effects = new.effects
    assert {e.command.is_graceful for e in effects if isinstance(e, StopWorkers)} == {True}
    assert not any(isinstance(e, CreatePod) for e in effects)


def test_pods_that_wait_for_a_node_follow_a_new_place() -> None:
    def gate(rack: str) -> Admission:
        return Admission("wl", {"w": Placement(domains=(Domain({"rack": rack}, 1),))})

    script = Script(spec(1))
    script.give(JobSeen(script.spec, gate=gate("a")), 0)
    script.run("0 synced -> create w-0, status Created 0, event Created\n0 pod w-0")
    assert not any(
        isinstance(e, DeletePod) for e in script.give(JobSeen(script.spec, gate=gate("a")), 1)
    )
    moved = script.give(JobSeen(script.spec, gate=gate("b")), 2)
    assert [e.name for e in moved if isinstance(e, DeletePod)] == ["j-w-0"]
