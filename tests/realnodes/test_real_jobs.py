"""Training jobs in containers of real nodes: they run, recover and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.realnodes.jobs import GLOO, Job, assert_new_process_after_a_kill
from tests.realnodes.plane import RealCluster, operator

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
    assert_new_process_after_a_kill(job)
    job.finish()
