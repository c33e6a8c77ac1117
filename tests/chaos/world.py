"""A real control plane, nodes of the local cluster, and two operators that tests kill and freeze.

Each operator has its own proxy, which records its requests to the API server and their times.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.apiservers import Cluster as Server
from tests.apiservers import real_cluster
from tests.cluster_logs import assert_no_errors
from tests.e2e.clusters import Cluster, find_kubectl
from tests.fault_proxy import Call, FaultProxy
from tests.leadership import Takeover, assert_no_stale_writes, takeovers
from tests.operator.realkube import SERVICES, Node, program
from tests.operator.trained_jobs import until

PROGRAM = Path(__file__).with_name("operator_program.py")
NODES = 3
DEFINITIONS = ("hyperpodpytorchjobs.sagemaker.amazonaws.com", "incidents.unbroken.dev")


class Part:
    """A process that is killed, frozen, and started again with the same command."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.is_frozen = False
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, name: str, process: subprocess.Popen[bytes], log: Path) -> Part:
        """Return the part of a process that is already running."""
        assert isinstance(process.args, list)
        made = cls(name, process.args, log)
        made._process = process
        return made

    @property
    def is_up(self) -> bool:
        """True if the process lives, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it if it is not running."""
        if not self.is_up:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def end(self) -> None:
        """Send SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        self.thaw()
        if self._process is not None and self.is_up:
            self._process.send_signal(number)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                # kube-apiserver waits for those who watch.
                self._process.kill()
                self._process.wait()

    def freeze(self) -> None:
        """Send SIGSTOP."""
        if self._process is not None and self.is_up:
            os.kill(self._process.pid, signal.SIGSTOP)
            self.is_frozen = True

    def thaw(self) -> None:
        """Send SIGCONT."""
        if self.is_frozen and self._process is not None and self.is_up:
            os.kill(self._process.pid, signal.SIGCONT)
        self.is_frozen = False


@dataclass(frozen=True)
class Terms:
    """Terms of the operators' lease. The defaults are those of `unbroken operator`."""

    seconds: int = 15
    renew_seconds: float = 2.0
    outages: str = "waits"
    """Behaviour of a leader while the API server is away: with `acts` it continues."""


@dataclass(frozen=True)
class World:
    """The control plane, the nodes, and the operators with their proxies."""

    cluster: Cluster
    etcd: Part
    api: Part
    operators: tuple[Part, Part]
    proxies: tuple[FaultProxy, FaultProxy]

    def histories(self) -> dict[str, list[Call]]:
        """Return the calls of each operator, by name."""
        pairs = zip(self.operators, self.proxies, strict=True)
        return {part.name: list(proxy.calls) for part, proxy in pairs}

    def takeovers(self) -> list[Takeover]:
        """Return the takeovers of the lease, in order."""
        return takeovers(self.histories())

    def leader(self) -> Part:
        """Return the operator that leads, or led last."""
        until(self.takeovers, "an operator leads")
        name = self.takeovers()[-1].holder
        return next(part for part in self.operators if part.name == name)

    def other(self, part: Part) -> Part:
        """The other operator."""
        return next(one for one in self.operators if one is not part)

    def await_api(self) -> None:
        """Return once the API server is ready."""
        asked = ("get", "--raw", "/readyz")
        until(lambda: not self.cluster.kubectl(*asked, check=False).returncode, "the API is ready")

    def heal(self) -> None:
        """Resume and restart all parts."""
        for part in (self.etcd, self.api):
            part.thaw()
            part.start()
        self.await_api()
        for part in self.operators:
            part.thaw()
            part.start()

    def check(self) -> None:
        """Check that only leaders have written, and that no operator logged an unexpected error."""
        assert_no_stale_writes(self.histories())
        for part in self.operators:
            assert_no_errors(part.log)


@contextmanager
def world(folder: Path, terms: Terms) -> Iterator[World]:
    """Run a world in a folder. CannotStartError if there is no real control plane here."""
    kubectl = find_kubectl()
    plane = folder / "plane"
    plane.mkdir()
    cluster = Cluster(folder / "state", kubectl)
    cluster.directory.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(real_cluster(plane))
        kubeconfig = cluster.directory / "kubeconfig"
        kubeconfig.symlink_to(server.kubeconfig)
        parts = [
            _part(stack, "etcd", server.etcd, plane),
            _part(stack, "api", server.process, plane),
        ]
        proxies = [stack.enter_context(FaultProxy(server).beside()) for _ in range(2)]
        operators = [
            _operator(stack, name, proxy, folder, terms)
            for name, proxy in zip(("one", "two"), proxies, strict=True)
        ]
        made = World(cluster, *parts, tuple(operators), tuple(proxies))  # type: ignore[arg-type]
        _furnish(stack, made, server, folder)
        yield made


def _part(stack: ExitStack, name: str, process: object, folder: Path) -> Part:
    assert isinstance(process, subprocess.Popen)
    part = Part.of(name, process, folder / f"{name}-again.log")
    stack.callback(part.kill)
    return part


def _operator(stack: ExitStack, name: str, proxy: FaultProxy, folder: Path, terms: Terms) -> Part:
    path = proxy.kubeconfig(folder / f"{name}.kubeconfig")
    given = (str(terms.seconds), str(terms.renew_seconds), terms.outages)
    command = [sys.executable, str(PROGRAM), str(path), *given]
    part = Part(name, command, folder / f"{name}.log")
    stack.callback(part.kill)
    return part


def _furnish(stack: ExitStack, made: World, server: Server, folder: Path) -> None:
    services = [sys.executable, "-c", SERVICES, str(server.kubeconfig), str(folder / "volumes")]
    stack.enter_context(program(services))
    for number in range(NODES):
        stack.enter_context(Node(made.cluster, number))
    for part in made.operators:
        part.start()
    for name in DEFINITIONS:
        made.cluster.kubectl("wait", "--for=create", f"crd/{name}", "--timeout=60s")
        made.cluster.wait(f"crd/{name}", "condition=Established")
    for number in range(NODES):
        made.cluster.kubectl("wait", "--for=create", f"node/n{number}", "--timeout=60s")
        made.cluster.wait(f"node/n{number}", "condition=Ready")
    made.leader()
