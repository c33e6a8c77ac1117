"""Another user of this machine gets nothing from the Ray of `unbroken up`.

The attacks: user 65534 posted a job to the dashboard of a pod, which ran as root and read the local
cluster's token; and wrote into the GCS, which listens at all addresses.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack import ray_stranger
from tests.e2e.clusters import Cluster, processes
from tests.e2e.conftest import kubectl_path, make_cluster
from tests.e2e.test_ray import ENVIRONMENT, pods_of
from unbroken.local.listeners import LISTEN, TABLES, strangers
from unbroken.local.node.processes.supervisor import descendants

__all__ = ["kubectl_path", "make_cluster"]

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(300)]
NOBODY = 65534
RAYCLUSTER = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "real"},
    "spec": {
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "1"},
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "ray-head",
                            "image": "rayproject/ray:2.60.0",
                            "resources": {
                                "requests": {"cpu": "500m", "memory": "2Gi"},
                                "limits": {"memory": "2Gi"},
                            },
                        }
                    ]
                }
            },
        }
    },
}


def ports_of(address: str) -> set[str]:
    """Return the ports at which the Ray processes of a pod listen."""
    starters = processes(f"--node-ip-address={address}")
    inodes = set()
    for pid in {*starters, *(child for one in starters for child in descendants(one))}:
        try:
            inodes |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue  # it ended meanwhile
    rows = [line.split() for table in TABLES for line in table.read_text().splitlines()[1:]]
    return {
        str(int(row[1].rpartition(":")[2], 16))
        for row in rows
        if row[3] == LISTEN and f"socket:[{row[9]}]" in inodes
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_no_port_of_ray_serves_another_user(make_cluster: Callable[..., Cluster]) -> None:
    sizes = ("--nodes", "1", "--cpu-per-node", "4", "--memory-per-node", "8Gi", "--operator")
    cluster = make_cluster(*sizes, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    cluster.apply(RAYCLUSTER)
    cluster.wait("raycluster/real", "jsonpath={.status.state}=ready", seconds=120)
    (head,) = pods_of(cluster, "head")
    address = head["status"]["podIP"]
    # Each call has a port at which it is refused, once Ray has started all its programs, and none
    # at which it is served.
    refused: set[str] = set()
    while not refused >= {*ray_stranger.HTTP, *ray_stranger.GRPC}:
        for kind, what, port, answer in call_all(address):
            assert answer in HARMLESS[kind] | REFUSED[kind], (what, port, answer)
            # Workers serve it, and there are none before a job.
            if answer in REFUSED[kind] or what == "CoreWorkerService/PushTask":
                refused.add(what)


REFUSED = {"HTTP": {"401", "403"}, "gRPC": {"UNAUTHENTICATED"}}
HARMLESS = {
    "HTTP": {"404", "405", "none"},
    "gRPC": {"UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"},
}


def call_all(address: str) -> list[list[str]]:
    """Call everything at a pod as another user; return the rows of `ray_stranger`."""
    program = Path(ray_stranger.__file__).read_text()
    words = [str(ENVIRONMENT / "bin/python"), "-c", program, address, *sorted(ports_of(address))]
    environment = {"PATH": os.environ["PATH"], "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


LISTENER = f"""\
import os, socket, sys
os.setuid({NOBODY})
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listens", flush=True)
    server.accept()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_listener_is_seen_in_the_kernels_table() -> None:
    address = "127.64.77.5"
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
        assert strangers(address, port, {}) == []
    words = [sys.executable, "-c", LISTENER, address, str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listens\n"
        assert strangers(address, port, {}) == [str(NOBODY)]
        assert strangers(address, port, {"securityContext": {"runAsUser": NOBODY}}) == []
        stranger.kill()
