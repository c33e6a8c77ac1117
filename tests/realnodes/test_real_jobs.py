"""Training jobs in containers of real nodes: they run, recover and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from realnodes.jobs import GLOO, Job
from realnodes.plane import RealCluster, operator

NODES = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def running(cluster: RealCluster) -> Iterator[None]:
    with operator(cluster):
        yield


@pytest.mark.usefixtures("running")
def test_gloo_workers_of_two_nodes_train_recover_from_a_killed_one_and_end(
    cluster: RealCluster,
) -> None:
    job = Job(cluster, "gloo", script=GLOO)
    job.apply()
    first = job.running()
    assert {one.node for one in first.values()} == {"n1", "n2"}
    job.kill_worker("n2")
    second = job.running(after=0)
    assert {one.pod for one in second.values()} == {one.pod for one in first.values()}
    assert job.incident(1)["remedy"] == "process"
    job.finish()
