"""Losses in the record of a job: culprit, remedy, and the time at which the job ran again."""

from __future__ import annotations

from dataclasses import replace

from tests.core.test_auto_resume import LOST, WELL, decided, with_node
from tests.core.test_ray_resume import JOB_WELL
from unbroken.core.auto_resume import AutoResume, Picture, Readiness, Say, WriteResumeRecord
from unbroken.core.losses import KEPT, Loss, closed, noted
from unbroken.core.ray_resume import RESUMED, RayResume, WriteRayRecord

LOSS = Loss(98.0, 100.0, "node n1", "node n1 is gone", "deletes all 2 pods", 1, 2)


def lost(seen: Picture) -> Loss:
    """The loss that is recorded about a picture that stays as it is."""
    write, *_ = decided(seen)
    assert isinstance(write, WriteResumeRecord)
    return write.record.losses[-1]


def test_a_loss_names_culprit_remedy_and_times() -> None:
    found = lost(with_node("n1", readiness=Readiness.SILENT))
    assert (found.at, found.decided, found.ran) == (100.0, 102.0, None)
    assert found.culprit == "node n1"
    assert found.fault == "node n1 does not answer (pods lm-worker-1)"
    assert (found.remedy, found.restart, found.pods) == ("deletes all 2 pods", 1, 2)
    assert found.is_open


def test_the_pod_is_the_culprit_where_no_node_is() -> None:
    culprits = {cause: lost(seen).culprit for seen, cause in LOST}
    assert culprits["pod lm-worker-1 failed (Evicted)"] == "pod lm-worker-1"
    assert culprits["node n1 is gone"] == "node n1"


def test_a_loss_without_a_retry_left_says_that_nothing_is_done() -> None:
    spent = replace(LOST[0][0], record=replace(WELL.record, count=2, losses=(LOSS,)))
    write, *_ = decided(spent)
    assert isinstance(write, WriteResumeRecord)
    before, found = write.record.losses
    assert before == LOSS
    assert (found.restart, found.is_open) == (0, False)
    assert found.remedy == "no action: 2 restarts of at most 2"


def restarted(*losses: Loss, uids: tuple[str, str] = ("u2", "u3")) -> Picture:
    """The job after its first restart, with pods of these uids."""
    record = replace(WELL.record, count=1, pods=frozenset({"u0", "u1"}), losses=losses)
    pods = tuple(replace(pod, uid=uid) for pod, uid in zip(WELL.pods, uids, strict=True))
    return replace(WELL, record=record, pods=pods)


def test_a_job_runs_again_when_as_many_new_pods_run() -> None:
    seen, machine = restarted(LOSS), AutoResume()
    starting = replace(seen, pods=(seen.pods[0], replace(seen.pods[1], phase="Pending")))
    for early in (replace(seen, pods=seen.pods[:1]), starting, restarted(LOSS, uids=("u2", "u1"))):
        assert not [one for one in machine.step(early, 110.0) if isinstance(one, WriteResumeRecord)]
    (write,) = machine.step(seen, 112.0)
    assert isinstance(write, WriteResumeRecord)
    assert write == WriteResumeRecord(replace(seen.record, losses=(replace(LOSS, ran=112.0),)), "7")
    assert write.record.losses[0].seconds == 14.0
    assert machine.step(replace(seen, record=write.record), 113.0) == []


def test_nothing_is_written_about_losses_of_a_record_that_keeps_none() -> None:
    assert AutoResume().step(restarted(), 110.0) == []


def test_a_newer_loss_leaves_the_one_before_it_open() -> None:
    silent = with_node("n1", readiness=Readiness.SILENT)
    seen = replace(restarted(LOSS), nodes=silent.nodes)
    seen = replace(seen, pods=(seen.pods[0], replace(seen.pods[1], phase="Pending")))
    write, *_ = decided(seen)
    assert isinstance(write, WriteResumeRecord)
    assert [one.restart for one in write.record.losses] == [1, 2]
    assert [one.ran for one in write.record.losses] == [None, None]


def test_only_the_latest_losses_are_kept() -> None:
    losses: tuple[Loss, ...] = ()
    for number in range(KEPT + 5):
        losses = noted(losses, replace(LOSS, restart=number))
    assert [one.restart for one in losses] == list(range(5, KEPT + 5))
    assert closed((), 1.0) == ()
    done = closed(losses, 200.0)
    assert done[:-1] == losses[:-1]
    assert closed(done, 300.0) == done


def test_a_lost_head_counts_as_running_again_only_with_its_jobs() -> None:
    lost_state = replace(JOB_WELL.state, is_lost=True, cluster="earlier", cluster_uid="gone")
    record = replace(JOB_WELL.record, count=1, losses=(replace(LOSS, pods=1),))
    waiting = replace(JOB_WELL, record=record, state=lost_state, is_running=False)
    assert RayResume().step(waiting, 110.0) == []
    write, said = RayResume().step(replace(waiting, is_running=True), 115.0)
    assert isinstance(write, WriteRayRecord)
    assert write.record.losses == (replace(LOSS, pods=1, ran=115.0),)
    assert isinstance(said, Say)
    assert said.reason == "RayJob" + RESUMED
