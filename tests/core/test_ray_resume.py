"""Deletions of a RayCluster's pods, restarts of its jobs, and actions that never happen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from unbroken.core.auto_resume import (
    EXHAUSTED,
    INVALID,
    RESTARTING,
    STUCK,
    STUCK_SECONDS,
    WINDOW_SECONDS,
    AskForFence,
    DeleteResumedPod,
    PodNode,
    PodState,
    Readiness,
    Record,
    ResumeEffect,
    Say,
    WriteResumeRecord,
)
from unbroken.core.losses import closed
from unbroken.core.ray_resume import (
    NOT_RESUMED,
    RESUMED,
    BeginAgain,
    DashboardAnswer,
    Head,
    RayEffect,
    RayPicture,
    RayResume,
    RayState,
    Submission,
    SubmitAgain,
    SuspendRayCluster,
    WriteRayRecord,
    next_id,
    unsupported,
)
from unbroken.spec.auto_resume import Resume

Effects = list[ResumeEffect | RayEffect]
HEAD = Head("ray-head", "h0")
NEXT = Head("ray-head", "h1")
JOB = Submission("raysubmit_1", '{"entrypoint":"python train.py"}')
PODS = (
    PodState("ray-head", "h0", "n0", "Running"),
    PodState("ray-w-0", "w0", "n1", "Running"),
    PodState("ray-w-1", "w1", "n2", "Running"),
)
NODES = {f"n{index}": PodNode(f"n{index}") for index in range(4)}
STATE = RayState("ray", "c0", HEAD, jobs=(JOB,))
WELL = RayPicture(
    *("RayCluster", "ray", "7", Resume(True, 2)),
    pods=PODS,
    nodes=NODES,
    cluster="ray",
    cluster_uid="c0",
    state=STATE,
    heads={"h0": HEAD},
    ready=frozenset({"h0"}),
    answer=DashboardAnswer(HEAD, frozenset({JOB.id}), (JOB,)),
)
JOB_WELL = replace(
    WELL,
    kind="RayJob",
    name="count",
    is_rayjob=True,
    answer=None,
    state=replace(STATE, jobs=()),
)
BOTH = pytest.mark.parametrize("well", [WELL, JOB_WELL], ids=["raycluster", "rayjob"])


def with_node(name: str, seen: RayPicture = WELL, **changes: Any) -> RayPicture:
    """Return the picture with another state of a node."""
    return replace(seen, nodes={**NODES, name: replace(NODES[name], **changes)})


def without_head(seen: RayPicture = WELL) -> RayPicture:
    """Return the picture once the head is gone."""
    return replace(seen, pods=PODS[1:], heads={}, ready=frozenset(), answer=None)


def with_new_head(seen: RayPicture = WELL, *others: PodState) -> RayPicture:
    """Return the picture once a new head is ready, with other pods."""
    pod = PodState("ray-head", "h1", "n3", "Running")
    found = replace(seen, pods=(pod, *others), heads={"h1": NEXT}, ready=frozenset({"h1"}))
    return replace(found, answer=DashboardAnswer(NEXT))


def decided(seen: RayPicture, now: float = 100.0) -> Effects:
    """Return the effects for a picture that does not change during the window."""
    machine = RayResume()
    assert machine.step(seen, now) == []
    assert machine.deadline() == now + WINDOW_SECONDS
    return machine.step(seen, now + WINDOW_SECONDS)


def written(effects: Effects) -> WriteRayRecord:
    """Return the decision, which comes first."""
    write = effects[0]
    assert isinstance(write, WriteRayRecord)
    return write


def after(effects: Effects, seen: RayPicture) -> RayPicture:
    """Return the picture once the decision is written."""
    write = written(effects)
    assert write.version == seen.version
    return replace(seen, record=write.record, state=write.state, version=seen.version + "1")


def deletions(effects: Iterable[object]) -> dict[str, bool]:
    """Return for each deleted pod, by uid, whether it is deleted by force."""
    return {one.uid: one.force for one in effects if isinstance(one, DeleteResumedPod)}


@BOTH
def test_nothing_is_done_while_all_is_well(well: RayPicture) -> None:
    machine = RayResume()
    assert [machine.step(well, 100.0 + second) for second in range(4)] == [[]] * 4
    assert machine.deadline() is None


# --- without annotations

BY_DEFAULT = replace(
    WELL, resume=Resume(True, 2, is_default=True), record=Record(default=2), state=RayState()
)


def test_jobs_of_a_raycluster_without_annotations_are_neither_kept_nor_submitted() -> None:
    assert RayResume().step(BY_DEFAULT, 100.0) == []
    effects = decided(with_node("n0", BY_DEFAULT, trouble="label Pending"))
    assert written(effects).record.pods == {"h0", "w0", "w1"}
    assert written(effects).state == RayState()
    workers = (replace(PODS[1], uid="w2"), replace(PODS[2], uid="w3"))
    again = with_new_head(after(effects, BY_DEFAULT), *workers)
    (end,) = RayResume().step(again, 200.0)
    assert isinstance(end, WriteResumeRecord)
    assert end.record.losses[-1].ran == 200.0
    ended = replace(again, record=end.record)
    assert RayResume().step(ended, 201.0) == []


def test_a_worker_of_a_raycluster_without_annotations_is_deleted_alone() -> None:
    effects = decided(with_node("n1", BY_DEFAULT, readiness=Readiness.SILENT))
    assert written(effects).record.pods == {"w0"}


# --- workers


LOST_NODE = [
    {"trouble": "label Pending"},
    {"readiness": Readiness.SILENT},
    {"readiness": Readiness.NOT_READY},
    {"is_fenced": True},
]


@BOTH
@pytest.mark.parametrize("changes", LOST_NODE)
def test_only_the_workers_of_a_lost_node_are_deleted(
    well: RayPicture, changes: dict[str, Any]
) -> None:
    seen = with_node("n1", well, **changes)
    effects = decided(seen)
    write = written(effects)
    assert write.record.pods == {"w0"}
    assert write.record.count == 1
    assert write.state == well.state
    assert write.attempt is None
    say = effects[1]
    assert isinstance(say, Say)
    assert say.reason == well.kind + RESTARTING
    assert "deletes 1 of 3 pods (restart 1 of at most 2)" in say.message
    machine = RayResume()
    assert set(deletions(machine.step(after(effects, seen), 200.0))) == {"w0"}


def test_two_lost_nodes_are_one_restart_and_an_earlier_pod_stays_condemned() -> None:
    first = with_node("n1", is_fenced=True)
    seen = after(decided(first), first)
    nodes = {**(seen.nodes or {}), "n2": replace(NODES["n2"], is_fenced=True)}
    second = decided_after(replace(seen, nodes=nodes), 300.0)
    assert written(second).record.pods == {"w0", "w1"}
    assert written(second).record.count == 2


def decided_after(seen: RayPicture, now: float) -> Effects:
    """Return the decision of a machine that also repeats the orders of the decision before."""
    machine = RayResume()
    machine.step(seen, now)
    effects = machine.step(seen, now + WINDOW_SECONDS)
    return [one for one in effects if not isinstance(one, DeleteResumedPod | AskForFence)]


@pytest.mark.parametrize("changes", [{"phase": "Failed"}, {"phase": "Failed", "reason": "Evicted"}])
def test_a_worker_that_ended_is_left_to_whoever_runs_the_cluster(changes: dict[str, Any]) -> None:
    seen = replace(WELL, pods=(*PODS[:2], replace(PODS[2], **changes)))
    machine = RayResume()
    assert [machine.step(seen, 100.0 + second) for second in range(4)] == [[]] * 4


def test_a_worker_that_does_not_end_is_deleted_after_its_node_is_fenced() -> None:
    seen = replace(WELL, pods=(*PODS[:2], replace(PODS[2], ends_by=100.0 - STUCK_SECONDS)))
    found = after(decided(seen), seen)
    machine = RayResume()
    (told,) = machine.step(found, 200.0)
    assert isinstance(told, Say), "its node is ready: its pods are no reason to fence it"
    assert told.reason == STUCK
    silent = {**NODES, "n2": replace(NODES["n2"], readiness=Readiness.SILENT)}
    asked = machine.step(replace(found, nodes=silent), 200.5)
    assert asked == [AskForFence("n2", "w1", "pod ray-w-1 of RayCluster ray")]
    fenced = {**NODES, "n2": replace(NODES["n2"], is_fenced=True)}
    assert deletions(machine.step(replace(found, nodes=fenced), 201.0)) == {"w1": True}


# --- the head of a RayCluster


LOST_HEAD = [
    with_node("n0", trouble="Xid79"),
    with_node("n0", readiness=Readiness.SILENT),
    replace(WELL, pods=(replace(PODS[0], phase="Failed", reason="Evicted"), *PODS[1:])),
    replace(WELL, pods=(replace(PODS[0], phase="Unknown"), *PODS[1:])),
    replace(WELL, pods=(replace(PODS[0], ends_by=130.0), *PODS[1:])),
    without_head(),
]


@pytest.mark.parametrize("seen", LOST_HEAD, ids=range(len(LOST_HEAD)))
def test_a_lost_head_takes_all_pods_with_it(seen: RayPicture) -> None:
    write = written(decided(seen))
    assert write.record.pods == {pod.uid for pod in seen.pods}
    assert write.state == replace(STATE, is_lost=True, attempt=1)


def test_a_new_head_that_was_made_meanwhile_is_kept() -> None:
    seen = with_new_head(WELL, *PODS[1:])
    effects = decided(seen)
    assert written(effects).record.pods == {"w0", "w1"}
    assert "pod ray-head (the head) is gone" in written(effects).record.fault


def test_a_head_whose_container_was_restarted_has_lost_its_state() -> None:
    seen = replace(WELL, heads={"h0": replace(HEAD, restarts=1)})
    effects = decided(replace(seen, answer=None))
    assert written(effects).record.pods == {"w0", "w1"}
    assert "lost the state of Ray" in written(effects).record.fault


def test_a_head_without_jobs_that_was_replaced_is_no_fault() -> None:
    seen = with_new_head(replace(WELL, state=replace(STATE, jobs=())), *PODS[1:])
    effects = RayResume().step(seen, 100.0)
    assert effects == [WriteRayRecord(Record(), RayState("ray", "c0", NEXT), "7")]


def test_jobs_are_submitted_when_no_pod_of_the_old_attempt_exists() -> None:
    seen = after(decided(without_head()), without_head())
    machine = RayResume()
    late = with_new_head(seen, PODS[1])
    assert set(deletions(machine.step(late, 200.0))) == {"w0"}
    clean = with_new_head(seen)
    (submit,) = machine.step(clean, 201.0)
    assert submit == SubmitAgain(NEXT, JOB, "raysubmit_1-attempt-1", 1)
    # The head knows the job: nothing is submitted a second time.
    again = Submission("raysubmit_1-attempt-1", "{}")
    there = replace(clean, answer=DashboardAnswer(NEXT, frozenset({again.id}), (again,)))
    write, say = machine.step(there, 202.0)
    record = replace(seen.record, losses=closed(seen.record.losses, 202.0))
    assert write == WriteRayRecord(
        record, RayState("ray", "c0", NEXT, False, 1, (again,)), seen.version
    )
    assert isinstance(say, Say)
    assert say.reason == "RayCluster" + RESUMED
    last = replace(there, state=RayState("ray", "c0", NEXT, False, 1, (again,)))
    assert machine.step(last, 203.0) == []


def test_jobs_wait_for_the_answer_of_the_new_head() -> None:
    seen = after(decided(without_head()), without_head())
    for answer in (None, DashboardAnswer(HEAD, frozenset({JOB.id}), (JOB,))):
        assert RayResume().step(replace(with_new_head(seen), answer=answer), 200.0) == []
    not_ready = replace(with_new_head(seen), ready=frozenset())
    assert RayResume().step(not_ready, 200.0) == []


def test_a_job_that_cannot_be_submitted_is_told_and_the_others_go_on() -> None:
    other = Submission("raysubmit_2", "{}")
    lost = replace(without_head(), state=replace(STATE, jobs=(JOB, other)))
    seen = after(decided(lost), lost)
    ids = [next_id(one.id, 1) for one in (JOB, other)]
    answer = DashboardAnswer(NEXT, frozenset({ids[1]}), (), {ids[0]: "its code was lost"})
    effects = RayResume().step(replace(with_new_head(seen), answer=answer), 200.0)
    assert effects[0] == Say(
        NOT_RESUMED, f"RayCluster ray: job {ids[0]} is not submitted again: its code was lost"
    )
    assert isinstance(effects[1], WriteRayRecord)
    assert ids[1] in str(effects[2])


def test_many_jobs_that_cannot_be_submitted_are_told_in_one_event() -> None:
    seen, machine = replace(WELL, state=STATE), RayResume()
    many = {f"job-{number:05}": "it is one too many" for number in range(45_000)}
    answer = DashboardAnswer(HEAD, frozenset(many), (JOB,), many)
    (say,) = machine.step(replace(seen, answer=answer), 1.0)
    assert isinstance(say, Say)
    assert say.message == (
        "RayCluster ray: job job-00000 is not submitted again: it is one too many; "
        "nor are job-00001, job-00002, job-00003, job-00004 and 44995 more"
    )
    assert machine.step(replace(seen, answer=answer), 2.0) == []


def test_the_next_loss_counts_on_and_names_the_next_attempt() -> None:
    seen = after(decided(without_head()), without_head())
    again = with_new_head(seen)
    nodes = {**NODES, "n3": replace(NODES["n3"], is_fenced=True)}
    second = decided_after(replace(again, nodes=nodes), 300.0)
    write = written(second)
    assert (write.record.count, write.state.is_lost, write.state.jobs) == (2, True, (JOB,))
    assert next_id("raysubmit_1-attempt-1", 2) == "raysubmit_1-attempt-2"


def test_no_retry_left_means_that_nothing_is_done() -> None:
    spent = replace(without_head(), record=Record(count=2))
    effects = decided(spent)
    assert [type(one).__name__ for one in effects] == ["WriteResumeRecord", "Say"]
    assert isinstance(effects[1], Say)
    assert effects[1].reason == EXHAUSTED


def test_running_jobs_are_kept_and_a_head_that_says_nothing_changes_nothing() -> None:
    fresh = replace(WELL, state=RayState())
    (write,) = RayResume().step(fresh, 100.0)
    assert write == WriteRayRecord(Record(), STATE, "7")
    assert RayResume().step(replace(WELL, answer=None), 100.0) == []
    ended = replace(WELL, answer=DashboardAnswer(HEAD, frozenset({JOB.id})))
    (write,) = RayResume().step(ended, 100.0)
    assert isinstance(write, WriteRayRecord)
    assert write.state.jobs == ()


def test_a_suspended_cluster_forgets_its_jobs() -> None:
    seen = replace(without_head(), is_over=True, is_suspension_asked=True)
    assert RayResume().step(seen, 100.0) == [WriteRayRecord(Record(), RayState(), "7")]
    assert RayResume().step(replace(seen, state=RayState()), 100.0) == []


# --- the head of a RayJob


@pytest.mark.parametrize(
    "seen",
    [
        with_node("n0", JOB_WELL, readiness=Readiness.SILENT),
        without_head(JOB_WELL),
        with_new_head(JOB_WELL, *PODS[1:]),
    ],
    ids=["silent", "gone", "made anew"],
)
def test_a_rayjob_that_lost_its_head_loses_all_pods(seen: RayPicture) -> None:
    write = written(decided(seen))
    assert write.record.pods == {pod.uid for pod in seen.pods}
    assert write.attempt == 1
    assert write.state.is_lost


def test_a_rayjob_begins_again_when_its_suspended_cluster_has_no_pod() -> None:
    lost = with_node("n0", JOB_WELL, readiness=Readiness.SILENT)
    seen = after(decided(lost), lost)
    machine = RayResume()
    first = machine.step(seen, 200.0)
    assert SuspendRayCluster("ray", "c0") in first
    assert AskForFence("n0", "h0", "pod ray-head of RayJob count") in first
    asleep = replace(seen, is_suspension_asked=True)
    # Pods that were made after the decision go, too, and without a restart more.
    extra = PodState("ray-w-9", "w9", "n1", "Running")
    assert deletions(machine.step(replace(asleep, pods=(extra,)), 201.0)) == {"w9": False}
    empty = replace(asleep, pods=(), heads={}, ready=frozenset())
    assert machine.step(empty, 202.0) == []
    assert machine.deadline() is not None
    done = replace(empty, is_cluster_suspended=True)
    assert machine.step(done, 203.0) == [BeginAgain("ray", seen.version)]
    gone = replace(empty, cluster_uid="", is_suspension_asked=False)
    assert machine.step(gone, 204.0) == [BeginAgain("ray", seen.version)]


def test_the_next_attempt_of_a_rayjob_is_noted_once_it_runs() -> None:
    lost = without_head(JOB_WELL)
    seen = after(decided(lost), lost)
    other = replace(with_new_head(seen), cluster="ray-2", cluster_uid="c1")
    assert RayResume().step(replace(other, is_running=False), 300.0) == []
    write, say = RayResume().step(other, 300.0)
    state = RayState("ray-2", "c1", NEXT, attempt=1)
    record = replace(seen.record, losses=closed(seen.record.losses, 300.0))
    assert write == WriteRayRecord(record, state, seen.version)
    assert isinstance(say, Say)
    assert say.reason == "RayJob" + RESUMED
    assert RayResume().step(replace(other, state=state), 301.0) == []


def test_a_rayjob_between_two_clusters_has_no_lost_head() -> None:
    for cluster in ("", "ray-2"):
        seen = replace(without_head(JOB_WELL), pods=(), cluster=cluster, cluster_uid="")
        machine = RayResume()
        assert [machine.step(seen, 100.0 + second) for second in range(4)] == [[]] * 4


def test_a_submission_mode_without_a_head_of_its_own_is_refused() -> None:
    assert unsupported("K8sJobMode", False) == ()
    assert "clusterSelector" in unsupported("", True)[0]
    (problem,) = unsupported("SidecarMode", False)
    assert "K8sJobMode or HTTPMode" in problem
    seen = replace(without_head(JOB_WELL), problems=(problem,), is_over=True)
    assert RayResume().step(seen, 100.0) == [Say(INVALID, problem)]


@pytest.mark.parametrize(
    ("id", "base"),
    [
        ("raysubmit_x", "raysubmit_x"),
        ("raysubmit_x-attempt-3", "raysubmit_x"),
        ("../../etc", None),
        ("a" * 101, None),
        ("\ud800", None),
    ],
)
def test_ids_name_the_attempt_and_are_no_paths(id: str, base: str | None) -> None:
    found = next_id(id, 4)
    assert found.endswith("-attempt-4")
    assert found == next_id(id, 4)
    if base is not None:
        assert found == f"{base}-attempt-4"
    else:
        assert found.startswith("job-")
        assert "/" not in found
