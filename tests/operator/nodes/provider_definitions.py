"""Definitions of Karpenter's NodeClaim (v1) and Cluster API's Machine (v1beta2).

They have the fields that a provider looks at, with the types, the required fields and the status
subresource that the two projects document; of the others they keep what they are given.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
TEXT: Object = {"type": "string"}
TIME: Object = {"type": "string", "format": "date-time"}


def record(required: tuple[str, ...] = (), **fields: Object) -> Object:
    """Schema of an object."""
    made: Object = {
        "type": "object",
        "properties": fields,
        "x-kubernetes-preserve-unknown-fields": True,
    }
    return {**made, "required": list(required)} if required else made


def items(item: Object) -> Object:
    """Schema of a list."""
    return {"type": "array", "items": item}


def version(name: str, spec: Object, status: Object) -> Object:
    """One version of a kind."""
    return {
        "name": name,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": record(spec=spec, status=status)},
    }


def definition(group: str, kind: str, scope: str, *versions: Object) -> Object:
    """A CustomResourceDefinition."""
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # The group is Kubernetes' own, which wants an approval named.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": list(versions),
        },
    }


CONDITIONS = items(
    record(("type", "status"), type=TEXT, status=TEXT, reason=TEXT, lastTransitionTime=TIME)
)
NODECLAIMS = definition(
    "karpenter.sh",
    "NodeClaim",
    "Cluster",
    version(
        "v1",
        record(
            ("nodeClassRef", "requirements"),
            nodeClassRef=record(("group", "kind", "name"), group=TEXT, kind=TEXT, name=TEXT),
            requirements=items(
                record(("key", "operator"), key=TEXT, operator=TEXT, values=items(TEXT))
            ),
            expireAfter=TEXT,
            terminationGracePeriod=TEXT,
        ),
        record(nodeName=TEXT, providerID=TEXT, imageID=TEXT, conditions=CONDITIONS),
    ),
)
GROUPED = record(("apiGroup", "kind", "name"), apiGroup=TEXT, kind=TEXT, name=TEXT)
MACHINES = definition(
    "cluster.x-k8s.io",
    "Machine",
    "Namespaced",
    version(
        "v1beta2",
        record(
            ("bootstrap", "clusterName", "infrastructureRef"),
            bootstrap=record(configRef=GROUPED, dataSecretName=TEXT),
            clusterName=TEXT,
            infrastructureRef=GROUPED,
            providerID=TEXT,
        ),
        record(nodeRef=record(("name",), name=TEXT), phase=TEXT, conditions=CONDITIONS),
    ),
)
