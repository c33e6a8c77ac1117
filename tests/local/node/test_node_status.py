"""Statuses as kubelet writes them, for every stage of a pod."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.node.node_samples import START, Script, container, exit_of, pod
from unbroken.core.tick import Tick
from unbroken.local.node.pods.events import Deleted, Ended, Refused, Rejected, Started
from unbroken.local.node.pods.lifecycle import Addresses, pod_status, timestamp
from unbroken.local.node.pods.pod_worker import changes

HERE = Addresses("127.64.0.1", "127.64.0.2")


def status_of(script: Script) -> dict[str, Any]:
    """The status now."""
    return pod_status(script.machine, HERE, script.now)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """(status, reason) by type."""
    return {c["type"]: (c["status"], c.get("reason", "")) for c in status["conditions"]}


def test_a_pod_that_is_being_made_is_pending() -> None:
    script = Script(pod(container("a"), container("b")))
    script.step(Tick())
    status = pod_status(script.machine, Addresses("127.64.0.1"), script.now)
    assert status["phase"] == "Pending"
    waiting = [c["state"]["waiting"]["reason"] for c in status["containerStatuses"]]
    assert waiting == ["ContainerCreating", "ContainerCreating"]
    assert conditions(status) == {
        "PodReadyToStartContainers": ("False", ""),
        "Initialized": ("True", ""),
        "Ready": ("False", "ContainersNotReady"),
        "ContainersReady": ("False", "ContainersNotReady"),
        "PodScheduled": ("True", ""),
    }
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["message"] == "containers with unready status: [a b]"
    assert "podIP" not in status


def test_a_running_pod_is_ready() -> None:
    script = Script(pod())
    script.prepare()
    script.start("main", after=1)
    status = status_of(script)
    assert status["phase"] == "Running"
    assert {state for state, _ in conditions(status).values()} == {"True"}
    assert status["podIPs"] == [{"ip": "127.64.0.2"}]
    (main,) = status["containerStatuses"]
    assert main == {
        "name": "main",
        "state": {"running": {"startedAt": timestamp(START + 1)}},
        "lastState": {},
        "ready": True,
        "restartCount": 0,
        "image": "any",
        "imageID": "",
        "started": True,
        "containerID": "unbroken://main-0",
    }


def test_while_init_containers_run_the_others_are_initializing() -> None:
    script = Script(pod(initContainers=[container("i1"), container("i2")]))
    script.prepare()
    script.start("i1")
    status = status_of(script)
    assert status["phase"] == "Pending"
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    assert conditions(status)["Initialized"] == ("False", "ContainersNotInitialized")
    initialized = next(c for c in status["conditions"] if c["type"] == "Initialized")
    assert initialized["message"] == "containers with incomplete status: [i1 i2]"


def test_back_off_is_shown_with_the_last_end() -> None:
    script = Script(pod())
    script.prepare()
    script.start("main")
    script.end("main", 3)
    script.start("main", 1)
    script.end("main", 4, 1)
    (main,) = status_of(script)["containerStatuses"]
    assert main["state"]["waiting"] == {
        "reason": "CrashLoopBackOff",
        "message": "back-off 10s restarting failed container=main pod=p_ns(u1)",
    }
    assert main["lastState"]["terminated"]["exitCode"] == 4
    assert main["lastState"]["terminated"]["reason"] == "Error"
    assert main["restartCount"] == 1
    assert not main["ready"]
    script.step(Tick(), after=10)
    script.start("main", 2)
    (main,) = status_of(script)["containerStatuses"]
    assert main["lastState"]["terminated"]["exitCode"] == 4
    assert "running" in main["state"]
    assert status_of(script)["phase"] == "Running"


@pytest.mark.parametrize(
    ("code", "reason", "phase", "shown"),
    [
        (0, "", "Succeeded", "Completed"),
        (1, "", "Failed", "Error"),
        (137, "OOMKilled", "Failed", "OOMKilled"),
        (128, "StartError", "Failed", "StartError"),
    ],
)
def test_a_finished_pod(code: int, reason: str, phase: str, shown: str) -> None:
    script = Script(pod(restartPolicy="Never"))
    script.prepare()
    script.start("main")
    ended = exit_of(code, START + 9, reason, "last words")
    script.step(Ended("main", 0, "main-0", ended), after=9)
    status = status_of(script)
    assert status["phase"] == phase
    terminated = status["containerStatuses"][0]["state"]["terminated"]
    assert terminated == {
        "exitCode": code,
        "reason": shown,
        "message": "last words",
        "startedAt": timestamp(START + 8),
        "finishedAt": timestamp(START + 9),
        "containerID": "unbroken://main-0",
    }
    reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"
    assert conditions(status)["Ready"] == ("False", reason)
    assert conditions(status)["PodReadyToStartContainers"][0] == "False"


def test_the_reason_why_a_container_is_not_made_is_shown() -> None:
    script = Script(pod())
    script.prepare()
    script.step(Refused("main", 0, "CreateContainerConfigError", 'secret "s" not found'))
    (main,) = status_of(script)["containerStatuses"]
    assert main["state"]["waiting"] == {
        "reason": "CreateContainerConfigError",
        "message": 'secret "s" not found',
    }


def test_a_rejected_pod_says_why() -> None:
    script = Script(pod())
    script.step(Rejected("OutOfcpu", "too much"))
    assert status_of(script) == {
        "phase": "Failed",
        "reason": "OutOfcpu",
        "message": "too much",
        "startTime": timestamp(START),
    }


def test_a_container_that_nobody_saw_end_is_unknown_when_the_pod_has() -> None:
    script = Script(pod(container("a"), container("b")))
    script.prepare()
    script.start("a")
    script.step(Refused("b", 0, "CreateContainerError", "no"))
    script.step(Deleted(30))
    script.end("a", 0)
    status = status_of(script)
    assert status["containerStatuses"][1]["state"]["terminated"]["exitCode"] == 137
    assert status["phase"] == "Failed"


@pytest.mark.parametrize(
    ("gate", "expected"), [("True", "True"), ("False", "False"), (None, "False")]
)
def test_readiness_gates(gate: str | None, expected: str) -> None:
    known = [{"type": "example.com/gate", "status": gate}] if gate else []
    gated = pod(readinessGates=[{"conditionType": "example.com/gate"}])
    script = Script({**gated, "status": {"conditions": known}})
    script.prepare()
    script.start("main")
    found = conditions(status_of(script))
    assert found["ContainersReady"] == ("True", "")
    assert found["Ready"][0] == expected
    if expected == "False":
        assert found["Ready"][1] == "ReadinessGatesNotReady"


def test_transition_times_change_with_the_status_only() -> None:
    script = Script(pod())
    script.prepare()
    before = status_of(script)
    script.machine.set_pod({**script.machine.pod, "status": before})
    script.start("main", after=50)
    times = {c["type"]: c["lastTransitionTime"] for c in status_of(script)["conditions"]}
    assert times["Ready"] == timestamp(START + 50)
    assert times["Initialized"] == timestamp(START)


def test_the_patch_holds_what_changed_and_nothing_else() -> None:
    script = Script(pod())
    script.prepare()
    before = status_of(script)
    assert changes(before, before) == {}
    script.machine.set_pod({**script.machine.pod, "status": before})
    script.start("main", after=50)
    patch = changes(before, status_of(script))
    assert set(patch) == {"phase", "containerStatuses", "conditions"}
    assert {c["type"] for c in patch["conditions"]} == {"Ready", "ContainersReady"}
    ready = next(c for c in patch["conditions"] if c["type"] == "Ready")
    assert ready["reason"] is None, "a merge must remove the old reason"


def test_an_address_that_was_another_runners_is_taken_out_by_name() -> None:
    patch = changes({"podIPs": [{"ip": "1.1.1.1"}]}, {"podIPs": [{"ip": "2.2.2.2"}]})
    assert patch == {"podIPs": [{"ip": "2.2.2.2"}, {"$patch": "delete", "ip": "1.1.1.1"}]}


def test_the_restart_that_an_earlier_runner_counted_is_kept() -> None:
    script = Script(pod())
    history = [("main-3", exit_of(9, START - 100))]
    script.machine.restore("main", history, Started("main", 4, "main-4", START - 90), START)
    (main,) = status_of(script)["containerStatuses"]
    assert main["restartCount"] == 4
    assert main["lastState"]["terminated"]["exitCode"] == 9
    assert main["state"]["running"]["startedAt"] == timestamp(START - 90)
