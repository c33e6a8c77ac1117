"""Write the definitions of KubeRay's kinds for the local cluster from KubeRay's own.

    tools/ray_definitions.py kuberay.crds.yaml.gz

The file is the output of `kubectl kustomize ray-operator/config/crd` of ray-project/kuberay, packed
with gzip.  Descriptions go, and pod templates become open objects, which the local cluster checks
as the pods that they would make.  `unbroken up` reads the file at each start.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parent.parent / "src/unbroken/local/ray/definitions.json"
KINDS = ("rayclusters.ray.io", "rayjobs.ray.io", "rayservices.ray.io")
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
OPENED = frozenset(
    {
        *("template", "submitterPodTemplate", "headService", "serveService", "ingress"),
        *("autoscalerOptions", "gcsFaultToleranceOptions", "networkPolicy"),
        "historyServerOptions",
    }
)
"""Fields that hold whole objects of Kubernetes, and fields that have no effect here."""


def slim(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without descriptions and with open pod templates."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {
                name: OPEN if name in OPENED else slim(field) for name, field in value.items()
            }
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            found[key] = slim(value)
        elif key != "description":
            found[key] = value
    return found


def definition(given: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of one kind."""
    spec = given["spec"]
    versions = [
        {
            **version,
            "schema": {"openAPIV3Schema": slim(version["schema"]["openAPIV3Schema"])},
        }
        for version in spec["versions"]
    ]
    return {
        "apiVersion": given["apiVersion"],
        "kind": given["kind"],
        "metadata": {"name": given["metadata"]["name"]},
        "spec": {**spec, "versions": versions},
    }


def main() -> None:
    """Write the definitions."""
    text = gzip.decompress(Path(sys.argv[1]).read_bytes())
    found = [
        definition(one)
        for one in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if one["metadata"]["name"] in KINDS
    ]
    OUT.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in found))


main()
