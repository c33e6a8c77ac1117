"""Provider of machines in a thread of the test, for tests without a real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.deploy.charts import Object

MACHINES = "/apis/unbroken.dev/v1/machines"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
SECONDS = 0.2
"""Seconds between two looks."""
FAILS = "fails"
"""Instance group whose machines cannot come up."""
INFO = dict.fromkeys(
    [
        *("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion"),
        *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
    ],
    "",
)


@contextmanager
def hands(cluster: Cluster) -> Iterator[None]:
    """Bring machines up as nodes that no pod fits on, reboot and remove them, during the block."""
    over = threading.Event()
    failures: list[Exception] = []

    def work() -> None:
        with closing(Api(cluster)) as api:
            while not over.wait(SECONDS):
                try:
                    for machine in api.get(MACHINES).made["items"]:
                        _look(api, machine)
                except (AssertionError, OSError, KeyError) as error:
                    failures.append(error)

    thread = threading.Thread(target=work, name="hands")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures, failures


def _look(api: Api, machine: Object) -> None:
    metadata, spec, status = machine["metadata"], machine["spec"], machine.get("status") or {}
    name = metadata["name"]
    if metadata.get("deletionTimestamp"):
        api.delete(f"/api/v1/nodes/{name}")
        api.patch("merge", f"{MACHINES}/{name}", {"metadata": {"finalizers": None}})
        return
    if spec.get("instanceGroup") == FAILS:
        _say(api, name, status, {"phase": "Failed", "message": "OnCreate ended with 1"})
        return
    boots = spec.get("boots", 0)
    _renew(api, name)
    if status.get("boots", 0) != boots or status.get("phase") != "Running":
        _join(api, name, spec, boots)
    _say(api, name, status, {"phase": "Running", "boots": boots})


def _say(api: Api, name: str, before: Object, status: Object) -> None:
    if any(before.get(key) != value for key, value in status.items()):
        body = {"status": status}
        # It may be gone by now.
        assert api.patch("merge", f"{MACHINES}/{name}/status", body).code in (200, 404)


def _join(api: Api, name: str, spec: Object, boots: int) -> None:
    node = {"metadata": {"name": name, "labels": spec.get("labels") or {}}}
    assert api.post("/api/v1/nodes", node).code in (201, 409)
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    ready = {"type": "Ready", "status": "True", "reason": "Up", "lastTransitionTime": now}
    nothing = {"cpu": "0", "memory": "0", "pods": "0"}
    status = {
        "conditions": [ready],
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "capacity": nothing,
        "allocatable": nothing,
        "nodeInfo": {**INFO, "bootID": f"boot-{boots}"},
    }
    api.patch("merge", f"/api/v1/nodes/{name}/status", {"status": status}).done()


def _renew(api: Api, name: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
    }
    api.apply(f"{LEASES}/{name}", body, force=True).done()
