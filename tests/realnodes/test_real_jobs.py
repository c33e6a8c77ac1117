"""Training jobs in containers of real nodes: they run, recover and end."""

from __future__ import annotations

import json
import subprocess
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


def test_each_node_has_a_hardware_address_of_its_own(cluster: RealCluster) -> None:
    """Nodes with one address take each other's packets: `kubectl logs` waits for ever."""
    nodes = cluster.get("nodes")["items"]
    told = [one["address"] for node in nodes for one in node["status"]["addresses"]]
    command = ("ip", "-json", "neigh", "show", "dev", "unbr0")
    seen = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found = {one["dst"]: one.get("lladdr") for one in seen if one["dst"] in told}
    assert len(found) == NODES, seen
    assert len(set(found.values())) == NODES, found


@pytest.mark.usefixtures("running")
def test_gloo_workers_of_two_nodes_train_recover_from_a_killed_one_and_end(
    cluster: RealCluster,
) -> None:
    job = Job(cluster, "gloo", script=GLOO)
    job.apply()
    assert_new_process_after_a_kill(job)
    job.finish()
