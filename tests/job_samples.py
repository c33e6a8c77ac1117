"""Manifests that cases start from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).parent / "spec/manifests"
Object = dict[str, Any]


def published(name: str) -> Object:
    """A manifest of a public guide, its placeholders filled."""
    loaded: Object = yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text())
    return loaded


def template() -> Object:
    """The smallest pod template."""
    return {"spec": {"containers": [{"name": "main", "image": "train"}]}}


def job(name: str = "llm", **spec: Any) -> Object:
    """The smallest good job; `spec` adds to its spec or replaces what is there."""
    replica = {"name": "pods", "replicas": 2, "template": template()}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicaSpecs": [replica], **spec},
    }


def changed(path: str, value: Any, base: Object | None = None) -> Object:
    """A job in which what is at `path` (`spec/replicaSpecs/0/name`) is `value`; ... removes it."""
    manifest = copy.deepcopy(base or job())
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    place: Any = manifest
    for parent in parents:
        place = place[parent] if isinstance(place, list) else place.setdefault(parent, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return manifest


def rule(**fields: Any) -> Object:
    """A job with one log rule; None removes a field."""
    whole = {"name": "r", "logPattern": "loss=(.*)", "expectedStartCutOffInSeconds": 9, **fields}
    kept = {key: value for key, value in whole.items() if value is not None}
    return job(runPolicy={"logMonitoringConfiguration": [kept]})
