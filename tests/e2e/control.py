"""The parts that keep jobs running, with the means to stop, kill and switch them off."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.apiclient import Api
from tests.cluster_logs import assert_no_errors
from tests.e2e.clusters import UNBROKEN, Cluster

LEASES = "coordination.k8s.io/v1:leases"


class ApiPlace(NamedTuple):
    """Properties of a server that `Api` needs."""

    url: str
    token: str
    ca: str
    minor: int = 33

    @property
    def headers(self) -> dict[str, str]:
        """Headers that authenticate a request."""
        return {"Authorization": f"Bearer {self.token}"}


def api_of(cluster: Cluster, namespace: str = "default") -> Api:
    """Return a client for plain requests to a cluster."""
    config = yaml.safe_load((cluster.directory / "kubeconfig").read_text())
    place, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    ca = base64.b64decode(place.get("certificate-authority-data", "")).decode()
    return Api(ApiPlace(place["server"], user["token"], ca), namespace)  # type: ignore[arg-type]


class Operator:
    """`unbroken operator` in a process of its own."""

    def __init__(self, cluster: Cluster, log: Path, *options: str) -> None:
        self._cluster = cluster
        self._log = log
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it leads."""
        command = [*UNBROKEN, "operator", *self._cluster.operator_options, *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        mark = f"/{self._process.pid}/"
        api = api_of(self._cluster, "kube-system")
        found = api.until(
            LEASES, "unbroken-operator", lambda lease: mark in lease["spec"]["holderIdentity"]
        )
        if not found:
            with api.watch(LEASES) as watch:
                while mark not in watch.event()["object"]["spec"]["holderIdentity"]:
                    pass
        api.close()

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it with SIGSTOP during the block."""
        assert self._process is not None
        with frozen(self._process.pid):
            yield

    def assert_well(self) -> None:
        """Assert that it runs and has logged no unexpected error."""
        assert self._process is not None
        assert self._process.poll() is None
        assert_no_errors(self._log)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process with SIGSTOP during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def power(cluster: Cluster, node: str, state: str | None) -> None:
    """Switch a node off, or on again."""
    api = api_of(cluster)
    annotations = {"unbroken.dev/power": state}
    api.patch("merge", f"/api/v1/nodes/{node}", {"metadata": {"annotations": annotations}}).done()
    api.close()


def is_ready(node: dict[str, dict[str, list[dict[str, str]]]]) -> bool:
    """Return whether the node is Ready."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])


def is_tainted(node: dict[str, dict[str, list[dict[str, str]]]]) -> bool:
    """Return whether the node has taints."""
    return bool(node["spec"].get("taints"))
