"""Nodes of the local cluster that lose power, are fenced, and come back."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster, find_kubectl, pod, processes, python

pytestmark = pytest.mark.slow

TAINT = '{.spec.taints[?(@.key=="node.kubernetes.io/out-of-service")].value}'
STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", MARK])
    os._exit(0)
os.wait()
open("both", "w").close()
time.sleep(600)
"""
"""A program with a child that has left its family; neither listens to signals."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes."""
    made = Cluster(tmp_path / "state", find_kubectl())
    made.unbroken("up", "--detach", "--nodes", "2")
    yield made
    made.take_away()


def start(cluster: Cluster, mark: str, node: str = "node-0") -> list[int]:
    """Run the stubborn program on a node; its processes and their supervisor."""
    program = STUBBORN.replace("MARK", repr(mark)) + f"\nassert {mark!r}"
    both = {"exec": {"command": ["test", "-e", "both"]}, "periodSeconds": 1}
    cluster.apply(
        pod(
            *("stubborn", *python(program)),
            restartPolicy="Always",
            nodeName=node,
            container={"readinessProbe": both},
        )
    )
    cluster.wait("pod/stubborn", "condition=Ready")
    found = processes(mark)
    assert len(found) >= 2
    (supervisor,) = {_parent(pid) for pid in found} - {*found, 1}
    return [*found, supervisor]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def all_end(handles: list[int]) -> None:
    """Wait until the processes have ended."""
    for handle in handles:
        assert select.select([handle], [], [], 10)[0], "a process of the dead node lives"
        os.close(handle)


def annotate(cluster: Cluster, text: str, node: str = "node-0") -> None:
    """Set an annotation `unbroken.dev/...`."""
    cluster.kubectl("annotate", "--overwrite", "node", node, f"unbroken.dev/{text}")


def test_a_node_without_power_dies_in_silence_and_comes_back(cluster: Cluster) -> None:
    handles = [os.pidfd_open(pid) for pid in start(cluster, f"power-{os.getpid()}")]
    boot = cluster.get("node", "node-0")["status"]["nodeInfo"]["bootID"]
    annotate(cluster, "power=off")
    all_end(handles)
    cluster.wait("node/node-0", "condition=Ready=Unknown", seconds=15)
    dead = cluster.get("pod", "stubborn")["status"]
    assert dead["phase"] == "Running", "nobody was left to say otherwise"
    assert "running" in dead["containerStatuses"][0]["state"]
    cluster.wait("node/node-1", "condition=Ready", seconds=1)

    annotate(cluster, "fence=lost")
    cluster.wait("node/node-0", f"jsonpath={TAINT}=nodeshutdown")
    cluster.wait("pod/stubborn", "delete")
    cluster.wait("node/node-0", "condition=Ready=Unknown", seconds=1)

    annotate(cluster, "power-")
    cluster.wait("node/node-0", "condition=Ready")
    node = cluster.get("node", "node-0")
    assert node["status"]["nodeInfo"]["bootID"] != boot
    assert "unbroken.dev/fence" not in node["metadata"].get("annotations", {})
    keys = [taint["key"] for taint in node["spec"].get("taints", ())]
    assert "node.kubernetes.io/out-of-service" not in keys
    cluster.apply(pod("next", *python("print()"), restartPolicy="Never", nodeName="node-0"))
    cluster.wait("pod/next", "jsonpath={.status.phase}=Succeeded")


def test_a_fenced_node_is_emptied_and_comes_back_by_itself(cluster: Cluster) -> None:
    handles = [os.pidfd_open(pid) for pid in start(cluster, f"fence-{os.getpid()}")]
    annotate(cluster, "fence=test")
    all_end(handles)
    cluster.wait("pod/stubborn", "delete")
    where = {"kubernetes.io/hostname": "node-0"}
    cluster.apply(pod("next", *python("print()"), restartPolicy="Never", nodeSelector=where))
    cluster.wait("pod/next", "jsonpath={.status.phase}=Succeeded")
    node = cluster.get("node", "node-0")
    assert "unbroken.dev/fence" not in node["metadata"].get("annotations", {})
    assert not cluster.get("node", "node-0")["spec"].get("taints")


@pytest.mark.heavy
def test_a_pod_of_a_node_that_gets_power_again_starts_anew(cluster: Cluster) -> None:
    mark = f"again-{os.getpid()}"
    handles = [os.pidfd_open(pid) for pid in start(cluster, mark)]
    annotate(cluster, "power=off")
    all_end(handles)
    cluster.unbroken("down")
    cluster.unbroken("up", "--detach")
    assert not processes(mark), "a node stays off over a restart of the cluster"
    annotate(cluster, "power=on")
    cluster.wait("pod/stubborn", "jsonpath={.status.containerStatuses[0].restartCount}=1")
    cluster.wait("pod/stubborn", "condition=Ready")
    status = cluster.get("pod", "stubborn")["status"]["containerStatuses"][0]
    assert status["lastState"]["terminated"]["exitCode"] == 137


@pytest.mark.heavy
def test_with_fewer_nodes_the_others_are_gone_with_their_pods(cluster: Cluster) -> None:
    handles = [os.pidfd_open(pid) for pid in start(cluster, f"fewer-{os.getpid()}", "node-1")]
    kill(cluster.up_pid)
    cluster.unbroken("up", "--detach", "--nodes", "1")
    all_end(handles)
    cluster.wait("pod/stubborn", "delete")
    assert [node["metadata"]["name"] for node in cluster.get("nodes")["items"]] == ["node-0"]


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end."""
    handle = os.pidfd_open(pid)
    os.kill(pid, 9)
    all_end([handle])
