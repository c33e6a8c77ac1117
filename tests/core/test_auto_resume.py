"""Restarts of a PyTorchJob because of its nodes, and actions that never happen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from unbroken.core.auto_resume import (
    AGAIN,
    EXHAUSTED,
    INVALID,
    NOT_READY_SECONDS,
    RESTARTING,
    STUCK,
    STUCK_SECONDS,
    WINDOW_SECONDS,
    AskForFence,
    AutoResume,
    DeleteResumedPod,
    Picture,
    PodNode,
    PodState,
    Readiness,
    Record,
    ResumeEffect,
    Say,
    WriteResumeRecord,
)
from unbroken.spec.auto_resume import Resume

PODS = (
    PodState("lm-worker-0", "u0", "n0", "Running"),
    PodState("lm-worker-1", "u1", "n1", "Running"),
)
NODES = {"n0": PodNode("n0"), "n1": PodNode("n1")}
WELL = Picture("PyTorchJob", "lm", "7", Resume(True, 2), pods=PODS, nodes=NODES)


def with_node(name: str, **changes: object) -> Picture:
    """Return a picture in which all is well but one node."""
    return replace(WELL, nodes={**NODES, name: replace(NODES[name], **changes)})  # type: ignore[arg-type]


def with_pod(**changes: object) -> Picture:
    """Return a picture in which all is well but the second pod."""
    return replace(WELL, pods=(PODS[0], replace(PODS[1], **changes)))  # type: ignore[arg-type]


def decided(seen: Picture, now: float = 100.0) -> list[ResumeEffect]:
    """Return the effects for a picture that does not change during the window."""
    machine = AutoResume()
    assert machine.step(seen, now) == []
    assert machine.deadline() == now + WINDOW_SECONDS
    return machine.step(seen, now + WINDOW_SECONDS)


def deletions(effects: Iterable[ResumeEffect]) -> list[DeleteResumedPod]:
    """Return the deletions of pods."""
    return [effect for effect in effects if isinstance(effect, DeleteResumedPod)]


LOST = [
    (with_node("n1", trouble="label Pending"), "node n1 is unhealthy (label Pending)"),
    (with_node("n1", readiness=Readiness.SILENT), "node n1 does not answer"),
    (with_node("n1", readiness=Readiness.NOT_READY), "node n1 is not ready"),
    (with_node("n1", is_fenced=True), "node n1 is out of service"),
    (replace(WELL, nodes={"n0": NODES["n0"]}), "node n1 is gone"),
    (with_pod(phase="Failed", reason="Evicted"), "pod lm-worker-1 failed (Evicted)"),
    (with_pod(phase="Failed"), "pod lm-worker-1 failed"),
    (with_pod(phase="Unknown"), "pod lm-worker-1 has an unknown phase"),
    (with_pod(ends_by=100 - STUCK_SECONDS), "pod lm-worker-1 is still terminating"),
]


@pytest.mark.parametrize(("seen", "cause"), LOST, ids=[cause for _, cause in LOST])
def test_whatever_is_lost_restarts_all_pods_together(seen: Picture, cause: str) -> None:
    write, say = decided(seen)
    assert isinstance(write, WriteResumeRecord)
    assert isinstance(say, Say)
    assert (write.version, write.record.count) == ("7", 1)
    assert write.record.pods == {"u0", "u1"}
    assert write.record.fault.startswith(cause)
    assert say.reason == "PyTorchJob" + RESTARTING
    assert f"because {cause}" in say.message
    assert "restart 1 of at most 2" in say.message


@pytest.mark.parametrize(
    "seen",
    [
        WELL,
        with_pod(phase="Succeeded", node="nowhere"),
        with_pod(phase="Failed", restarts_containers=False),
        with_pod(phase="Failed", reason="DeadlineExceeded"),
        with_pod(node=None),
        with_pod(ends_by=99.0),
        with_node("n1", readiness=Readiness.NOT_READY, not_ready_since=99.0),
        replace(LOST[0][0], is_over=True),
        replace(LOST[0][0], resume=Resume()),
    ],
)
def test_what_is_no_loss_changes_nothing(seen: Picture) -> None:
    machine = AutoResume()
    assert [machine.step(seen, 100.0 + second) for second in range(4)] == [[]] * 4


def test_a_node_that_was_not_ready_for_a_moment_is_forgiven() -> None:
    machine = AutoResume()
    seen = with_node("n1", readiness=Readiness.NOT_READY, not_ready_since=90.0)
    assert machine.step(seen, 100.0) == []
    assert machine.deadline() == 90.0 + NOT_READY_SECONDS
    assert machine.step(WELL, 101.0) == []
    assert machine.deadline() is None


def test_a_sign_that_goes_within_the_window_is_none() -> None:
    machine = AutoResume()
    assert machine.step(LOST[0][0], 100.0) == []
    assert machine.step(WELL, 101.0) == []
    assert machine.step(LOST[0][0], 103.0) == []
    assert machine.deadline() == 103.0 + WINDOW_SECONDS


def test_the_node_is_blamed_and_not_its_first_pod() -> None:
    machine = AutoResume()
    machine.step(with_pod(phase="Failed"), 100.0)
    pods = (PODS[0], replace(PODS[1], phase="Unknown"))
    seen = replace(with_node("n1", readiness=Readiness.SILENT), pods=pods)
    write, _ = machine.step(seen, 102.0)
    assert isinstance(write, WriteResumeRecord)
    assert write.record.fault == "node n1 does not answer (pods lm-worker-1)"


def recorded(seen: Picture) -> Picture:
    """Return the picture once the first restart is recorded in the job's annotations."""
    uids = frozenset(pod.uid for pod in seen.pods)
    return replace(seen, version="8", record=Record(1, "a fault", 100.0, uids))


