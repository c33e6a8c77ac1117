"""PyTorchJobs on API servers without nodes and without their controllers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import unbroken.local
from tests.operator.conftest import Place
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient
from unbroken.kube.errors import ApiRefusal
from unbroken.spec.keys import (
    AUTO_RESUME,
    MAX_RETRIES,
    PYTORCHJOB_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_TYPE_LABEL,
)

Object = dict[str, Any]
DEFINITION = Path(unbroken.local.__file__).parent / "kubeflow/definition.yaml"
DEFINITIONS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BOTH = {AUTO_RESUME: "true", MAX_RETRIES: "1"}


async def install(client: KubeClient) -> None:
    """Install the kind if it is not there."""
    body = yaml.safe_load(DEFINITION.read_text())
    try:
        await client.raw("POST", DEFINITIONS, body=body)
    except ApiRefusal as error:
        if error.code != 409:
            raise WorldError(str(error)) from error


def pytorchjob(name: str = "lm", workers: int = 2, **more: Any) -> Object:
    """Return a job of workers that is auto-resumed once at most."""
    template = {"spec": {"containers": [{"name": "pytorch", "image": "any", "command": ["true"]}]}}
    replicas = {"Worker": {"replicas": workers, "template": template}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "annotations": BOTH},
        "spec": {"pytorchReplicaSpecs": replicas},
        **more,
    }


async def add_node(place: Place, name: str) -> None:
    """Create a node that is ready."""
    await place.post("nodes", {"metadata": {"name": name}})
    await say_ready(place, name, "True")


async def say_ready(
    place: Place, name: str, status: str, since: str = "2026-01-31T12:00:00Z"
) -> None:
    """Set the node's Ready condition."""
    condition = {"type": "Ready", "status": status, "reason": "Test", "message": ""}
    condition["lastTransitionTime"] = since
    body = {"status": {"conditions": [condition]}}
    await place.merge(f"nodes/{name}/status", body)


async def add_pod(place: Place, job: Object, index: int, node: str) -> Object:
    """Create a running pod of the job, as its operator does."""
    metadata = job["metadata"]
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "controller": True}
    labels = {
        PYTORCHJOB_LABEL: metadata["name"],
        REPLICA_TYPE_LABEL: "worker",
        REPLICA_INDEX_LABEL: str(index),
    }
    name = f"{metadata['name']}-worker-{index}"
    container = {"name": "pytorch", "image": "any", "command": ["true"]}
    made = await place.post(
        "pods",
        {
            "metadata": {
                "name": name,
                "labels": labels,
                "ownerReferences": [{**owner, "name": metadata["name"], "uid": metadata["uid"]}],
            },
            "spec": {"nodeName": node, "restartPolicy": "OnFailure", "containers": [container]},
        },
    )
    await place.client.merge(place.path(f"pods/{name}/status"), {"status": {"phase": "Running"}})
    return made
