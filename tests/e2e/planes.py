"""A real control plane under the end-to-end tests of jobs.

It consists of etcd, API server, scheduler and controller manager of Kubernetes. The nodes of the
local cluster and the operator are processes of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.apiservers import envtest_folder, kubeconfig_of, unpacked
from tests.e2e.clusters import UNBROKEN, Cluster
from tests.e2e.control import Operator
from tests.operator.realkube import Node
from tests.operator.trained_jobs import until
from tests.watching import PATIENCE_SECONDS

LOCK = Path(tempfile.gettempdir()) / "unbroken-plane.lock"
"""Lock of a control plane on the bridge: its address is fixed, so a machine can have only one."""
BEATS = ("--heartbeat", "2")
"""Options with which the controller manager considers a node lost after 8 s."""
TOKEN = "admin-token"
"""Token of the user to whom `start` gives all rights."""


class Plane:
    """The processes that `../shared/envtest/start` makes, in their own folder."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self._lock = ExitStack()
        self._command: list[str] = []
        """Command of kube-apiserver."""
        self._restarted: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> None:
        """Start them; return when the API server is ready.

        With `--bridge`, wait first until no other test has a control plane on the bridge.
        """
        if "--bridge" in options:
            fcntl.flock(self._lock.enter_context(LOCK.open("w")), fcntl.LOCK_EX)
        (self._room / "bin").mkdir(exist_ok=True)
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler"):
            (self._room / "bin" / name).symlink_to(unpacked(name))
        command = [envtest_folder() / "start", self._room, *options]
        with open(self._room / "start.log", "wb") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=120)
        started = Path(f"/proc/{self.api_pid}/cmdline").read_bytes().decode()
        self._command = started.split("\0")[:-1]

    @property
    def server(self) -> str:
        """URL of the API server."""
        config = yaml.safe_load((self._room / "kubeconfig").read_text())
        return str(config["clusters"][0]["cluster"]["server"])

    @property
    def api_pid(self) -> int:
        """Pid of kube-apiserver; `start` writes etcd's before it."""
        return int((self._room / "pids").read_text().split()[1])

    def restart_api(self) -> None:
        """Start the killed kube-apiserver again."""
        killed = self.api_pid
        with open(self._room / "apiserver.log", "ab") as log:
            process = subprocess.Popen(
                self._command, cwd=self._room, stdout=log, stderr=log, start_new_session=True
            )
        self._restarted.append(process)
        pids = self._room / "pids"
        pids.write_text(pids.read_text().replace(f"{killed}\n", f"{process.pid}\n", 1))

    def stop(self) -> None:
        """End all processes."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        pids = self._room / "pids"
        if not pids.exists():
            return
        # `stop` kills by number: only those that are still what `start` made.
        own = [pid for pid in pids.read_text().split() if self._works_here(pid)]
        pids.write_text("".join(f"{pid}\n" for pid in own))
        subprocess.run([envtest_folder() / "stop", self._room], check=True, capture_output=True)
        for pid in own:
            if self._works_here(pid):  # an API server waits for its etcd when it is to end
                os.kill(int(pid), signal.SIGKILL)
        until(lambda: not any(map(self._works_here, own)), "the control plane has ended")
        for process in self._restarted:
            process.wait(timeout=PATIENCE_SECONDS)

    def _works_here(self, pid: str) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/cwd").startswith(str(self._room))
        except OSError:
            return False


@dataclass(frozen=True)
class RealCluster(Cluster):
    """A cluster on such a control plane; its folder has the kubeconfig."""

    plane: Plane = field(default_factory=lambda: Plane(Path()))

    @property
    def up_pid(self) -> int:
        """Pid of the API server."""
        return self.plane.api_pid

    @property
    def operator_options(self) -> tuple[str, ...]:
        """Options of the operator, which are those of any cluster."""
        return ("--kubeconfig", str(self.directory / "kubeconfig"))

    def unbroken(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the `unbroken` command on this cluster."""
        command = [*UNBROKEN, *arguments]
        return subprocess.run(
            command, text=True, capture_output=True, check=check, timeout=60, env=self.environment
        )

    def restart(self) -> None:
        """Restart the API server, and wait until it is ready."""
        self.plane.restart_api()
        until(
            lambda: self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0,
            "the API server is back",
        )


@contextmanager
def real_cluster(folder: Path, kubectl_path: str, *, is_led: bool) -> Iterator[Cluster]:
    """Run a cluster with two nodes of four GPUs each, with an operator if `is_led`.

    CannotStartError says what is missing.
    """
    room = folder / "plane"
    room.mkdir(parents=True)
    plane = Plane(room)
    cluster = RealCluster(folder / "state", kubectl_path, plane=plane)
    cluster.directory.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, room)
        stack.callback(plane.stop)
        plane.start()
        ca = (room / "certs/apiserver.crt").read_text()
        (cluster.directory / "kubeconfig").write_text(kubeconfig_of(plane.server, ca, TOKEN))
        for number in range(2):
            stack.enter_context(Node(cluster, number, f"node-{number}", "--gpus", "4", *BEATS))
        if is_led:
            operator = Operator(cluster, folder / "operator.log")
            operator.start()
            stack.callback(operator.kill)
            stack.callback(operator.assert_well)
            cluster.wait_served()
        for number in range(2):
            cluster.wait(f"node/node-{number}", "create", seconds=55)
            cluster.wait(f"node/node-{number}", "condition=Ready")
        # The controller of nodes removes their taint a moment after they are ready.
        until(
            lambda: not any(one["spec"].get("taints") for one in cluster.get("nodes")["items"]),
            "pods may go to the nodes",
        )
        yield cluster
