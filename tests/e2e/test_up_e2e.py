"""`unbroken up`, `down`, `status`: starting twice, dying, coming back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.clusters import SESSION, UNBROKEN, Cluster, kill, pod, processes, python
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow
MakeCluster = Callable[..., Cluster]


def test_a_second_up_says_so_and_changes_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("--nodes", "1")
    pid = cluster.up_pid
    again = cluster.unbroken("up", "--detach", "--nodes", "3")
    assert f"already runs from {cluster.directory} (pid {pid})" in again.stdout
    assert f"export KUBECONFIG={cluster.directory}/kubeconfig" in again.stdout
    assert len(cluster.get("nodes")["items"]) == 1


def test_status_and_down_without_a_cluster_are_clear(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*UNBROKEN, arguments[0], "--dir", str(tmp_path / "none"), *arguments[1:]]
        return subprocess.run(
            command, text=True, capture_output=True, check=False, timeout=PATIENCE_SECONDS
        )

    status = call("status")
    assert status.returncode == 3
    assert "no cluster runs" in status.stdout
    assert json.loads(call("status", "-o", "json").stdout)["running"] is False
    down = call("down")
    assert down.returncode == 0
    assert "no cluster" in down.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cpu-per-node", "lots"], "--cpu-per-node"),
        (["--label", "novalue"], "KEY=VALUE"),
        (["--nodes", "-1"], "--nodes"),
        (["--port", "1"], "127.0.0.1:1"),
    ],
)
def test_wrong_arguments_get_one_clear_line(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if arguments == ["--port", "1"] and os.geteuid() == 0:
            arguments = ["--port", str(taken.getsockname()[1])]
            said = "cannot listen on 127.0.0.1"
        command = [*UNBROKEN, "up", "--dir", str(tmp_path / "x"), *arguments]
        done = subprocess.run(
            command, text=True, capture_output=True, check=False, timeout=PATIENCE_SECONDS
        )
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.smoke
def test_after_a_kill_pods_run_on_and_are_adopted_not_doubled(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("--nodes", "1")
    code = f"import time; print('started', flush=True); time.sleep(1000)  # adopt {SESSION}"
    cluster.apply(pod("survivor", *python(code)))
    cluster.apply(
        pod(
            "finisher",
            "sh",
            "-c",
            f"while [ ! -e {SESSION}go ]; do sleep 0.05; done; exit 5",
            restartPolicy="Never",
        )
    )
    cluster.wait("pod/survivor", "condition=Ready")
    cluster.wait("pod/finisher", "condition=Ready")
    before = processes(f"adopt {SESSION}")
    places = [
        Path(f"/proc/{pid}/cwd").resolve() for pid in processes(f"while [ ! -e {SESSION}go ]")
    ]
    uid = cluster.get("pod", "survivor")["metadata"]["uid"]
    kill(cluster.up_pid)
    assert cluster.unbroken("status", check=False).returncode == 3
    assert processes(f"adopt {SESSION}") == before
    for place in places:
        if place != Path("/"):
            (place / f"{SESSION}go").touch()
    cluster.unbroken("up", "--detach")
    cluster.wait("pod/finisher", "jsonpath={.status.phase}=Failed")
    state = cluster.get("pod", "finisher")["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 5
    survivor = cluster.get("pod", "survivor")
    assert survivor["metadata"]["uid"] == uid
    assert survivor["status"]["containerStatuses"][0]["restartCount"] == 0
    assert processes(f"adopt {SESSION}") == before
    assert cluster.kubectl("logs", "survivor").stdout == "started\n"
    cluster.kubectl("delete", "pod", "survivor")
    assert not processes(f"adopt {SESSION}")


@pytest.mark.smoke
def test_down_stops_every_process_and_up_brings_the_objects_back(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--nodes", "1", "--label", "zone=a")
    cluster.apply(pod("worker", *python(f"import time; time.sleep(1000)  # down {SESSION}")))
    cluster.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    cluster.wait("pod/worker", "condition=Ready")
    port = cluster.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}").stdout
    cluster.unbroken("down")
    assert not processes(f"down {SESSION}")
    assert not processes(str(cluster.directory))
    cluster.unbroken("up", "--detach")
    assert cluster.get("configmap", "kept")["data"] == {"a": "b"}
    same = cluster.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}").stdout
    assert same == port
    assert cluster.get("node", "node-0")["metadata"]["labels"]["zone"] == "a"
    cluster.wait("pod/worker", "condition=Ready")
    assert cluster.get("pod", "worker")["status"]["containerStatuses"][0]["restartCount"] == 1


def test_down_after_a_kill_leaves_no_process(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("--nodes", "1")
    cluster.apply(pod("worker", *python(f"import time; time.sleep(1000)  # killed {SESSION}")))
    cluster.wait("pod/worker", "condition=Ready")
    kill(cluster.up_pid)
    assert processes(f"killed {SESSION}")
    cluster.unbroken("down", "--purge")
    assert not processes(f"killed {SESSION}")
    assert not processes(str(cluster.directory))
    assert not cluster.directory.exists()


def test_the_operators_log_is_where_hyp_looks_for_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("--nodes", "0")
    place = ("-n", "aws-hyperpod")
    of_it = (*place, "logs", "-l", "hp-training-control-plane", "--tail=-1", "--timestamps")

    def log() -> str:
        return cluster.kubectl(*of_it, "--since=1h").stdout

    wait_until(log, lambda text: "INFO unbroken.operator." in text)
    cluster.unbroken("down")
    cluster.unbroken("up", "--detach", "--no-operator")
    assert cluster.get(*place, "pods")["items"] == []


@pytest.mark.smoke
def test_ctrl_c_ends_the_foreground_cleanly(tmp_path: Path) -> None:
    command = [*UNBROKEN, "up", "--dir", str(tmp_path / "x"), "--nodes", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert "is ready" in process.stdout.readline()
    assert process.stdout.readline() == f"export KUBECONFIG={tmp_path}/x/kubeconfig\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert sys.executable


@pytest.mark.smoke
def test_files_of_the_cluster_are_private(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("--nodes", "0")
    for name in ("kubeconfig", "internal.kubeconfig", "token", "server.pem", "objects.db"):
        mode = (cluster.directory / name).stat().st_mode & 0o777
        assert mode == 0o600, name
