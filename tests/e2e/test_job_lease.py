"""A node dies without a report: its Node stays ready, and no fence is answered.

A real cluster is in this state in the minute before it misses the node, and for ever after that if
no one repairs it. The lease on the node's workers informs the operator all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import power
from tests.e2e.job_events import await_end, places
from tests.e2e.jobs import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ANNOTATIONS = {"unbroken.dev/fence-by": "lease", "unbroken.dev/lease-seconds": "4"}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """A cluster that misses no node for an hour."""
    found = Cluster(tmp_path_factory.mktemp("patient") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", "3", "--node-grace", "3600")
    yield found
    found.take_away()


def test_the_ranks_of_a_node_that_nobody_misses_go_on_elsewhere(
    patient: Cluster, tmp_path: Path
) -> None:
    with job(patient, tmp_path, annotations=ANNOTATIONS) as one:
        starts = one.steps(0)
        where = {name: pod["spec"]["nodeName"] for name, pod in one.pods().items()}
        lost = places(starts)[2]
        power(patient, where[lost], "off")
        after = one.steps(1)
        for number in one.ranks:
            if places(starts)[number] == lost:
                await_end(starts[number].pid)
                assert one.pods()[places(after)[number]]["spec"]["nodeName"] != where[lost]
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["node"] == where[lost]
    assert incident["remedy"] == "pod"
    assert {sign["fault"] for sign in incident["signals"]} <= {"AgentLost", "PeerLost"}
