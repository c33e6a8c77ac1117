"""Pods on a whole cluster, through kubectl: what a person does in the first hour."""

from __future__ import annotations

import json

import pytest

from tests.e2e.clusters import SESSION, Cluster, pod, processes, python

pytestmark = pytest.mark.slow


def test_a_pod_runs_to_its_end_and_shows_its_output(cluster: Cluster) -> None:
    cluster.apply(
        pod("ends", *python("print('hello'); raise SystemExit(3)"), restartPolicy="Never")
    )
    cluster.wait("pod/ends", "jsonpath={.status.phase}=Failed")
    assert cluster.kubectl("logs", "ends").stdout == "hello\n"
    state = cluster.get("pod", "ends")["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 3
    assert state["terminated"]["reason"] == "Error"
    shown = cluster.kubectl("get", "pods", "ends").stdout.split()
    assert shown[5:9] == ["ends", "0/1", "Error", "0"]


def test_logs_follow_a_running_pod_to_its_end(cluster: Cluster) -> None:
    code = "import sys\nfor i in range(3): print(i, flush=True)\nsys.stdin.read()"
    cluster.apply(pod("talks", *python(code), restartPolicy="Never"))
    cluster.wait("pod/talks", "jsonpath={.status.phase}=Succeeded")
    assert cluster.kubectl("logs", "-f", "talks").stdout == "0\n1\n2\n"
    assert cluster.kubectl("logs", "--tail=1", "talks").stdout == "2\n"


def test_exec_runs_in_the_pod_with_streams_and_exit_code(cluster: Cluster) -> None:
    env = [{"name": "COLOUR", "value": "blue"}]
    cluster.apply(pod("sleeps", "sleep", "1000", container={"env": env}))
    cluster.wait("pod/sleeps", "condition=Ready")
    assert cluster.kubectl("exec", "sleeps", "--", "printenv", "COLOUR").stdout == "blue\n"
    echoed = cluster.kubectl("exec", "-i", "sleeps", "--", "cat", stdin="over and back")
    assert echoed.stdout == "over and back"
    failed = cluster.kubectl("exec", "sleeps", "--", "sh", "-c", "echo no >&2; exit 7", check=False)
    assert failed.returncode == 7
    assert "no\n" in failed.stderr


def test_two_pods_of_one_port_number_have_addresses_of_their_own(cluster: Cluster) -> None:
    code = "import socket, os; s = socket.create_server((os.environ['IP'], 8080)); s.accept()"
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    probe = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    container = {"env": env, "startupProbe": {**probe, "failureThreshold": 30}}
    for name in ("left", "right"):
        cluster.apply(
            pod(
                name,
                *python(code.replace("s.accept()", "[s.accept() for _ in range(9**9)]")),
                container=container,
            )
        )
    for name in ("left", "right"):
        cluster.wait(f"pod/{name}", "condition=Ready")
    addresses = {cluster.get("pod", name)["status"]["podIP"] for name in ("left", "right")}
    assert len(addresses) == 2
    assert all(address.startswith("127.") for address in addresses)


def test_gpus_are_counted_and_what_does_not_fit_says_why(cluster: Cluster) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    for number in range(3):
        cluster.apply(pod(f"gpu-{number}", "sleep", "1000", container=limits))
    cluster.wait("pod/gpu-2", "jsonpath={.status.conditions[0].reason}=Unschedulable")
    message = cluster.get("pod", "gpu-2")["status"]["conditions"][0]["message"]
    assert message.startswith("0/2 nodes are available: 2 Insufficient nvidia.com/gpu")
    assert "FailedScheduling" in cluster.kubectl("describe", "pod", "gpu-2").stdout
    nodes = {cluster.get("pod", f"gpu-{number}")["spec"]["nodeName"] for number in range(2)}
    assert len(nodes) == 2
    cluster.kubectl("delete", "pod", "gpu-0", "gpu-1", "--wait=true")
    cluster.wait("pod/gpu-2", "condition=Ready")
    cluster.kubectl("delete", "pod", "gpu-2")


def test_a_deleted_pod_leaves_no_process_behind(cluster: Cluster) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        f"time.sleep(1000)  # orphan {SESSION}\n"
    )
    cluster.apply(pod("stubborn", *python(code), terminationGracePeriodSeconds=1))
    cluster.wait("pod/stubborn", "condition=Ready")
    assert processes(f"orphan {SESSION}")
    cluster.kubectl("delete", "pod", "stubborn")
    assert not processes(f"orphan {SESSION}")


def test_drain_moves_pods_away_and_uncordon_takes_them_again(cluster: Cluster) -> None:
    selector = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
    cluster.apply(pod("drained", "sleep", "1000", **selector))
    cluster.wait("pod/drained", "condition=Ready")
    cluster.kubectl("drain", "node-1", "--force", "--ignore-daemonsets", "--delete-emptydir-data")
    assert cluster.kubectl("get", "pod", "drained", check=False).returncode == 1
    assert "SchedulingDisabled" in cluster.kubectl("get", "node", "node-1").stdout
    cluster.apply(pod("waits", "sleep", "1000", **selector))
    cluster.wait("pod/waits", "jsonpath={.status.conditions[0].reason}=Unschedulable")
    cluster.kubectl("uncordon", "node-1")
    cluster.wait("pod/waits", "condition=Ready")
    cluster.kubectl("delete", "pod", "waits")


def test_owned_objects_go_with_their_owner(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "owner")
    meta = cluster.get("configmap", "owner")["metadata"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": meta["uid"]}
    child = {"apiVersion": "v1", "kind": "Secret"}
    cluster.apply({**child, "metadata": {"name": "child", "ownerReferences": [reference]}})
    cluster.kubectl("delete", "configmap", "owner")
    cluster.wait("secret/child", "delete")


def test_a_namespace_takes_its_objects_with_it(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "short-lived")
    cluster.kubectl("create", "configmap", "inside", "-n", "short-lived")
    running = pod("inside", "sleep", "1000")
    running["metadata"]["namespace"] = "short-lived"
    cluster.apply(running)
    cluster.kubectl("wait", "pod/inside", "-n", "short-lived", "--for=condition=Ready")
    cluster.kubectl("delete", "namespace", "short-lived")
    assert cluster.kubectl("get", "namespace", "short-lived", check=False).returncode == 1


def test_a_claim_is_bound_and_keeps_files_between_pods(cluster: Cluster) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    volume = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/unbroken-data"}]}
    writer = pod(
        "writer",
        "sh",
        "-c",
        "echo kept > /unbroken-data/file",
        restartPolicy="Never",
        volumes=volume,
        container=mounts,
    )
    cluster.apply({**claim, "metadata": {"name": "data"}, "spec": spec}, writer)
    cluster.wait("pod/writer", "jsonpath={.status.phase}=Succeeded")
    assert cluster.get("pvc", "data")["status"]["phase"] == "Bound"
    reader = pod(
        "reader",
        "cat",
        "/unbroken-data/file",
        restartPolicy="Never",
        volumes=volume,
        container=mounts,
    )
    cluster.apply(reader)
    cluster.wait("pod/reader", "jsonpath={.status.phase}=Succeeded")
    assert cluster.kubectl("logs", "reader").stdout == "kept\n"


def test_status_tells_what_runs(cluster: Cluster) -> None:
    report = json.loads(cluster.unbroken("status", "-o", "json").stdout)
    assert report["running"]
    assert [node["name"] for node in report["nodes"]] == ["node-0", "node-1"]
    assert all(node["ready"] and node["gpu"] == "4" for node in report["nodes"])
    assert "node-1" in cluster.unbroken("status").stdout
