"""Jobs of Ray that break their log rules: what is stopped, and when they are submitted again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.test_ray_resume import (
    BOTH,
    HEAD,
    JOB,
    JOB_WELL,
    NODES,
    PODS,
    STATE,
    WELL,
    Effects,
    after,
    decided,
    decided_after,
    deletions,
    with_node,
    without_head,
    written,
)
from unbroken.core.auto_resume import (
    EXHAUSTED,
    RESTARTING,
    STUCK_SECONDS,
    WINDOW_SECONDS,
    Record,
    Say,
)
from unbroken.core.losses import closed
from unbroken.core.ray_resume import (
    NOT_RESUMED,
    RESUMED,
    DashboardAnswer,
    RayPicture,
    RayResume,
    RayState,
    StopHung,
    Submission,
    SubmitAgain,
    SuspendRayCluster,
    WriteRayRecord,
)

CAUSE = "is hung: no match of log rule Steps for 60 s; last line: step 41"
NEXT_ID = "raysubmit_1-attempt-1"
OTHER = Submission("raysubmit_2", "{}")
HUNG = replace(WELL, hung={JOB.id: CAUSE})
RAYJOB_HUNG = replace(JOB_WELL, hung={"count-x": CAUSE})
ENDED = DashboardAnswer(HEAD, frozenset({JOB.id}))


def stopping(seen: RayPicture = HUNG) -> RayPicture:
    """The picture once the decision about a job that hangs is written."""
    return after(decided(seen), seen)


def said(effects: Effects) -> list[str]:
    """The reasons of the events."""
    return [one.reason for one in effects if isinstance(one, Say)]


def test_a_job_of_a_raycluster_that_hangs_is_stopped_and_all_pods_stay() -> None:
    write, say = decided(HUNG)
    assert isinstance(write, WriteRayRecord)
    assert write.state == replace(STATE, hung=(JOB.id,), attempt=1)
    assert (write.record.count, write.record.pods) == (1, frozenset())
    (loss,) = write.record.losses
    assert loss.culprit == f"job {JOB.id}"
    assert loss.fault == f"job {JOB.id} {CAUSE}"
    assert loss.remedy == "stops 1 job and submits it again"
    assert isinstance(say, Say)
    assert say.reason == "RayCluster" + RESTARTING
    assert CAUSE in say.message
    seen = after([write], HUNG)
    machine = RayResume()
    assert machine.step(seen, 200.0) == [StopHung(HEAD, JOB, NEXT_ID)]
    assert machine.deadline() is not None


def test_it_is_submitted_again_once_it_has_ended_and_then_runs_again() -> None:
    seen, machine = stopping(), RayResume()
    ended = replace(seen, answer=ENDED)
    assert machine.step(ended, 200.0) == [SubmitAgain(HEAD, JOB, NEXT_ID, 1)]
    again = Submission(NEXT_ID, JOB.request)
    there = replace(seen, answer=DashboardAnswer(HEAD, frozenset({JOB.id, NEXT_ID}), (again,)))
    write, say = machine.step(there, 201.0)
    record = replace(seen.record, losses=closed(seen.record.losses, 201.0))
    state = RayState("ray", "c0", HEAD, attempt=1, jobs=(again,))
    assert write == WriteRayRecord(record, state, seen.version)
    assert record.losses[-1].ran == 201.0
    assert isinstance(say, Say)
    assert say.reason == "RayCluster" + RESUMED
    assert machine.step(replace(there, state=state, record=record), 202.0) == []


@BOTH
def test_a_job_that_goes_on_within_the_window_is_left_alone(well: RayPicture) -> None:
    machine = RayResume()
    assert machine.step(replace(well, hung={JOB.id: CAUSE}), 100.0) == []
    assert machine.step(well, 101.0) == []
    assert machine.step(replace(well, hung={JOB.id: CAUSE}), 100.0 + WINDOW_SECONDS) == []


def test_jobs_that_do_not_hang_are_neither_stopped_nor_submitted() -> None:
    state = replace(STATE, jobs=(JOB, OTHER))
    both = DashboardAnswer(HEAD, frozenset({JOB.id, OTHER.id}), (JOB, OTHER))
    seen = stopping(replace(HUNG, state=state, answer=both))
    assert seen.state.jobs == (JOB, OTHER)
    assert RayResume().step(seen, 200.0) == [StopHung(HEAD, JOB, NEXT_ID)]
    # The other one hangs, too, but one after the other is restarted.
    later = replace(seen, hung={JOB.id: CAUSE, OTHER.id: CAUSE})
    assert RayResume().step(later, 200.0) == [StopHung(HEAD, JOB, NEXT_ID)]


def test_two_jobs_that_hang_at_once_are_one_restart() -> None:
    state = replace(STATE, jobs=(JOB, OTHER))
    both = DashboardAnswer(HEAD, frozenset({JOB.id, OTHER.id}), (JOB, OTHER))
    hung = {JOB.id: CAUSE, OTHER.id: CAUSE}
    write = written(decided(replace(HUNG, state=state, answer=both, hung=hung)))
    assert write.record.count == 1
    assert write.record.losses[-1].remedy == "stops 2 jobs and submits them again"
    assert write.state.hung == (JOB.id, OTHER.id)


def test_a_job_that_ended_well_meanwhile_is_not_run_again() -> None:
    seen = stopping()
    done = replace(seen, answer=replace(ENDED, succeeded=frozenset({JOB.id})))
    (write,) = RayResume().step(done, 200.0)
    assert isinstance(write, WriteRayRecord)
    assert (write.state.hung, write.state.jobs) == ((), ())


def test_a_job_whose_code_is_lost_is_told_and_not_restarted_for_ever() -> None:
    seen = stopping()
    answer = replace(HUNG.answer or ENDED, impossible={NEXT_ID: "its code was lost"})
    lost = replace(seen, answer=answer)
    effects = RayResume().step(lost, 200.0)
    assert said(effects) == [NOT_RESUMED]
    settled = replace(lost, state=replace(STATE, attempt=1))
    machine = RayResume()
    later = [machine.step(settled, 300.0 + second) for second in range(4)]
    assert not any(isinstance(one, WriteRayRecord) for found in later for one in found)


def test_a_job_that_does_not_end_takes_its_head_with_it() -> None:
    seen = stopping()
    assert seen.record.at is not None
    late = seen.record.at + STUCK_SECONDS
    machine = RayResume()
    machine.step(seen, late - 1.0)
    deadline = machine.deadline()
    assert deadline is not None
    assert deadline <= late
    write = written(decided_of(seen, late))
    assert write.record.count == 2
    assert write.record.pods == {pod.uid for pod in PODS}
    assert write.state == replace(STATE, is_lost=True, attempt=2)
    assert f"does not end job {JOB.id}" in write.record.fault


def decided_of(seen: RayPicture, now: float) -> Effects:
    """The decision of a machine that stops jobs meanwhile."""
    machine = RayResume()
    machine.step(seen, now)
    effects = machine.step(seen, now + WINDOW_SECONDS)
    return [one for one in effects if not isinstance(one, StopHung)]


def test_the_loss_of_the_head_meanwhile_submits_the_job_once_to_the_next_one() -> None:
    seen = stopping()
    lost = without_head(seen)
    write = written(decided_after(lost, 300.0))
    assert write.state == replace(STATE, is_lost=True, attempt=2)
    assert write.state.jobs == (JOB,)


def test_a_lost_worker_and_a_job_that_hangs_are_one_restart() -> None:
    write = written(decided(with_node("n1", HUNG, is_fenced=True)))
    assert write.record.pods == {"w0"}
    assert write.state.hung == (JOB.id,)
    remedy = "stops 1 job and submits it again; deletes 1 of 3 pods"
    assert write.record.losses[-1].remedy == remedy


def test_a_loss_is_open_until_the_job_runs_again_also_if_all_pods_do() -> None:
    seen = stopping()
    effects = RayResume().step(replace(seen, answer=None), 200.0)
    assert effects == []


def test_a_rayjob_that_hangs_begins_again_on_a_new_raycluster() -> None:
    write = written(decided(RAYJOB_HUNG))
    assert write.attempt == 1
    assert write.state.is_lost
    assert write.record.pods == {pod.uid for pod in PODS}
    assert write.record.fault == f"job count-x {CAUSE}"
    assert write.record.losses[-1].remedy == "deletes 3 of 3 pods"
    seen = stopping(RAYJOB_HUNG)
    effects = RayResume().step(seen, 200.0)
    assert SuspendRayCluster("ray", "c0") in effects
    assert set(deletions(effects)) == {pod.uid for pod in PODS}


@BOTH
def test_no_retry_left_means_that_a_job_that_hangs_stays(well: RayPicture) -> None:
    seen = replace(well, record=Record(count=2), hung={JOB.id: CAUSE})
    effects = decided(seen)
    assert said(effects) == [EXHAUSTED]
    assert not deletions(effects)


@pytest.mark.parametrize(
    "seen",
    [
        replace(HUNG, hung={"raysubmit_9": CAUSE}),
        replace(HUNG, is_over=True),
        replace(HUNG, heads={"h1": replace(HEAD, uid="h1")}, ready=frozenset({"h1"})),
        replace(RAYJOB_HUNG, state=RayState("ray", "c0")),
    ],
    ids=["not kept", "over", "another head", "not recorded"],
)
def test_only_jobs_on_record_of_the_present_head_are_stopped(seen: RayPicture) -> None:
    pods = (replace(PODS[0], uid=next(iter(seen.heads))), *PODS[1:])
    machine = RayResume()
    found = [machine.step(replace(seen, pods=pods, nodes=NODES), now) for now in (100.0, 103.0)]
    assert not any(isinstance(one, StopHung) for effects in found for one in effects)
    for effects in found:
        for one in effects:
            assert not isinstance(one, WriteRayRecord) or "hung" not in one.record.fault
