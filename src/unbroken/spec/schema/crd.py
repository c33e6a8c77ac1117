"""The CustomResourceDefinitions, made from the dataclasses.

The schema is exact where reading is lenient: the API stores what stock clients can read. Rules in
CEL are for Kubernetes 1.25 and later; `parse` checks the rest, at admission or later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from msgspec import inspect

from unbroken import __version__
from unbroken.spec.job import incident as incidents
from unbroken.spec.job import types as jobs
from unbroken.spec.job.codec import OTHER, SECONDS
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.log_rules import (
    OPERATOR_NEEDS_THRESHOLD,
    POINTS_NEED_THRESHOLD,
    THRESHOLD_NEEDS_OPERATOR,
)
from unbroken.spec.job.rules import (
    LABEL,
    NO_ELASTIC,
    NO_REPLICAS,
    NOT_A_LABEL,
    NOT_NPROC,
    NPROC_WORDS,
    PODS_MAX,
    TOO_MANY_PODS,
)
from unbroken.spec.job.types import (
    ElasticPolicy,
    JobSpec,
    JobStatus,
    LogRule,
    ReplicaSpec,
    RunPolicy,
)
from unbroken.spec.keys import MADE_BY, ConditionType
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE, NODE_CHECK, NODE_RECORD, OWN_KINDS, OwnKind
from unbroken.typed_fields import Field, ValueType, value_type

from .descriptions import DESCRIPTIONS, INCIDENT, JOB, KINDS, NODE_DESCRIPTIONS
from .fields import CHOICES, INT_MAX, IS_INT_OR_STRING, fields_of, scalar_of

Schema = dict[str, Any]
OPEN: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
STRING: Schema = {"type": "string"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
TEXTS = {**DESCRIPTIONS, **NODE_DESCRIPTIONS}
NO_DEFAULT = ("fault_on_match",)
"""sagemaker-hyperpod 3.12 cannot list jobs that have the key, whatever its value."""


def _object(properties: Schema, required: Iterable[str] = ()) -> Schema:
    needed = list(required)
    return {
        "type": "object",
        **({"required": needed} if needed else {}),
        "properties": properties,
    }


TEMPLATE: Schema = {
    **OPEN,
    "required": ["spec"],
    "properties": {
        "metadata": OPEN,
        "spec": {
            **OPEN,
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {**OPEN, "required": ["name"], "properties": {"name": STRING}},
                }
            },
        },
    },
}
REFERENCE_KEYS = ("apiVersion", "fieldPath", "kind", "name", "namespace", "resourceVersion", "uid")
REFERENCE = _object(dict.fromkeys(REFERENCE_KEYS, STRING))
REFERENCES: Schema = {"type": "array", "items": REFERENCE}
TIME: Schema = {"type": "string", "format": "date-time"}
PLAIN = {"time": TIME, "boolean": {"type": "boolean"}, "object": OPEN, "strings": STRINGS}
"""Schemas of scalars without limits."""
OTHERS: Schema = {
    "managerPods": REFERENCE,
    "podManagerStatuses": REFERENCES,
    "podSetInfos": {
        "type": "array",
        "items": _object(
            {
                "annotations": STRINGS,
                "labels": STRINGS,
                "nodeSelector": STRINGS,
                "tolerations": {"type": "array", "items": OPEN},
            }
        ),
    },
    "podSets": {
        "type": "array",
        "items": _object(
            {
                "count": {"type": "integer"},
                "minCount": {"type": "integer"},
                "name": STRING,
                "template": OPEN,
            },
            ["template"],
        ),
    },
    "elasticScalingStatus": _object(
        {
            "targetReplicas": {"type": "object", "additionalProperties": {"type": "integer"}},
            "lastUpdated": TIME,
            "lastScalingTime": TIME,
            "lastRestartTime": TIME,
            "podsScaled": {"type": "boolean"},
            "isFaultyPodScaleDown": {"type": "boolean"},
            "consecutiveScalingFailures": {"type": "integer"},
        }
    ),
    "elasticWorkloadRef": STRINGS,
}
"""Fields that others may write into a job's status (sagemaker-hyperpod 3.12)."""

LABEL_CEL = f"matches('^{LABEL.pattern}$')"

