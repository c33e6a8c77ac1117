"""Jobs of an image that has torch and knows nothing of unbroken: the operator adds the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.realnodes import images
from tests.realnodes.jobs import GLOO, Job, assert_new_process_after_a_kill
from tests.realnodes.plane import RealCluster, operator

NODES, IMAGES = 2, True
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]
LIBRARY = "/unbroken/agent/library/unbroken/"
SCRIPT = f"""
import tempfile
from unbroken import worker
assert worker.__file__.startswith("{LIBRARY}"), worker.__file__
with tempfile.NamedTemporaryFile():
    pass
{GLOO}"""
NOBODY = {
    "runAsUser": 10001,
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture(scope="module")
def running(cluster: RealCluster) -> Iterator[None]:
    with operator(cluster, "--agent-image", images.NAMES["operator"]):
        yield


def seconds(state: dict[str, Any]) -> float:
    """Return the whole seconds for which a container ran."""
    began, ended = (datetime.fromisoformat(state[key]) for key in ("startedAt", "finishedAt"))
    return (ended - began).total_seconds()


@pytest.mark.usefixtures("running")
def test_a_job_of_torchrun_in_an_image_of_a_user_survives_a_killed_worker(
    cluster: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    """Run a container as nobody, which cannot write to its own file system."""
    job = Job(
        cluster,
        "injected",
        script=SCRIPT,
        image=images.NAMES["torch"],
        command=("/opt/unbroken/bin/torchrun",),
        security=NOBODY,
        annotations={"unbroken.dev/agent": "injected"},
    )
    job.apply()
    assert_new_process_after_a_kill(job)
    copies = [pod["status"]["initContainerStatuses"][0]["state"] for pod in job.pods()]
    assert len(copies) == NODES
    found = [seconds(state["terminated"]) for state in copies]
    record_property("seconds of the init container", found)
    job.finish()
