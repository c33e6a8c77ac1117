"""Definitions of Kueue's kinds, limited to the fields that a job's owner uses.

They are a subset of kueue v0.16 (config/components/crd/bases, Apache-2.0), with the types, limits,
patterns and required fields of the originals, and without their texts.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
GROUP = "kueue.x-k8s.io"
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
POD_SET_NAME = {
    "type": "string",
    "default": "main",
    "maxLength": 63,
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
}
TEXT: Object = {"type": "string"}
NUMBER: Object = {"type": "integer", "format": "int32"}
ANYTHING: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
QUANTITY: Object = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}


def record(*required: str, **properties: Object) -> Object:
    """Return the schema of an object."""
    found: Object = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def texts(values: Object = TEXT) -> Object:
    """Return the schema of a map."""
    return {"type": "object", "additionalProperties": values}


def listed(items: Object, most: int, key: str = "") -> Object:
    """Return the schema of a list, merged by key or as a whole."""
    kind: Object = {"x-kubernetes-list-type": "atomic"}
    if key:
        kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": items, "maxItems": most, **kind}


TOLERATIONS = listed(
    record(effect=TEXT, key=TEXT, operator=TEXT, value=TEXT, tolerationSeconds={"type": "integer"}),
    8,
)
CONDITION = record(
    *("lastTransitionTime", "message", "reason", "status", "type"),
    type={"type": "string", "maxLength": 316},
    status={"type": "string", "enum": ["True", "False", "Unknown"]},
    reason={
        "type": "string",
        "minLength": 1,
        "maxLength": 1024,
        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
    },
    message={"type": "string", "maxLength": 32768},
    lastTransitionTime={"type": "string", "format": "date-time"},
    observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
)
TOPOLOGY_REQUEST = record(
    required={"type": "string", "maxLength": 63},
    preferred={"type": "string", "maxLength": 63},
    unconstrained={"type": "boolean"},
    podIndexLabel={"type": "string", "maxLength": 317},
    podSetGroupName={"type": "string", "maxLength": 256},
    podSetSliceRequiredTopology={"type": "string", "maxLength": 63},
    podSetSliceSize=NUMBER,
)
LEVELS = {**listed({"type": "string", "maxLength": 317}, 16), "minItems": 1}
VALUES = record(
    prefix={"type": "string", "maxLength": 63},
    suffix={"type": "string", "maxLength": 63},
    roots=listed({"type": "string", "maxLength": 63}, 100000),
    universalValue={"type": "string", "maxLength": 63},
)
SLICE = record(
    *("domainCount", "valuesPerLevel"),
    domainCount={**NUMBER, "minimum": 1},
    valuesPerLevel=listed(VALUES, 16),
    podCounts=listed(NUMBER, 100000),
    universalPodCount=NUMBER,
)
DOMAIN = record("count", "values", count={**NUMBER, "minimum": 1}, values=listed(TEXT, 16))


def assignment(version: str) -> Object:
    """Return the schema of a topology assignment, which the versions write differently."""
    if version == "v1beta1":
        return record("levels", "domains", levels=LEVELS, domains=listed(DOMAIN, 100000))
    return record("levels", "slices", levels=LEVELS, slices=listed(SLICE, 1000))


def workload_spec(version: str) -> Object:
    """Return the schema of a Workload's spec."""
    template = record(metadata=record(labels=texts(), annotations=texts()), spec=ANYTHING)
    pod_set = record(
        *("count", "template"),
        name=POD_SET_NAME,
        count={**NUMBER, "default": 1, "minimum": 0},
        minCount={**NUMBER, "minimum": 1},
        template=template,
        topologyRequest=TOPOLOGY_REQUEST,
    )
    shared = {
        "podSets": {**listed(pod_set, 8, "name"), "minItems": 1},
        "queueName": {"type": "string", "maxLength": 253, "pattern": NAME},
        "priority": NUMBER,
        "active": {"type": "boolean", "default": True},
        "maximumExecutionTimeSeconds": {**NUMBER, "minimum": 1},
    }
    if version == "v1beta1":
        sources = ["kueue.x-k8s.io/workloadpriorityclass", "scheduling.k8s.io/priorityclass", ""]
        source = {"type": "string", "default": "", "enum": sources}
        return record(
            priorityClassName={"type": "string", "maxLength": 253, "pattern": NAME},
            priorityClassSource=source,
            **shared,
        )
    reference = record(
        *("group", "kind", "name"),
        group={"type": "string", "enum": [GROUP, "scheduling.k8s.io"]},
        kind={"type": "string", "enum": ["WorkloadPriorityClass", "PriorityClass"]},
        name={"type": "string", "minLength": 1, "maxLength": 253, "pattern": NAME},
    )
    return record(priorityClassRef=reference, **shared)


def workload_status(version: str) -> Object:
    """Return the schema of a Workload's status."""
    assigned = record(
        "name",
        name=POD_SET_NAME,
        flavors=texts({"type": "string", "maxLength": 253, "pattern": NAME}),
        resourceUsage=texts(QUANTITY),
        count={**NUMBER, "minimum": 0},
        topologyAssignment=assignment(version),
    )
    update = record(
        "name",
        name=POD_SET_NAME,
        labels=texts(),
        annotations=texts(),
        nodeSelector=texts(),
        tolerations=TOLERATIONS,
    )
    check = record(
        *("lastTransitionTime", "message", "name", "state"),
        name={"type": "string", "minLength": 1, "maxLength": 316},
        state={"type": "string", "enum": ["Pending", "Ready", "Retry", "Rejected"]},
        message={"type": "string", "maxLength": 32768},
        lastTransitionTime={"type": "string", "format": "date-time"},
        podSetUpdates=listed(update, 8),
    )
    return record(
        conditions=listed(CONDITION, 16, "type"),
        admission=record(
            *("clusterQueue", "podSetAssignments"),
            clusterQueue={"type": "string", "maxLength": 253, "pattern": NAME},
            podSetAssignments=listed(assigned, 8, "name"),
        ),
        admissionChecks=listed(check, 8, "name"),
        requeueState=record(
            count={**NUMBER, "minimum": 0}, requeueAt={"type": "string", "format": "date-time"}
        ),
        accumulatedPastExecutionTimeSeconds=NUMBER,
    )


def definition(kind: str, plural: str, scope: str, schemas: dict[str, Object]) -> Object:
    """Return the definition of a kind; the first version is the one that is stored."""
    stored = next(iter(schemas))
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            # The API server asks for this of every group below k8s.io.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test's subset"},
        },
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == stored,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
                for version, schema in schemas.items()
            ],
        },
    }


def definitions(*versions: str) -> list[Object]:
    """Return the definitions of every kind that is needed."""
    taint = record("effect", "key", effect=TEXT, key=TEXT, value=TEXT)
    flavor = record(
        nodeLabels=texts(), nodeTaints=listed(taint, 8), tolerations=TOLERATIONS, topologyName=TEXT
    )
    workloads = {v: record(spec=workload_spec(v), status=workload_status(v)) for v in versions}
    flavors = {version: record(spec=flavor) for version in versions}
    priorities = {version: record("value", value=NUMBER, description=TEXT) for version in versions}
    return [
        definition("Workload", "workloads", "Namespaced", workloads),
        definition("ResourceFlavor", "resourceflavors", "Cluster", flavors),
        definition("WorkloadPriorityClass", "workloadpriorityclasses", "Cluster", priorities),
    ]
