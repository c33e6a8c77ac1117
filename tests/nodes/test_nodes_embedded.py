"""The daemon on each node of a local cluster, controlled by files of the node's directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.apiclient import Api
from tests.cli_calls import Cli
from tests.e2e.clusters import Cluster
from tests.e2e.control import api_of
from unbroken.spec.keys import FAULT_DETAILS, FAULT_REASONS, HEALTH

pytestmark = pytest.mark.slow

Object = dict[str, Any]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """Three nodes, and nobody who repairs them."""
    folder = tmp_path_factory.mktemp("daemons")
    found = Cli(folder / "cluster", folder)
    found.call("up", "--detach", "--nodes", "3", "--no-operator")
    yield found
    found.take_away()


@pytest.fixture
def api(cli: Cli) -> Iterator[Api]:
    """Plain requests to the cluster."""
    with closing(api_of(Cluster(cli.directory, "kubectl"))) as api:
        yield api


def has(node: Object, kind: str, reason: str) -> bool:
    """The condition is there, and then the label."""
    if node["metadata"]["labels"].get(FAULT_REASONS) != reason:
        return False
    listed = node["status"].get("conditions") or ()
    found = {one["type"]: one for one in listed}.get(kind, {})
    return (found.get("status"), found.get("reason")) == ("True", reason)


def test_a_line_of_its_kernel_log_makes_one_node_faulty(cli: Cli, api: Api) -> None:
    log = cli.directory / "nodes/node-1/kernel.log"
    with log.open("a") as file:
        file.write("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    node = api.until("/api/v1/nodes", "node-1", lambda n: has(n, "NvidiaGPUUnhealthy", "Xid79"))
    assert node["metadata"]["labels"][HEALTH] == "UnschedulablePendingReplacement"
    assert [taint["key"] for taint in node["spec"]["taints"]] == [HEALTH]
    other = api.get("/api/v1/nodes/node-0").made
    assert other["metadata"]["labels"].get(HEALTH, "Schedulable") == "Schedulable"
    assert FAULT_DETAILS not in other["metadata"].get("annotations", {})
    with api.watch("/api/v1/namespaces/default/events", fieldSelector="reason=Xid79") as events:
        assert events.event()["object"]["involvedObject"]["name"] == "node-1"
    logs = cli.directory / "logs/SagemakerHealthMonitoringAgent"
    (line,) = (logs / "default/node-1.log").read_text().splitlines()
    assert json.loads(line)["Event detail"]["Action"] == "replace"


def test_a_library_in_its_directory_stands_for_its_gpus(cli: Cli, api: Api, nvml: Path) -> None:
    folder = cli.directory / "nodes/node-2"
    (folder / "gpus.txt").write_text("gpu 00000000:3B:00.0 pending=1\n")
    shutil.copy(nvml, folder / "part")
    (folder / "part").rename(folder / "libnvidia-ml.so.1")
    node = api.until(
        "/api/v1/nodes", "node-2", lambda n: has(n, "NvidiaGPUUnhealthy", "GpuRemapPending")
    )
    assert node["metadata"]["labels"][FAULT_REASONS] == "GpuRemapPending"
    assert node["metadata"]["annotations"]["unbroken.dev/advised-repair"] == "reset-gpu"
