"""A pod's life by kubelet's rules, on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.node.node_samples import START, Script, container, created, pod
from unbroken.core.tick import Tick
from unbroken.local.node.pods.events import (
    Create,
    Deleted,
    Effect,
    Ended,
    Exit,
    Finished,
    Hook,
    HookAnswered,
    HookKind,
    Kill,
    Prepare,
    Prepared,
    PrepareFailed,
    Probe,
    ProbeAnswered,
    ProbeKind,
    Refused,
    Rejected,
    Started,
    Terminate,
)
from unbroken.local.node.pods.lifecycle import pod_phase


def test_containers_wait_for_volumes_and_then_start_together() -> None:
    script = Script(pod(container("a"), container("b")))
    assert script.step(Tick()) == [Prepare()]
    assert script.step(PrepareFailed('configmap "x" not found')) == []
    assert script.machine.deadline() == START + 10
    assert script.step(Tick(), after=10) == [Prepare()]
    assert script.step(Prepared()) == [Create("a", 0)]
    assert script.start("a") == [Create("b", 0)]
    assert script.reasons() == ["FailedMount", "Started"]


def test_a_missing_volume_is_told_once() -> None:
    script = Script(pod())
    script.step(Tick())
    for _ in range(3):
        script.step(PrepareFailed("same"))
        script.step(Tick(), after=10)
    assert script.reasons() == ["FailedMount"]


def test_init_containers_run_one_by_one_before_the_others() -> None:
    script = Script(pod(initContainers=[container("i1"), container("i2")]))
    assert script.prepare() == created("i1")
    assert script.start("i1") == []
    assert script.end("i1", 0) == created("i2")
    script.start("i2")
    assert script.end("i2", 0) == created("main")
    script.start("main")
    assert pod_phase(script.machine) == "Running"


def test_a_sidecar_stays_and_only_its_start_is_waited_for() -> None:
    sidecar = container(
        "side", restartPolicy="Always", startupProbe={"exec": {}, "failureThreshold": 3}
    )
    script = Script(pod(initContainers=[sidecar, container("i2")]))
    assert script.prepare() == created("side")
    assert script.start("side") == [Probe("side", 0, ProbeKind.STARTUP)]
    assert script.step(ProbeAnswered("side", 0, ProbeKind.STARTUP, is_ok=True)) == created("i2")
    script.start("i2")
    assert script.end("i2", 0) == created("main")


def test_sidecars_stop_after_the_others_the_last_first() -> None:
    sidecars = [container(name, restartPolicy="Always") for name in ("s1", "s2")]
    script = Script(pod(initContainers=sidecars, restartPolicy="Never"))
    script.prepare()
    script.start("s1")
    script.start("s2")
    script.start("main")
    assert script.end("main", 0) == [Terminate("s2", 0)]
    assert script.end("s2", 143) == [Terminate("s1", 0)]
    assert pod_phase(script.machine) == "Running"
    assert script.end("s1", 143) == [Finished()]
    assert pod_phase(script.machine) == "Succeeded", "sidecars do not count"


def test_a_sidecar_that_dies_is_restarted_whatever_the_pods_policy() -> None:
    sidecar = container("side", restartPolicy="Always")
    script = Script(pod(initContainers=[sidecar], restartPolicy="Never"))
    script.prepare()
    script.start("side")
    script.start("main")
    assert script.end("side", 1) == [Create("side", 1)]


@pytest.mark.parametrize(
    ("policy", "code", "is_restarted", "phase"),
    [
        ("Always", 0, True, "Running"),
        ("Always", 1, True, "Running"),
        ("OnFailure", 0, False, "Succeeded"),
        ("OnFailure", 1, True, "Running"),
        ("Never", 0, False, "Succeeded"),
        ("Never", 1, False, "Failed"),
    ],
)
def test_restart_policy(policy: str, code: int, is_restarted: bool, phase: str) -> None:
    script = Script(pod(restartPolicy=policy))
    script.prepare()
    script.start("main")
    expected: list[Effect] = [Create("main", 1)] if is_restarted else [Finished()]
    assert script.end("main", code) == expected
    assert pod_phase(script.machine) == phase


@pytest.mark.parametrize(
    ("policy", "expected"), [("Never", [Finished()]), ("OnFailure", [Create("i", 1)])]
)
def test_a_failed_init_container_fails_the_pod_only_where_nothing_restarts(
    policy: str, expected: list[Effect]
) -> None:
    script = Script(pod(initContainers=[container("i")], restartPolicy=policy))
    script.prepare()
    script.start("i")
    assert script.end("i", 1) == expected
    assert pod_phase(script.machine) == ("Failed" if policy == "Never" else "Pending")


def test_back_off_doubles_to_five_minutes_and_is_forgotten_after_ten() -> None:
    script = Script(pod())
    script.prepare()
    script.start("main")
    waits = []
    for attempt in range(9):
        effects = script.end("main", 1, attempt)
        ended_at = script.now
        while not effects:
            deadline = script.machine.deadline()
            assert deadline is not None
            effects = script.step(Tick(), after=deadline - script.now)
        waits.append(script.now - ended_at)
        assert effects == [Create("main", attempt + 1)]
        script.start("main", attempt + 1)
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300, 300]
    assert script.end("main", 1, 9, after=601) == [Create("main", 10)]


def test_the_next_container_waits_for_the_post_start_hook() -> None:
    first = container("a", lifecycle={"postStart": {"exec": {}}})
    script = Script(pod(first, container("b")))
    script.prepare()
    assert script.start("a") == [Hook("a", 0, HookKind.POST_START)]
    assert not script.machine.container("a").is_started
    answered = HookAnswered("a", 0, HookKind.POST_START, is_ok=True)
    assert script.step(answered) == [Create("b", 0)]


def test_a_failed_post_start_hook_stops_the_container_which_is_restarted() -> None:
    script = Script(pod(container("main", lifecycle={"postStart": {"exec": {}}})))
    script.prepare()
    script.start("main")
    failed = HookAnswered("main", 0, HookKind.POST_START, is_ok=False, message="no")
    assert script.step(failed) == [Terminate("main", 0)]
    assert script.end("main", 143) == [Create("main", 1)]
    assert "FailedPostStartHook" in script.reasons()


# --- probes


def test_startup_gates_the_other_probes() -> None:
    main = container(
        "main",
        startupProbe={"exec": {}, "periodSeconds": 5},
        livenessProbe={"exec": {}},
        readinessProbe={"exec": {}, "initialDelaySeconds": 3},
    )
    script = Script(pod(main))
    script.prepare()
    assert script.start("main") == [Probe("main", 0, ProbeKind.STARTUP)]
    assert script.step(ProbeAnswered("main", 0, ProbeKind.STARTUP, is_ok=False)) == []
    assert script.step(Tick(), after=5) == [Probe("main", 0, ProbeKind.STARTUP)]
    after = script.step(ProbeAnswered("main", 0, ProbeKind.STARTUP, is_ok=True), after=1)
    assert after == [Probe("main", 0, ProbeKind.LIVENESS), Probe("main", 0, ProbeKind.READINESS)]


def test_liveness_failures_in_a_row_stop_the_container_within_the_probes_grace() -> None:
    probe = {"exec": {}, "failureThreshold": 2, "terminationGracePeriodSeconds": 4}
    script = Script(pod(container("main", livenessProbe=probe)))
    script.prepare()
    script.start("main")
    outcomes = [False, True, False, False]
    effects: list[Effect] = []
    for is_ok in outcomes:
        assert effects == []
        effects = script.step(ProbeAnswered("main", 0, ProbeKind.LIVENESS, is_ok=is_ok))
        if is_ok is not outcomes[-1] or effects == []:
            script.step(Tick(), after=10)
    assert effects == [Terminate("main", 0)]
    assert script.step(Tick(), after=4) == [Kill("main", 0)]
    assert script.end("main", 137) == [Create("main", 1)]
    assert script.reasons().count("Unhealthy") == 3


def test_readiness_follows_its_thresholds_and_never_restarts() -> None:
    probe = {"exec": {}, "successThreshold": 2, "failureThreshold": 1}
    script = Script(pod(container("main", readinessProbe=probe)))
    script.prepare()
    script.start("main")
    seen = []
    for is_ok in (True, True, False, True, True):
        script.step(ProbeAnswered("main", 0, ProbeKind.READINESS, is_ok=is_ok))
        seen.append(script.machine.container("main").is_ready)
        assert script.step(Tick(), after=10) == [Probe("main", 0, ProbeKind.READINESS)]
    assert seen == [False, True, False, False, True]


def test_answers_about_an_earlier_run_change_nothing() -> None:
    script = Script(pod(container("main", livenessProbe={"exec": {}, "failureThreshold": 1})))
    script.prepare()
    script.start("main")
    script.end("main", 1)
    script.start("main", 1)
    assert script.step(ProbeAnswered("main", 0, ProbeKind.LIVENESS, is_ok=False)) == []


# --- the end


def test_deletion_asks_waits_for_the_grace_and_kills() -> None:
    script = Script(pod(container("a"), container("b")))
    script.prepare()
    script.start("a")
    script.start("b")
    assert script.step(Deleted(5)) == [Terminate("a", 0), Terminate("b", 0)]
    assert script.end("a", 143) == []
    assert script.machine.deadline() == script.now - 1 + 5
    assert script.step(Tick(), after=4) == [Kill("b", 0)]
    assert script.end("b", 137) == [Finished()]
    assert pod_phase(script.machine) == "Failed"


def test_deletion_said_again_with_less_grace_hurries_with_more_it_does_not_wait() -> None:
    script = Script(pod())
    script.prepare()
    script.start("main")
    script.step(Deleted(30))
    script.step(Deleted(60), after=1)
    assert script.machine.deadline() == START + 30
    script.step(Deleted(2), after=1)
    assert script.machine.deadline() == START + 4
    assert script.step(Deleted(0)) == [Kill("main", 0)]


def test_deletion_while_a_container_is_being_started_stops_it_once_it_runs() -> None:
    script = Script(pod())
    script.prepare()
    assert script.step(Deleted(30)) == []
    assert script.start("main", after=1) == [Terminate("main", 0)]
    assert script.end("main", 143) == [Finished()]


def test_deletion_before_anything_ran_finishes_at_once() -> None:
    script = Script(pod())
    script.step(Tick())
    assert script.step(Deleted(30)) == [Finished()]


def test_a_container_in_back_off_is_not_started_again_when_the_pod_is_deleted() -> None:
    script = Script(pod())
    script.prepare()
    script.start("main")
    script.end("main", 1)
    script.start("main", 1)
    script.end("main", 1, 1)
    assert script.machine.container("main").is_backing_off
    assert script.step(Deleted(30)) == [Finished()]


def test_pre_stop_counts_against_the_grace_but_leaves_two_seconds() -> None:
    script = Script(pod(container("main", lifecycle={"preStop": {"exec": {}}})))
    script.prepare()
    script.start("main")
    assert script.step(Deleted(3)) == [Hook("main", 0, HookKind.PRE_STOP)]
    answered = HookAnswered("main", 0, HookKind.PRE_STOP, is_ok=True)
    assert script.step(answered, after=2.5) == [Terminate("main", 0)]
    assert script.step(Tick(), after=1.9) == []
    assert script.step(Tick(), after=0.1) == [Kill("main", 0)]


def test_a_pre_stop_hook_that_does_not_end_is_overrun() -> None:
    script = Script(pod(container("main", lifecycle={"preStop": {"exec": {}}})))
    script.prepare()
    script.start("main")
    script.step(Deleted(3))
    assert script.step(Tick(), after=3) == [Terminate("main", 0)]
    assert script.step(Tick(), after=2) == [Kill("main", 0)]


def test_the_active_deadline_ends_the_pod_as_failed() -> None:
    script = Script(pod(activeDeadlineSeconds=60, terminationGracePeriodSeconds=5))
    script.prepare()
    script.start("main")
    assert script.machine.deadline() == START + 60
    assert script.step(Tick(), after=60) == [Terminate("main", 0)]
    assert script.end("main", 0) == [Finished()]
    assert pod_phase(script.machine) == "Failed"
    assert script.machine.end_reason == "DeadlineExceeded"


def test_a_rejected_pod_never_starts() -> None:
    script = Script(pod())
    assert script.step(Rejected("OutOfcpu", "why")) == [Finished()]
    assert pod_phase(script.machine) == "Failed"


def test_what_cannot_be_made_is_tried_again_and_told_when_the_reason_changes() -> None:
    script = Script(pod())
    script.prepare()
    for reason in ("x", "x", "y"):
        assert script.step(Refused("main", 0, "CreateContainerConfigError", reason)) == []
        assert script.step(Tick(), after=10) == [Create("main", 0)]
    assert [note.message for note in script.notes] == ["Error: x", "Error: y"]


def test_a_program_that_cannot_be_started_counts_as_an_end() -> None:
    script = Script(pod(restartPolicy="Never"))
    script.prepare()
    ended = Ended("main", 0, "id", Exit(128, "StartError", "not found", START, START))
    assert script.step(ended) == [Finished()]
    assert script.reasons() == ["Failed"]


# --- another runner takes over


def test_a_run_that_was_found_again_is_not_started_a_second_time() -> None:
    script = Script(pod(initContainers=[container("i")]))
    script.machine.restore("main", [], Started("main", 2, "id", START), START)
    assert script.step(Tick()) == [Prepare()]
    assert script.step(Prepared()) == []
    assert script.end("main", 1, 2) == [Create("main", 3)]


def test_readiness_survives_a_change_of_runner_until_the_probe_speaks() -> None:
    known: dict[str, Any] = {"containerStatuses": [{"name": "main", "ready": True}]}
    found = pod(container("main", readinessProbe={"exec": {}, "failureThreshold": 1}))
    script = Script({**found, "status": known})
    script.machine.restore("main", [], Started("main", 0, "id", START), START)
    assert script.machine.container("main").is_ready
    script.step(Tick())
    script.step(ProbeAnswered("main", 0, ProbeKind.READINESS, is_ok=False))
    assert not script.machine.container("main").is_ready