def test_nothing_is_deleted_before_the_record_is_there() -> None:
    assert not deletions(decided(LOST[0][0]))
    orders = deletions(AutoResume().step(recorded(LOST[0][0]), 103.0))
    assert orders == [
        DeleteResumedPod("lm-worker-0", "u0", "n0"),
        DeleteResumedPod("lm-worker-1", "u1", "n1"),
    ]


def test_a_new_program_carries_on_and_counts_nothing_twice() -> None:
    seen = recorded(LOST[1][0])
    for machine in (AutoResume(), AutoResume()):
        effects = machine.step(seen, 200.0) + machine.step(seen, 210.0)
        assert not any(isinstance(effect, WriteResumeRecord | Say) for effect in effects)
        assert {order.uid for order in deletions(effects)} == {"u0", "u1"}


def test_a_pod_on_a_silent_node_goes_by_force_only_after_the_fence() -> None:
    machine = AutoResume()
    seen = recorded(with_node("n1", readiness=Readiness.SILENT))
    effects = machine.step(seen, 103.0)
    assert AskForFence("n1", "u1", "pod lm-worker-1 of PyTorchJob lm") in effects
    assert not any(order.force for order in deletions(effects))

    leaving = (replace(PODS[1], ends_by=130.0),)
    silent = replace(NODES["n1"], readiness=Readiness.SILENT)
    seen = replace(seen, pods=leaving, nodes={**NODES, "n1": silent})
    again = machine.step(seen, 300.0)
    assert again == [AskForFence("n1", "u1", "pod lm-worker-1 of PyTorchJob lm")]
    assert machine.step(seen, 300.5) == [], "each change of a pod would ask anew"

    fenced = replace(seen, nodes={**NODES, "n1": replace(silent, is_fenced=True)})
    assert machine.step(fenced, 301.0) == [DeleteResumedPod("lm-worker-1", "u1", "n1", force=True)]
    gone = replace(seen, nodes={"n0": NODES["n0"]})
    assert machine.step(gone, 302.0) == [DeleteResumedPod("lm-worker-1", "u1", "n1", force=True)]


def test_a_pod_that_does_not_end_on_a_ready_node_is_reported_once_and_nothing_is_fenced() -> None:
    seen = recorded(replace(with_pod(ends_by=120.0), pods=(replace(PODS[1], ends_by=120.0),)))
    machine = AutoResume()
    assert machine.step(seen, 130.0) == []
    (told,) = machine.step(seen, 120.0 + STUCK_SECONDS)
    assert isinstance(told, Say)
    assert told.reason == STUCK
    assert "pod lm-worker-1 still runs on node n1, which is ready" in told.message
    assert machine.step(seen, 1000.0) == []


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_has_ended_is_over_though_a_finalizer_keeps_its_object(phase: str) -> None:
    kept = with_pod(phase=phase, restarts_containers=False, ends_by=100.0 - STUCK_SECONDS)
    machine = AutoResume()
    assert [machine.step(kept, 100.0 + second) for second in range(4)] == [[]] * 4
    silent = {**NODES, "n1": replace(NODES["n1"], readiness=Readiness.SILENT)}
    effects = machine.step(replace(recorded(kept), nodes=silent), 200.0)
    assert DeleteResumedPod("lm-worker-1", "u1", "n1") in effects, "its kubelet cannot remove it"
    assert not any(isinstance(effect, AskForFence) for effect in effects)


def test_new_pods_of_a_restarted_job_are_left_alone() -> None:
    seen = replace(recorded(WELL), pods=(replace(PODS[0], uid="u2"), replace(PODS[1], uid="u3")))
    machine = AutoResume()
    assert machine.step(seen, 110.0) == []
    assert machine.deadline() is None


