"""Machines of the local cluster: created, rebooted, reset and deleted while pods run on them."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster, find_kubectl, pod, processes, python

pytestmark = pytest.mark.slow

FOREVER = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start a cluster of one node."""
    made = Cluster(tmp_path / "state", find_kubectl())
    made.unbroken("up", "--detach", "--nodes", "1", "--gpu-per-node", "2", "--no-operator")
    yield made
    made.take_away()


def machine(name: str, **spec: Any) -> dict[str, Any]:
    """Return a Machine to apply."""
    return {
        "apiVersion": "unbroken.dev/v1",
        "kind": "Machine",
        "metadata": {"name": name},
        "spec": spec,
    }


def start(cluster: Cluster, name: str, node: str, **container: Any) -> list[int]:
    """Run a pod on a node until it is ready; return handles of its processes."""
    mark = f"{name}-{os.getpid()}"
    program = python(f"{FOREVER}; {mark!r}")
    cluster.apply(pod(name, *program, restartPolicy="Always", nodeName=node, container=container))
    cluster.wait(f"pod/{name}", "condition=Ready")
    return [os.pidfd_open(pid) for pid in processes(mark)]


def all_end(handles: list[int]) -> None:
    """Wait until the processes have ended."""
    assert handles
    for handle in handles:
        assert select.select([handle], [], [], 20)[0], "a process lives on"
        os.close(handle)


def alive(handles: list[int]) -> bool:
    """Return whether all of the processes live."""
    return not select.select(handles, [], [], 0)[0]


def order(cluster: Cluster, name: str, **spec: int) -> None:
    """Raise a count of the machine's spec."""
    patch = json.dumps({"spec": spec})
    cluster.kubectl("patch", "machine", name, "--type=merge", f"--patch={patch}")


def kill_up(cluster: Cluster) -> None:
    """Send SIGKILL to `up`, and wait for its end."""
    handle = os.pidfd_open(cluster.up_pid)
    os.kill(cluster.up_pid, 9)
    all_end([handle])


def boot_of(cluster: Cluster, node: str) -> str:
    """Return the boot ID of a node."""
    boot: str = cluster.get("node", node)["status"]["nodeInfo"]["bootID"]
    return boot


def restarts(name: str, count: int) -> tuple[str, str]:
    """Return arguments for `Cluster.wait`."""
    return f"pod/{name}", f"jsonpath={{.status.containerStatuses[0].restartCount}}={count}"


def test_a_machine_becomes_a_node_with_what_its_type_has_and_goes_with_it(
    cluster: Cluster,
) -> None:
    taint = {"key": "sagemaker.amazonaws.com/node-health-status", "effect": "NoSchedule"}
    labels = {"team": "a", "sagemaker.amazonaws.com/node-health-status": "Unschedulable"}
    cluster.apply(
        machine(
            *("big",),
            instanceType="ml.p5.48xlarge",
            instanceGroup="worker",
            labels=labels,
            taints=[{**taint, "value": "Unschedulable"}],
        ),
        machine("odd", instanceType="ml.p9.48xlarge"),
    )
    cluster.wait("machine/big", "jsonpath={.status.phase}=Running")
    node = cluster.get("node", "big")
    capacity = node["status"]["capacity"]
    assert (capacity["cpu"], capacity["memory"]) == ("192", "2Ti")
    assert (capacity["nvidia.com/gpu"], capacity["vpc.amazonaws.com/efa"]) == ("8", "32")
    assert (
        node["metadata"]["labels"].items()
        >= {
            **labels,
            "node.kubernetes.io/instance-type": "ml.p5.48xlarge",
            "sagemaker.amazonaws.com/instance-group-name": "worker",
        }.items()
    )
    assert {**taint, "value": "Unschedulable"} in node["spec"]["taints"]
    status = cluster.get("machine", "big")["status"]
    assert status["bootId"] == boot_of(cluster, "big")
    assert status["index"] == 1, "the lowest that is free"

    cluster.wait("machine/odd", "jsonpath={.status.phase}=Failed")
    assert "ml.p9.48xlarge" in cluster.get("machine", "odd")["status"]["message"]
    cluster.kubectl("delete", "machine", "odd")

    tolerated = [{"operator": "Exists"}]
    mark = f"big-{os.getpid()}"
    cluster.apply(pod("p", *python(f"{FOREVER}; {mark!r}"), nodeName="big", tolerations=tolerated))
    cluster.wait("pod/p", "condition=Ready")
    handles = [os.pidfd_open(pid) for pid in processes(mark)]
    cluster.kubectl("delete", "machine", "big")
    all_end(handles)
    assert cluster.kubectl("get", "node", "big", check=False).returncode == 1
    assert not (cluster.directory / "nodes" / "big").exists()
    cluster.wait("pod/p", "delete")
    # Its addresses are free for the next.
    cluster.apply(machine("next"))
    cluster.wait("machine/next", "jsonpath={.status.index}=1")


