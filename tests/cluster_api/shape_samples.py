"""Values for every shape of the cluster API: good ones, and ones that break one constraint each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unbroken.cluster_api.shapes import ApiShape, ServiceModel, Type

UUID = "01234567-89ab-cdef-0123-456789abcdef"
ARN = "arn:aws:sagemaker:us-west-2:123456789012:"
NODE = "i-0123456789abcdef0"

TEXTS = {
    "AlarmName": "alarm",
    "BatchAddClusterNodesRequestClientTokenString": "token",
    "ClusterAccountingDatabaseEndpoint": "db.example.com",
    "ClusterAccountingDatabaseSecretArn": "arn:aws:secretsmanager:us-west-2:123456789012:secret:s",
    "ClusterArn": f"{ARN}cluster/abcdef012345",
    "ClusterAvailabilityZone": "us-west-2a",
    "ClusterDnsName": "fs-0123456789abcdef.fsx.us-west-2.amazonaws.com",
    "ClusterFsxMountPath": "/fsx",
    "ClusterNetworkInterfaceId": "eni-01234567",
    "ClusterNodeId": NODE,
    "ClusterNodeLogicalId": "node-1",
    "ClusterOperationId": UUID,
    "ClusterSchedulerConfigId": "abcdef012345",
    "ComputeQuotaId": "abcdef012345",
    "EksClusterArn": "arn:aws:eks:us-west-2:123456789012:cluster/eks",
    "EventId": UUID,
    "ExtensionArn": f"{ARN}extension/eks-addon/name/abc",
    "ExtensionVersion": "1.2.3",
    "ImageId": "default",
    "ImageReleaseVersion": "1.2.3",
    "ResourceArn": f"{ARN}cluster/abcdef012345",
    "RoleArn": "arn:aws:iam::123456789012:role/worker",
    "S3Uri": "s3://sagemaker-bucket/scripts",
    "TrainingPlanArn": f"{ARN}training-plan/a-plan-that-is-long-enough",
    "VolumeId": "vol-01234567",
}
"""Good texts of shapes for which `a` is not good."""
NO_MATCH = "\N{SNOWMAN}\n"
"""Text that matches no pattern except those for any text."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An input with one error, and the text that the error must have."""

    name: str
    value: Any
    path: str
    constraint: str


def good(schema: ServiceModel, name: str) -> Any:
    """Return a value with every member that the shape may have (of a union, the first)."""
    shape = schema.shapes[name]
    match shape.type:
        case Type.STRUCTURE:
            members = list(shape.members.items())[: 1 if shape.union else None]
            return {member: good(schema, inner) for member, inner in members}
        case Type.LIST:
            return [good(schema, shape.member)] * max(1, shape.min or 0)
        case Type.MAP:
            return {good(schema, shape.key): good(schema, shape.value)}
        case Type.STRING:
            return shape.enum[0] if shape.enum else TEXTS.get(name, "a")
        case Type.INTEGER | Type.FLOAT:
            return shape.min or 1
        case Type.BOOLEAN:
            return True
        case Type.TIMESTAMP:
            return 1.5e9


def broken(schema: ServiceModel, operation: str) -> Iterator[Broken]:
    """Yield an operation's input with each constraint broken in turn."""
    name = schema.operations[operation].input
    whole = good(schema, name)
    for keys, path, change in _breaks(schema, name, whole, (), ""):
        spoilt = copy.deepcopy(whole)
        label, value, wrong, constraint = change
        _put(spoilt, keys, value)
        yield Broken(f"{operation} {path} {label}", spoilt, wrong, constraint)


Change = tuple[str, Any, str, str]
Keys = tuple[Any, ...]
GONE = object()


def _put(whole: Any, keys: Keys, value: Any) -> None:
    *before, last = keys
    for key in before:
        whole = whole[key]
    if value is GONE:
        del whole[last]
    else:
        whole[last] = value


def _breaks(
    schema: ServiceModel, name: str, value: Any, keys: Keys, path: str
) -> Iterator[tuple[Keys, str, Change]]:
    shape = schema.shapes[name]
    if keys:
        for change in _scalar(shape, value, path):
            yield keys, path, change
    match shape.type:
        case Type.STRUCTURE:
            for member, inner in value.items():
                place = _below(path, member)
                yield from _breaks(schema, shape.members[member], inner, (*keys, member), place)
            for member in shape.required:
                place = _below(path, member)
                yield (*keys, member), place, ("missing", GONE, place, "not be null")
            wrong = _below(path, "nobodyKnows")
            constraint = "be one of the known members"
            yield (*keys, "NobodyKnows"), path, ("unknown", 1, wrong, constraint)
            if shape.union:
                second = list(shape.members)[1]
                two = {**value, second: good(schema, shape.members[second])}
                yield keys, path, ("two", two, path, "have exactly one of the members")
        case Type.LIST:
            place = f"{path}.1.member"
            yield (*keys, 0), path, ("null element", None, place, "not be null")
            yield from _breaks(schema, shape.member, value[0], (*keys, 0), place)
        case Type.MAP:
            [(key, inner)] = value.items()
            bad = {NO_MATCH: inner}
            yield keys, path, ("bad key", bad, f"{path}.key", "satisfy")
            yield from _breaks(schema, shape.value, inner, (*keys, key), f"{path}.{key}.value")
        case _:
            pass


def _scalar(shape: ApiShape, value: Any, path: str) -> Iterator[Change]:
    types = {
        Type.STRUCTURE: "be a structure",
        Type.LIST: "be a list",
        Type.MAP: "be a map",
        Type.STRING: "be a string",
        Type.INTEGER: "be an integer",
        Type.FLOAT: "be a number",
        Type.BOOLEAN: "be a boolean",
        Type.TIMESTAMP: "be a timestamp",
    }
    wrong = True if shape.type is not Type.BOOLEAN else "yes"
    yield "type", wrong, path, types[shape.type]
    if shape.type in (Type.INTEGER, Type.FLOAT):
        least = -(2**31) if shape.min is None else shape.min
        most = 2**31 - 1 if shape.max is None else shape.max
        yield "too small", least - 1, path, f"have value greater than or equal to {least}"
        yield "too large", most + 1, path, f"have value less than or equal to {most}"
    elif shape.type in (Type.LIST, Type.STRING):
        if shape.min:
            short = value[: shape.min - 1]
            yield "short", short, path, f"have length greater than or equal to {shape.min}"
        if shape.max is not None:
            long = (value * (shape.max + 1))[: shape.max + 1]
            yield "long", long, path, f"have length less than or equal to {shape.max}"
    if shape.enum:
        yield "no such value", "Nonsense", path, "satisfy enum value set: ["
    if shape.pattern not in (None, r"[\S\s]+", r".*"):
        yield "pattern", NO_MATCH, path, f"satisfy regular expression pattern: {shape.pattern}"


def _below(path: str, name: str) -> str:
    own = name[:1].lower() + name[1:]
    return f"{path}.{own}" if path else own