def test_after_the_last_restart_it_is_said_once_and_nothing_more() -> None:
    record = Record(2, "a fault", 50.0, frozenset({"old"}))
    seen = replace(LOST[0][0], record=record)
    write, say = decided(seen)
    assert isinstance(write, WriteResumeRecord)
    kept = replace(write.record, exhausted="", losses=())
    assert (kept, write.record.exhausted[:7]) == (record, "node n1")
    assert isinstance(say, Say)
    assert say.reason == EXHAUSTED
    assert "2 restarts of at most 2" in say.message
    after = replace(seen, record=write.record)
    machine = AutoResume()
    assert [machine.step(after, 200.0 + second) for second in range(5)] == [[]] * 5


def test_a_pod_that_is_put_on_the_unhealthy_node_again_is_not_moved_again() -> None:
    """Move the pod only once.

    A node that only has the label takes pods, so each retry would end there.
    """
    write, _ = decided(LOST[0][0])
    assert isinstance(write, WriteResumeRecord)
    assert write.record.nodes == {"n1"}
    new = (replace(PODS[0], uid="u2"), replace(PODS[1], uid="u3"))
    again = replace(LOST[0][0], record=write.record, pods=new)
    machine = AutoResume()
    said, closing = machine.step(again, 110.0)
    assert isinstance(said, Say)
    assert said.reason == AGAIN
    assert "lm-worker-1 on n1" in said.message
    assert isinstance(closing, WriteResumeRecord)
    again = replace(again, record=closing.record)
    assert machine.step(again, 120.0) == machine.step(again, 130.0) == []

    silent = replace(NODES["n1"], trouble="x", readiness=Readiness.SILENT)
    lost = replace(again, nodes={**NODES, "n1": silent})
    machine.step(lost, 140.0)
    assert isinstance(machine.step(lost, 142.0)[0], WriteResumeRecord), "it is lost all the same"


def test_a_node_that_was_well_in_between_counts_anew() -> None:
    record = Record(1, "a fault", 50.0, frozenset({"old"}), frozenset({"n1"}))
    machine = AutoResume()
    assert machine.step(replace(WELL, record=record), 100.0) == []
    ill = replace(LOST[0][0], record=record)
    assert machine.step(ill, 110.0) == []
    assert isinstance(machine.step(ill, 112.0)[0], WriteResumeRecord)


def test_a_raised_limit_is_taken() -> None:
    record = Record(2, "a fault", 50.0, frozenset({"old"}), exhausted="another")
    write, _ = decided(replace(LOST[0][0], record=record, resume=Resume(True, 3)))
    assert isinstance(write, WriteResumeRecord)
    assert (write.record.count, write.record.exhausted) == (3, "")


def test_problems_of_the_annotations_are_said_once() -> None:
    machine = AutoResume()
    seen = replace(WELL, resume=Resume(), problems=("annotation x needs y",))
    assert machine.step(seen, 1.0) == [Say(INVALID, "annotation x needs y")]
    assert machine.step(seen, 2.0) == []
    assert machine.step(replace(seen, problems=()), 3.0) == []
    assert machine.step(seen, 4.0) != []


BY_DEFAULT = Resume(True, 3, is_default=True)


@pytest.mark.parametrize(
    ("resume", "recorded", "written"),
    [
        (BY_DEFAULT, 0, 3),
        (BY_DEFAULT, 2, 3),
        (BY_DEFAULT, 3, None),
        (Resume(True, 2), 3, 0),
        (Resume(), 3, 0),
        (Resume(), 0, None),
    ],
)
def test_the_default_of_the_cluster_is_noted_on_the_job(
    resume: Resume, recorded: int, written: int | None
) -> None:
    seen = replace(WELL, resume=resume, record=Record(default=recorded))
    effects = AutoResume().step(seen, 100.0)
    wanted = [] if written is None else [WriteResumeRecord(Record(default=written), "7")]
    assert effects == wanted
    assert AutoResume().step(replace(seen, is_over=True), 100.0) == []


def test_a_job_by_default_is_restarted_as_often_as_the_cluster_says() -> None:
    record = Record(default=3)
    seen = replace(LOST[0][0], resume=BY_DEFAULT, record=record)
    write, say = decided(seen)
    assert isinstance(write, WriteResumeRecord)
    assert (write.record.count, write.record.default) == (1, 3)
    assert isinstance(say, Say)
    assert "restart 1 of at most 3" in say.message
    spent = replace(seen, record=replace(record, count=3))
    assert [one.reason for one in decided(spent) if isinstance(one, Say)] == [EXHAUSTED]