RULES: Mapping[tuple[type, str], Mapping[str, str]] = {
    (JobSpec, ""): {
        "!has(self.elasticPolicy)": f"{NO_ELASTIC}spec.elasticPolicy and maxReplicas",
    },
    (JobSpec, "nproc_per_node"): {
        f"type(self) != string || self in {list(NPROC_WORDS)} || "
        f"self.matches('^[0-9]{{1,10}}$') && int(self) > 0 && int(self) <= {INT_MAX}": NOT_NPROC,
        f"type(self) == string || self > 0 && self <= {INT_MAX}": NOT_NPROC,
    },
    (JobSpec, "replica_specs"): {
        "self.exists(r, r.replicas > 0)": NO_REPLICAS,
        f"self.map(r, r.replicas + r.spares).sum() <= {PODS_MAX}": TOO_MANY_PODS,
    },
    (ReplicaSpec, ""): {
        "!has(self.maxReplicas) || self.maxReplicas == self.replicas": (
            f"{NO_ELASTIC}maxReplicas, or set it to replicas"
        ),
    },
    (ReplicaSpec, "name"): {f"self.{LABEL_CEL}": NOT_A_LABEL},
    (ElasticPolicy, ""): {
        "!(has(self.replicaIncrementStep) && has(self.replicaDiscreteValues))": (
            "replicaIncrementStep and replicaDiscreteValues exclude each other"
        ),
    },
    (RunPolicy, "workload_mode"): {"self == ''": f"{NO_ELASTIC}workloadMode"},
    (LogRule, ""): {
        "!has(self.metricThreshold) || has(self.operator)": THRESHOLD_NEEDS_OPERATOR,
        "!has(self.operator) || has(self.metricThreshold)": OPERATOR_NEEDS_THRESHOLD,
        "has(self.metricThreshold) || self.metricEvaluationDataPoints <= 1": POINTS_NEED_THRESHOLD,
    },
}
"""Rules in CEL and their messages, by record and field; no field: the record.  Each is one that
`parse_job` has, too (tests/spec/test_spec_cel.py).

None is about a job's name, which CEL sees from the root of the object alone. Such a rule holds for
every write (tried on 1.36.4), so a job stored before the rule could not lose a finalizer.
"""


def _rules(told: Mapping[str, str]) -> Schema:
    """Return the rules as part of a schema; empty without any."""
    listed = [{"rule": rule, "message": message} for rule, message in told.items()]
    return {"x-kubernetes-validations": listed} if listed else {}


def definitions() -> tuple[dict[str, Any], ...]:
    """Return all definitions that the operator needs."""
    return job_definition(), incident_definition(), *map(own_definition, OWN_KINDS)


def job_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of HyperPodPyTorchJob."""
    status = _record(JobStatus, has_defaults=False)
    del status["properties"][OTHER]
    status["properties"].update(OTHERS)
    columns = [
        # core/job/record/conditions keeps the true one last: a path cannot select the last true
        # one.
        _column("State", ".status.conditions[-1:].type", "The state it is in."),
        _column(
            "Ready",
            f'.status.conditions[?(@.type=="{ConditionType.PODS_RUNNING.value}")].message',
            "Pods that run, of those that train.",
        ),
        _column("Spares", ".spec.replicaSpecs[*].spares", "Pods that wait.", "integer"),
        _column("Restarts", ".status.restartCount", "Restarts so far.", "integer"),
        _column(
            "Last fault",
            '.status.conditions[?(@.type=="Faulted")].reason',
            "Class of the latest fault.",
        ),
        AGE,
    ]
    names = ("hyperpodpytorchjob", jobs.PLURAL, jobs.KIND, ["hpj"])
    spec = _record(JobSpec)
    content = _object({"spec": spec, "status": status}, ["spec"])
    return _definition(jobs.GROUP, names, {"description": JOB, **content}, columns, has_status=True)


def incident_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of Incident."""
    spec = _record(Incident, has_defaults=False)
    cost = "Seconds from the fault to the next progress, or to the end; absent: open, or not known."
    spec["properties"][SECONDS] = {"type": "number", "description": cost}
    columns = [
        _column("Fault", ".spec.fault", "Fault, as the job's condition names it."),
        _column("Pod", ".spec.culprit.pod", "The pod that failed first."),
        _column("Rank", ".spec.culprit.rank", "The rank that failed first.", "integer"),
        _column("Remedy", ".spec.remedy", "What was done."),
        _column("Seconds", f".spec.{SECONDS}", "Time lost.", "number"),
        _column("Outcome", ".spec.outcome", "How it ended."),
        AGE,
    ]
    names = ("incident", incidents.PLURAL, incidents.KIND, ["inc"])
    content = {"description": INCIDENT, **_object({"spec": spec}, ["spec"])}
    return _definition(incidents.GROUP, names, content, columns, has_status=False)