def test_a_reboot_kills_everything_once_and_pods_start_anew(cluster: Cluster) -> None:
    handles = start(cluster, "p", "node-0")
    before = boot_of(cluster, "node-0")
    since = cluster.get("machine", "node-0")["status"]["startedAt"]
    order(cluster, "node-0", boots=1)
    all_end(handles)
    cluster.wait("machine/node-0", "jsonpath={.status.boots}=1")
    cluster.wait("machine/node-0", "jsonpath={.status.phase}=Running")
    assert boot_of(cluster, "node-0") != before
    status = cluster.get("machine", "node-0")["status"]
    assert status["bootId"] == boot_of(cluster, "node-0")
    assert status["startedAt"] > since
    cluster.wait(*restarts("p", 1))
    cluster.wait("pod/p", "condition=Ready")

    # Killed in the middle of the next one, `up` carries it out once, and no pod twice.
    handles = [os.pidfd_open(pid) for pid in processes(f"p-{os.getpid()}")]
    order(cluster, "node-0", boots=2)
    kill_up(cluster)
    cluster.unbroken("up", "--detach")
    all_end(handles)
    cluster.wait("machine/node-0", "jsonpath={.status.boots}=2")
    cluster.wait(*restarts("p", 2))
    cluster.wait("pod/p", "condition=Ready")
    second = boot_of(cluster, "node-0")
    assert second not in (before, status["bootId"])

    # A start of `up` that nobody asked a reboot of is none.
    handles = [os.pidfd_open(pid) for pid in processes(f"p-{os.getpid()}")]
    kill_up(cluster)
    cluster.unbroken("up", "--detach")
    assert alive(handles)
    assert boot_of(cluster, "node-0") == second
    for handle in handles:
        os.close(handle)


def test_a_reset_kills_what_has_gpus_and_nothing_else(cluster: Cluster) -> None:
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    training = start(cluster, "training", "node-0", resources=limits)
    other = start(cluster, "other", "node-0")
    boot = boot_of(cluster, "node-0")
    order(cluster, "node-0", resets=1)
    all_end(training)
    cluster.wait("machine/node-0", "jsonpath={.status.resets}=1")
    cluster.wait(*restarts("training", 1))
    cluster.wait("pod/training", "condition=Ready")
    assert alive(other)
    assert boot_of(cluster, "node-0") == boot
    ended = cluster.get("pod", "training")["status"]["containerStatuses"][0]["lastState"]
    assert ended["terminated"]["exitCode"] == 137
    for handle in other:
        os.close(handle)


@pytest.mark.heavy
def test_a_deletion_outlives_up_and_places_are_filled_again(cluster: Cluster) -> None:
    cluster.apply(machine("extra"), machine("node-1-ab12c", logicalId="node-1"))
    cluster.wait("machine/extra", "jsonpath={.status.phase}=Running")
    cluster.wait("machine/node-1-ab12c", "jsonpath={.status.phase}=Running")
    handles = start(cluster, "p", "extra")
    cluster.kubectl("delete", "machine", "extra", "node-0", "--wait=false")
    kill_up(cluster)
    # The machine in the place of node-1 counts as that one.
    cluster.unbroken("up", "--detach", "--nodes", "2")
    all_end(handles)
    cluster.wait("machine/extra", "delete")
    names = [one["metadata"]["name"] for one in cluster.get("nodes")["items"]]
    assert names == ["node-0", "node-1-ab12c"]
    cluster.wait("pod/p", "delete")

    # One that was made in a pool's last moment is made by the next.
    cluster.apply(machine("late"))
    kill_up(cluster)
    cluster.unbroken("up", "--detach")
    cluster.wait("machine/late", "jsonpath={.status.phase}=Running")
    cluster.wait("node/late", "condition=Ready")

    # With force nobody waits for the pool, and still nothing is left.
    handles = start(cluster, "q", "node-1-ab12c")
    cluster.kubectl("delete", "machine", "node-1-ab12c", "--wait=false")
    forced = '{"metadata":{"finalizers":null}}'
    patch = ("patch", "machine", "node-1-ab12c", "--type=merge", f"--patch={forced}")
    cluster.kubectl(*patch, check=False)
    all_end(handles)
    cluster.wait("node/node-1-ab12c", "delete")
