"""A real Kubernetes: the control plane of ../shared/envtest on a bridge, with real nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.apiservers import ROOT, CannotStartError, envtest_folder
from tests.cluster_logs import assert_no_errors
from tests.e2e.clusters import UNBROKEN
from tests.e2e.planes import TOKEN, Plane
from tests.e2e.planes import RealCluster as PlaneCluster
from tests.realnodes import machines, services
from unbroken.spec.keys import FAULT_DETAILS, HEALTH

Object = dict[str, Any]

NETWORK_PLUGIN = Path("/usr/lib/cni/bridge")
PROGRAMS = ("containerd", "runc", "ctr", "ip", "iptables", "nsenter", "gcc", "kubectl")
PATIENCE_SECONDS = 150.0
"""Seconds to wait: two processors run three real kubelets."""
SYSTEM = "unbroken-system"


@dataclass(frozen=True)
class RealCluster(PlaneCluster):
    """The control plane, its machines and its operator."""

    @property
    def shared(self) -> Path:
        """A folder that jobs see under the same path."""
        return self.directory / "shared"

    def join(self, name: str) -> None:
        """Switch a new machine on."""
        machines.switch_on(self.directory, name, machines.next_number(self.directory))

    def write_kernel_log(self, node: str, line: str) -> float:
        """Write a line as a machine's kernel; return the time."""
        with open(self.directory / "kernel" / node / "kernel.log", "a") as file:
            file.write(f"{line}\n")
        return time.time()

    def deploy_daemon(self) -> None:
        """Apply the DaemonSet as delivered, and adapt it, since the nodes share a kernel."""
        for name in machines.names(self.directory):
            (self.directory / "kernel" / name).mkdir(parents=True, exist_ok=True)
            (self.directory / "kernel" / name / "kernel.log").touch()
        text = (ROOT / "deploy/node-daemon.yaml").read_text()
        documents = [one for one in yaml.safe_load_all(text) if one]
        for one in documents:
            if one["kind"] == "DaemonSet":
                self._fit(one["spec"]["template"]["spec"])
        self.apply(*documents)
        rollout = f"daemonset/{documents[-1]['metadata']['name']}"
        self.kubectl("-n", SYSTEM, "rollout", "status", rollout, "--timeout=55s")

    def _fit(self, pod: Object) -> None:
        """Give each node a file for its kernel log."""
        [container] = pod["containers"]
        container["command"] += ["--kernel-log", "/kernel/kernel.log"]
        for mount in container["volumeMounts"]:
            if mount["name"] == "kernel-log":
                mount.update(mountPath="/kernel", subPathExpr="$(NODE_NAME)")
        for volume in pod["volumes"]:
            if volume["name"] == "kernel-log":
                volume["hostPath"] = {"path": str(self.directory / "kernel")}
            elif volume["name"] == "logs":
                volume["hostPath"]["path"] = str(self.directory / "logs")

    def orders(self) -> list[str]:
        """Return the repairs for which the hook was called, by their identities."""
        return sorted(path.name for path in (self.directory / "orders").glob("*"))

    def condition(self, node: str, type: str) -> str:
        """Return the status of a node's condition; empty: it has none of the type."""
        conditions = self.get("node", node)["status"]["conditions"]
        return next((one["status"] for one in conditions if one["type"] == type), "")

    @contextmanager
    def api_server_stopped(self) -> Iterator[None]:
        """Kill kube-apiserver, and start it again unchanged after the block."""
        os.kill(self.plane.api_pid, signal.SIGKILL)
        try:
            yield
        finally:
            self.restart()


@contextmanager
def real_cluster(count: int, *, has_images: bool = False) -> Iterator[RealCluster]:
    """Run a control plane with `count` nodes, n1 and on, with our images or programs of this host.

    CannotStartError says what is missing.
    """
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        raise CannotStartError(f"not on the PATH: {', '.join(missing)}")
    if not NETWORK_PLUGIN.exists():
        raise CannotStartError(f"no {NETWORK_PLUGIN} (Debian: containernetworking-plugins)")
    if os.getuid() != 0:
        raise CannotStartError("real nodes need root, for namespaces and a bridge")
    if not (machines.CGROUPS / "pids").exists():
        raise CannotStartError("real nodes need cgroup v1, with the controller `pids`")
    envtest_folder()
    with ExitStack() as stack:
        room = Path(tempfile.mkdtemp(prefix="unbroken-room-"))
        cluster = RealCluster(room, str(shutil.which("kubectl")), plane=Plane(room))
        stack.callback(_clear, cluster)
        cluster.plane.start("--bridge")
        _keep_address("unbr0")
        machines.equip(room, has_images=has_images)
        stack.enter_context(services.reachable(cluster.plane.server, TOKEN))
        for folder in ("shared", "logs", "kernel"):
            (room / folder).mkdir()
        for number in range(count):
            cluster.join(f"n{number + 1}")
        yield cluster


def _keep_address(bridge: str) -> None:
    """Let the bridge keep its hardware address, which else changes when a node joins or is off:
    it is the least of its ports. The others would then reach this host only after seconds."""
    address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
    subprocess.run(["ip", "link", "set", bridge, "address", address], check=True)


def _clear(cluster: RealCluster) -> None:
    room = cluster.directory
    for name in machines.names(room):
        machines.switch_off(room, name)
    if (room / "namespaces").exists():
        # Delete it while the lock is held: `stop` leaves a bridge that no node has joined.
        subprocess.run(["ip", "link", "del", "unbr0"], check=False, capture_output=True)
    cluster.plane.stop()
    for name in machines.names(room):
        machines.discard(room, name)
    mounted = [line for line in Path("/proc/mounts").read_text().splitlines() if str(room) in line]
    assert not mounted, f"still mounted: {mounted}"
    shutil.rmtree(room)


@contextmanager
def operator(cluster: RealCluster, *options: str) -> Iterator[None]:
    """Run `unbroken operator` as a process of this host, whose kinds are served.

    Its log, which is in the cluster's folder, must have no error.
    """
    log = cluster.directory / "operator.log"
    with log.open("wb") as output:
        command = [*UNBROKEN, "operator", *cluster.operator_options, *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        cluster.wait_served()
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert_no_errors(log, cluster.allowed_errors)


def repair_options(cluster: RealCluster) -> list[str]:
    """Return the options of an operator that has machines repaired by the hook of the tests."""
    hook = Path(__file__).with_name("repair_hook.py")
    command = f"{sys.executable} {hook} {cluster.directory} {{node}} {{action}} {{order_id}}"
    return [
        *("--node-provider", "command", "--node-command", command),
        *("--check-image", machines.IMAGE),
    ]


def until(holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until something holds that no event reports."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
        time.sleep(0.1)


def health(node: Object) -> tuple[str, bool]:
    """Return the label of a node's health, and whether it has the taint."""
    taints = node["spec"].get("taints") or ()
    label = (node["metadata"].get("labels") or {}).get(HEALTH, "")
    return label, any(one["key"] == HEALTH for one in taints)


def details(node: Object) -> list[Object]:
    """Return the faults in a node's annotation."""
    annotations = node["metadata"].get("annotations") or {}
    found: list[Object] = json.loads(annotations.get(FAULT_DETAILS, "[]"))
    return found
