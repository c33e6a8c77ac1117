"""Jobs of images that know nothing of unbroken: the operator adds the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.realnodes import images
from tests.realnodes.jobs import GLOO, PLAIN, Job, assert_new_process_after_a_kill
from tests.realnodes.plane import RealCluster, operator

NODES, IMAGES = 2, True
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]
LIBRARY = "/unbroken/agent/library/unbroken/"
HAS_LIBRARY = f"""
import tempfile
from unbroken import worker
assert worker.__file__.startswith("{LIBRARY}"), worker.__file__
with tempfile.NamedTemporaryFile():
    pass
"""
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
        script=HAS_LIBRARY + GLOO,
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


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("image", images.PYTHONS)
def test_a_killed_worker_is_replaced_on_every_python_of_users(
    cluster: RealCluster, image: str
) -> None:
    kind, version = image.split(":")
    prefix = images.CONDA if kind == "conda" else "/usr"
    facts = f"""
import sys
assert "%d.%d" % sys.version_info[:2] == "{version}", sys.version
assert sys.prefix == "{prefix}", sys.prefix
"""
    job = Job(
        cluster,
        image.replace(":", "-").replace(".", "-"),
        script=facts + HAS_LIBRARY + PLAIN,
        image=image,
        command=("torchrun",),
        security=NOBODY,
    )
    job.apply()
    assert_new_process_after_a_kill(job)
    job.finish()
