"""A namespace of a cluster with an operator of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.apiservers import Cluster
from tests.job_keys import MASTER
from tests.watching import running, until
from unbroken.kube.client import MERGE, KubeClient, connect
from unbroken.kube.errors import ApiRefusal
from unbroken.operator.driver import OperatorOptions, run_operator
from unbroken.operator.election import LeaderTerms
from unbroken.operator.kinds import INCIDENTS, JOBS

Object = dict[str, Any]
NUMBERS = itertools.count(1)
GROUPS = {
    "hyperpodpytorchjobs": JOBS,
    "incidents": INCIDENTS,
    "leases": "apis/coordination.k8s.io/v1",
    "pytorchjobs": "apis/kubeflow.org/v1",
    "rayclusters": "apis/ray.io/v1",
    "rayjobs": "apis/ray.io/v1",
    "fitjobs": "apis/fit.example/v1",
    "jobs": "apis/batch/v1",
    "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1",
    "workloads": "apis/kueue.x-k8s.io/v1beta2",
}


class Place:
    """A namespace, and plain requests; paths are short: `pods/a`, `incidents/lm-1`."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def path(self, what: str) -> str:
        """A path within the namespace; nodes have none."""
        plural = what.partition("/")[0]
        if plural == "nodes":
            return f"api/v1/{what}"
        return f"{GROUPS.get(plural, 'api/v1')}/namespaces/{self.namespace}/{what}"

    async def call(self, method: str, what: str, **arguments: Any) -> Object:
        """One request; its answer."""
        found: Object = msgspec.json.decode(
            await self.client.raw(method, self.path(what), **arguments)
        )
        return found

    async def post(self, what: str, body: Object) -> Object:
        """Create."""
        return await self.call("POST", what, body=body)

    async def merge(self, what: str, body: Object) -> Object:
        """Merge patch."""
        return await self.call("PATCH", what, body=body, headers=MERGE)

    async def delete(self, what: str, **options: Any) -> None:
        """Delete."""
        await self.call("DELETE", what, body=options)

    async def get(self, what: str) -> Object | None:
        """The object or the list; None if it is not there."""
        try:
            return await self.call("GET", what)
        except ApiRefusal as error:
            if error.code == 404:
                return None
            raise

    async def until(self, what: str, holds: Callable[[Object], object]) -> Object:
        """The object once it is there and `holds` is true of it."""
        found = await until(lambda: self.get(what), lambda one: one is not None and holds(one))
        assert found is not None
        return found

    async def absent(self, what: str) -> None:
        """Return once the object is not there."""
        await until(lambda: self.get(what), lambda found: found is None)

    async def event(self, reason: str) -> Object:
        """Return the only event of a reason, once there is one."""

        def found(listed: Object) -> list[Object]:
            return [one for one in listed["items"] if one["reason"] == reason]

        (one,) = found(await self.until("events", found))
        return one

    @asynccontextmanager
    async def operator(self, key: bytes = MASTER) -> AsyncIterator[None]:
        """Run an operator of this namespace's jobs while the block runs."""
        options = OperatorOptions(self.namespace, LeaderTerms("operator", self.namespace), key=key)
        async with running(run_operator(self.client, None, options)):
            await self.until("leases/operator", lambda lease: lease["spec"]["holderIdentity"])
            yield


@pytest.fixture(scope="session")
def aws_python() -> Path:
    """A Python that has boto3 and moto (tools/setup.sh makes it)."""
    named = os.environ.get("UNBROKEN_AWS")
    folder = Path(named) if named else Path(sys.prefix) / "aws/bin"
    if shutil.which(folder / "python") is None:
        pytest.skip(f"no Python in {folder} (tools/setup.sh makes it; or set UNBROKEN_AWS)")
    return folder / "python"


@pytest.fixture
def place(cluster: Cluster) -> Callable[[], Any]:
    """Opens a new namespace of the cluster."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Place]:
        name = f"operator-{next(NUMBERS)}"
        async with connect(cluster.kubeconfig) as client:
            await client.raw("POST", "api/v1/namespaces", body={"metadata": {"name": name}})
            yield Place(client, name)

    return opened


def job(name: str = "lm", replicas: int = 2, **spec: Any) -> Object:
    """A job of one replica spec `pods`."""
    container = {"name": "main", "image": "any", "command": ["hyperpodrun", "train.py"]}
    template = {"spec": {"containers": [container]}}
    replica = {"name": "pods", "replicas": replicas, "template": template}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name},
        "spec": {"nprocPerNode": "1", "replicaSpecs": [replica], **spec},
    }


def own_address(number: int) -> str:
    """Return a loopback address that no other test process has, for a port that is fixed."""
    pid = os.getpid() % 65_536
    return f"127.{100 + number}.{pid // 256}.{pid % 256}"


def conditions(found: Object) -> dict[str, Object]:
    """Conditions of a job that are true, by type."""
    listed = (found.get("status") or {}).get("conditions") or ()
    return {one["type"]: one for one in listed if one["status"] == "True"}
