"""Why a pod does not run, from what the API says of it."""

from __future__ import annotations

from typing import Any

import pytest
from lightkube.resources.core_v1 import Pod

from unbroken.operator.jobs.views import Trouble, newest_warning, trouble_of

Object = dict[str, Any]
ENDED = {"exitCode": 2, "reason": "Error", "message": "starting\n\x1b[31mbad option\x1b[0m\n"}
LINES = ("starting", "bad option")


def status(name: str, restarts: int, last: Object | None = None, **state: Object) -> Object:
    """One container's status."""
    base = {"image": "", "imageID": "", "ready": False, "restartCount": restarts, "name": name}
    return {**base, "state": state, "lastState": {"terminated": last} if last else {}}


def trouble(**parts: Any) -> Trouble:
    """Return the trouble of a pod with an init container, a sidecar and two containers."""
    spec = {
        "initContainers": [{"name": "prep"}, {"name": "mesh", "restartPolicy": "Always"}],
        "containers": [{"name": "logs"}, {"name": "pytorch"}],
    }
    return trouble_of(Pod.from_dict({"metadata": {"name": "p"}, "spec": spec, "status": parts}))


def waiting(reason: str, message: str = "") -> Object:
    """A container that waits."""
    return {"reason": reason, "message": message}


@pytest.mark.parametrize(
    ("one", "reason", "said", "ends"),
    [
        (status("pytorch", 0, terminated=ENDED), "Error", "ended with exit code 2", 1),
        (
            status("pytorch", 0, ENDED, waiting=waiting("CrashLoopBackOff")),
            "CrashLoopBackOff",
            "ended with exit code 2",
            1,
        ),
        (
            status("pytorch", 4, ENDED, waiting=waiting("CrashLoopBackOff")),
            "CrashLoopBackOff",
            "has ended 5 times, last with exit code 2",
            5,
        ),
        (
            status("pytorch", 4, ENDED, running={}),
            "CrashLoopBackOff",
            "has ended 4 times, last with exit code 2",
            0,
        ),
        (
            status("pytorch", 1, terminated={**ENDED, "exitCode": 137, "reason": "OOMKilled"}),
            "CrashLoopBackOff",
            "has ended 2 times, last with exit code 137 (OOMKilled)",
            2,
        ),
        (
            status("logs", 8, ENDED, waiting=waiting("CrashLoopBackOff")),
            "CrashLoopBackOff",
            "has ended 9 times, last with exit code 2",
            0,
        ),
    ],
)
def test_containers_that_end(one: Object, reason: str, said: str, ends: int) -> None:
    found = trouble(containerStatuses=[one])
    expected = Trouble(reason, f"container {one['name']} {said}", LINES, ends)
    assert found == expected


def test_containers_before_the_agents() -> None:
    loop = status("prep", 2, ENDED, waiting=waiting("CrashLoopBackOff"))
    assert trouble(initContainerStatuses=[loop]).ends == 3
    done = status("prep", 2, ENDED, terminated={"exitCode": 0, "reason": "Completed"})
    assert trouble(initContainerStatuses=[done]) == Trouble()
    mesh = status("mesh", 2, ENDED, waiting=waiting("CrashLoopBackOff"))
    found = trouble(initContainerStatuses=[done, mesh])
    assert (found.reason, found.ends) == ("CrashLoopBackOff", 0)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "x"'),
        ("CreateContainerConfigError", 'configmap "absent" not found'),
        ("InvalidImageName", ""),
    ],
)
def test_containers_that_cannot_start(reason: str, message: str) -> None:
    found = trouble(containerStatuses=[status("pytorch", 0, waiting=waiting(reason, message))])
    assert found == Trouble(reason, f"container pytorch: {message}" if message else "")


def test_what_the_scheduler_says() -> None:
    said = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available."
    no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    found = trouble(conditions=[no])
    assert found == Trouble("Unschedulable", "0/2 nodes are available: 2 Insufficient cpu.")


def test_what_a_node_says_of_a_pod_is_its_newest_event_beyond_the_status() -> None:
    def event(reason: str, at: str | None, micro: str | None = None) -> Object:
        return {"reason": reason, "message": at or micro, "lastTimestamp": at, "eventTime": micro}

    early, late = "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"
    told = [event("FailedMount", late), event("FailedAttachVolume", early)]
    assert newest_warning([*told, event("FailedScheduling", "2027-01-01")]) == ("FailedMount", late)
    micro = event("FailedCreatePodSandBox", None, "2026-01-01T00:00:10.000000Z")
    assert newest_warning([*told, micro, {}]) == ("FailedCreatePodSandBox", micro["message"])
    assert newest_warning([event("BackOff", late)]) is None


def test_a_pod_that_starts_has_none() -> None:
    parts = [status("logs", 0, running={}), status("pytorch", 0, waiting=waiting(""))]
    creating = [status("pytorch", 0, waiting=waiting("ContainerCreating"))]
    assert trouble() == trouble(containerStatuses=parts) == Trouble()
    assert trouble(containerStatuses=creating) == Trouble()
