#!/usr/bin/env python3
"""Write the schemas of the built-in kinds that the local API server serves.

    tools/kubernetes_schemas.py    writes src/unbroken/local/apiserver/data/kubernetes.json.gz

The source is the published OpenAPI document of Kubernetes (Apache-2.0), as the development
dependency `kubernetes-validate` carries it.  The tool keeps the kinds in `ROOTS` and the types that
they refer to, in the shape of OpenAPI v3 (`#/components/schemas/...`).  It undoes that package's
own change, which adds `null` to every optional type.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import kubernetes_validate

VERSION = "1.33"
TARGET = Path(__file__).parent.parent / "src/unbroken/local/apiserver/data/kubernetes.json.gz"
CORE = "io.k8s.api.core.v1."
META = "io.k8s.apimachinery.pkg.apis.meta.v1."
EXTENSIONS = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1."
ROOTS = [
    *(
        CORE + kind
        for kind in (
            "Namespace",
            "Pod",
            "Node",
            "Event",
            "ConfigMap",
            "Secret",
            "Service",
            "Endpoints",
            "ServiceAccount",
            "PersistentVolumeClaim",
            "PersistentVolume",
            "Binding",
        )
    ),
    *(
        "io.k8s.api." + kind
        for kind in (
            "events.v1.Event",
            "discovery.v1.EndpointSlice",
            "coordination.v1.Lease",
            "scheduling.v1.PriorityClass",
            "storage.v1.StorageClass",
            "policy.v1.Eviction",
            "policy.v1.PodDisruptionBudget",
            "batch.v1.Job",
            "autoscaling.v1.Scale",
            "rbac.v1.Role",
            "rbac.v1.RoleBinding",
            "rbac.v1.ClusterRole",
            "rbac.v1.ClusterRoleBinding",
            "authentication.v1.TokenReview",
            "authentication.v1.TokenRequest",
            "authentication.v1.SelfSubjectReview",
            "authorization.v1.SelfSubjectAccessReview",
            "authorization.v1.SelfSubjectRulesReview",
            "authorization.v1.SubjectAccessReview",
            "authorization.v1.LocalSubjectAccessReview",
        )
    ),
    EXTENSIONS + "CustomResourceDefinition",
    *(META + kind for kind in ("ListMeta", "ObjectMeta", "Status", "DeleteOptions", "Patch")),
]
PREFIX = "#/$defs/"
SPECIAL: dict[str, dict[str, Any]] = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {
        "x-kubernetes-int-or-string": True,
        "format": "int-or-string",
    },
    # A quantity may be written as a number; the server keeps the text.
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {
        "x-kubernetes-int-or-string": True,
        "format": "quantity",
    },
    META + "FieldsV1": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "io.k8s.apimachinery.pkg.runtime.RawExtension": {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    },
    EXTENSIONS + "JSON": {"x-kubernetes-preserve-unknown-fields": True},
    EXTENSIONS + "JSONSchemaPropsOrArray": {"x-kubernetes-preserve-unknown-fields": True},
    EXTENSIONS + "JSONSchemaPropsOrBool": {"x-kubernetes-preserve-unknown-fields": True},
    EXTENSIONS + "JSONSchemaPropsOrStringArray": {"x-kubernetes-preserve-unknown-fields": True},
}


def normal(value: Any) -> Any:
    """Take `null` out of types and point references into components."""
    if isinstance(value, list):
        return [normal(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: normal(item) for key, item in value.items()}
    if isinstance(out.get("type"), list):
        out["type"] = next(name for name in out["type"] if name != "null")
    if isinstance(out.get("enum"), list):
        out["enum"] = [item for item in out["enum"] if item is not None]
    if isinstance(out.get("$ref"), str):
        out["$ref"] = out["$ref"].replace(PREFIX, "#/components/schemas/")
    return out


def references(value: Any) -> set[str]:
    """Names of all definitions that `value` refers to."""
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    found = set().union(*map(references, value.values()))
    if isinstance(value.get("$ref"), str):
        found.add(value["$ref"].rpartition("/")[2])
    return found


def main() -> None:
    """Write the file; deterministic, so that a rerun changes nothing."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    source = json.loads((folder / f"v{VERSION}.0-local" / "_definitions.json").read_text())["$defs"]
    kept: dict[str, Any] = {}
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        if name in kept:
            continue
        description = source[name].get("description", "")
        special = SPECIAL.get(name)
        kept[name] = {"description": description, **special} if special else normal(source[name])
        todo += sorted(references(kept[name]))
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(kept)} schemas, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