def own_definition(kind: OwnKind[Any, Any]) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind about nodes."""
    parts = {"spec": _record(kind.spec, has_defaults=False)}
    if kind.status is not None:
        parts["status"] = _record(kind.status, has_defaults=False)
    content = {"description": KINDS[kind.kind], **_object(parts, ["spec"])}
    names = (kind.kind.lower(), kind.plural, kind.kind, [kind.short])
    columns = [*COLUMNS[kind.kind], AGE]
    has_status = kind.status is not None
    made = _definition(incidents.GROUP, names, content, columns, has_status=has_status)
    made["spec"]["scope"] = "Cluster"
    return made


def _column(name: str, path: str, text: str, kind: str = "string") -> dict[str, Any]:
    return {"name": name, "type": kind, "description": text, "jsonPath": path}


AGE = _column("Age", ".metadata.creationTimestamp", "Time since it was created.", "date")
COLUMNS: Mapping[str, list[dict[str, Any]]] = {
    CLUSTER.kind: [
        _column("Status", ".status.phase", "As of the cluster API."),
        _column("Recovery", ".spec.nodeRecovery", "Whether nodes are repaired."),
    ],
    MACHINE.kind: [
        _column("Phase", ".status.phase", "Where it stands."),
        _column("Type", ".spec.instanceType", "Instance type."),
        _column("Cluster", ".spec.cluster", "Cluster that it belongs to."),
        _column("Group", ".spec.instanceGroup", "Instance group."),
        _column("Boots", ".status.boots", "Reboots carried out.", "integer"),
        _column("Resets", ".status.resets", "Resets of its GPUs carried out.", "integer"),
        _column("Message", ".status.message", "What it waits for, or why it failed."),
    ],
    NODE_CHECK.kind: [
        _column("Phase", ".status.phase", "Where it stands."),
        _column("Done", ".status.done", "Tests so far.", "integer"),
        _column("Of", ".status.total", "Tests in all.", "integer"),
        _column("Faulty", ".status.faulty", "Nodes found at fault."),
        _column("Message", ".status.message", "What was found."),
    ],
    NODE_RECORD.kind: [
        _column("Repair", ".spec.repair.action", "The repair under way."),
        _column("State", ".spec.repair.state", "Where it stands."),
        _column("Quarantined", ".spec.quarantinedAt", "Since when.", "date"),
        _column("Message", ".spec.repair.message", "What it waits for."),
    ],
}


def _definition(
    group: str,
    names: tuple[str, str, str, list[str]],
    schema: Schema,
    columns: list[dict[str, Any]],
    *,
    has_status: bool,
) -> dict[str, Any]:
    singular, plural, kind, short = names
    version = {
        "name": jobs.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        **({"subresources": {"status": {}}} if has_status else {}),
        "additionalPrinterColumns": columns,
    }
    named = {"singular": singular, "plural": plural, "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": {MADE_BY: __version__}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {**named, **({"shortNames": short} if short else {})},
            "versions": [version],
        },
    }


def _record(record: type, *, has_defaults: bool = True) -> Schema:
    """Return the schema of a dataclass."""
    texts = TEXTS[record.__name__]
    properties = {}
    for field in fields_of(record):
        result = _schema(field.value, has_defaults)
        if field.name == "template" and record is ReplicaSpec:
            result = dict(TEMPLATE)
        if has_defaults and field.name not in NO_DEFAULT:
            result |= _default(field)
        if field.name in texts:
            result["description"] = texts[field.name]
        result |= _rules(RULES.get((record, field.name), {}))
        properties[field.key] = result
    required = [field.key for field in fields_of(record) if field.default is None]
    return {**_object(properties, required), **_rules(RULES.get((record, ""), {}))}


def _default(field: Field) -> Schema:
    """Return the default of a scalar; records and lists have none to show."""
    value = field.default() if field.default is not None else None
    if value is None or isinstance(value, Mapping | tuple) or is_dataclass(value):
        return {}
    return {"default": value.value if isinstance(value, Enum) else value}


def _schema(of: ValueType, has_defaults: bool) -> Schema:
    match of.type:
        case inspect.DataclassType(cls=record):
            return _record(record, has_defaults=has_defaults)
        case inspect.EnumType(cls=members):
            return {"type": "string", "enum": [member.value for member in members]}
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            result = {"type": "array", "items": _schema(value_type(item), has_defaults)}
            if isinstance(item, inspect.DataclassType) and item.cls is ReplicaSpec:
                result |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
            return {**result, **_bounds("Items", least, most)}
        case inspect.StrType() if IS_INT_OR_STRING in of.extra:
            return {"x-kubernetes-int-or-string": True}
        case inspect.StrType(min_length=least, max_length=most):
            choices = {"enum": list(of.extra[CHOICES])} if CHOICES in of.extra else {}
            return {**STRING, **choices, **_bounds("Length", least, most)}
        case _:
            return _scalar(of)


def _scalar(of: ValueType) -> Schema:
    """Return the schema of anything but records, lists, enums and texts."""
    scalar = scalar_of(of)
    assert scalar is not None
    if scalar.name in PLAIN:
        return dict(PLAIN[scalar.name])
    assert isinstance(of.type, inspect.IntType | inspect.FloatType)
    result: Schema = {"type": scalar.name}
    if scalar.name == "integer":
        result["format"] = "int32" if of.type.le == INT_MAX else "int64"
    return result if of.type.ge is None else {**result, "minimum": of.type.ge}


def _bounds(of: str, least: int | None, most: int | None) -> Schema:
    return {
        **({f"min{of}": least} if least else {}),
        **({f"max{of}": most} if most is not None else {}),
    }
