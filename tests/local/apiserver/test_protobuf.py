"""Protobuf bodies decode to the JSON of the same objects, and no bytes break the decoder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.local import apiserver
from unbroken.local.apiserver.http import bodies
from unbroken.local.apiserver.http.protobuf import MAGIC, MEDIA, decode
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.schema.schemas import builtin_definitions

Part = tuple[int, int | str | bytes]


def varint(value: int) -> bytes:
    """Return `value` as protobuf writes it; a negative one takes ten bytes."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def wire(*parts: Part) -> bytes:
    """Return a message of (number, value) pairs: numbers as varints, the rest with its length."""
    out = b""
    for number, value in parts:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def body(version: str, kind: str, *parts: Part) -> bytes:
    """Return a request's body, in the envelope that client-go makes."""
    identity = wire((1, version), (2, kind))
    return MAGIC + wire((1, identity), (2, wire(*parts)), (3, ""), (4, ""))


METADATA = wire((1, "n"), (2, ""), (3, ""), (4, ""), (5, ""), (6, ""), (7, 0), (8, b""))
"""Metadata as client-go writes them: a field that is no pointer is there, even if empty."""


def job(*spec: Part) -> bytes:
    return body("batch/v1", "Job", (1, METADATA), (2, wire(*spec)), (3, wire((4, 0))))


def pod(*spec: Part) -> bytes:
    return body("v1", "Pod", (2, wire(*spec)))


def pod_raw(data: bytes) -> bytes:
    """Return a Pod whose spec is `data`, well formed or not."""
    return body("v1", "Pod", (2, data))


def container(*fields: Part) -> bytes:
    return pod((2, wire(*fields)))


def managed(fields: str) -> bytes:
    """Return a ConfigMap with one record of managed fields, given as JSON."""
    return config((1, wire((17, wire((7, wire((1, fields))))))))


def config(*fields: Part) -> bytes:
    return body("v1", "ConfigMap", *fields)


def lease(*spec: Part) -> bytes:
    return body("coordination.k8s.io/v1", "Lease", (2, wire(*spec)))


def role(*rule: Part) -> bytes:
    return body("rbac.authorization.k8s.io/v1", "Role", (2, wire(*rule)))


def budget(*spec: Part) -> bytes:
    return body("policy/v1", "PodDisruptionBudget", (2, wire(*spec)))


def spec(found: Object) -> Any:
    return found["spec"]


def first_container(found: Object) -> Any:
    return found["spec"]["containers"][0]


def everything(found: Object) -> Any:
    return {key: value for key, value in found.items() if key not in ("apiVersion", "kind")}


WHOLE, SPEC, CONTAINER = everything, spec, first_container
CASES: dict[str, tuple[bytes, Callable[[Object], Any], object]] = {
    "an empty object has its identity only": (body("v1", "Pod"), WHOLE, {}),
    "empty metadata and status are left out": (
        body("v1", "Namespace", (1, wire((1, ""), (8, b""))), (2, b""), (3, wire((1, "")))),
        WHOLE,
        {},
    ),
    "zeros that are no pointers are left out of metadata": (
        config((1, METADATA)),
        WHOLE,
        {"metadata": {"name": "n"}},
    ),
    "a pointer to zero is kept": (
        job((1, 0), (5, 0)),
        SPEC,
        {"parallelism": 0, "manualSelector": False},
    ),
    "a pointer to false is kept": (
        body("v1", "ServiceAccount", (4, 0)),
        WHOLE,
        {"automountServiceAccountToken": False},
    ),
    "a pointer to an empty text is kept": (
        body("v1", "PersistentVolumeClaim", (2, wire((5, "")))),
        SPEC,
        {"storageClassName": ""},
    ),
    "a pointer to an empty message is kept": (
        pod((1, wire((1, "v"), (2, wire((2, wire((1, ""))))))), (14, b"")),
        SPEC,
        {"volumes": [{"name": "v", "emptyDir": {}}], "securityContext": {}},
    ),
    "an empty selector selects all": (budget((2, b"")), SPEC, {"selector": {}}),
    "a port of zero that is no pointer is left out": (
        container((1, "c"), (6, wire((1, ""), (2, 0), (3, 80), (4, ""), (5, "")))),
        CONTAINER,
        {"name": "c", "ports": [{"containerPort": 80}]},
    ),
    "empty resources are left out": (container((1, "c"), (8, b"")), CONTAINER, {"name": "c"}),
    "empty texts stay in lists": (
        role((2, ""), (3, "pods")),
        WHOLE,
        {"rules": [{"apiGroups": [""], "resources": ["pods"]}]},
    ),
    "empty texts stay in maps": (
        config((2, wire((1, "k"), (2, ""))), (2, wire((1, "l")))),
        WHOLE,
        {"data": {"k": "", "l": ""}},
    ),
    "bytes are base64": (
        config((3, wire((1, "b"), (2, b"\xff\x00"))), (3, wire((1, "e"), (2, b"")))),
        WHOLE,
        {"binaryData": {"b": "/wA=", "e": ""}},
    ),
    "quantities are texts": (
        container((8, wire((1, wire((1, "cpu"), (2, wire((1, "500m")))))))),
        CONTAINER,
        {"resources": {"limits": {"cpu": "500m"}}},
    ),
    "an integer or text is an integer": (
        budget((1, wire((1, 0), (2, 3), (3, "")))),
        SPEC,
        {"minAvailable": 3},
    ),
    "an integer or text is zero": (
        budget((1, wire((1, 0), (2, 0), (3, "")))),
        SPEC,
        {"minAvailable": 0},
    ),
    "an integer or text is text": (
        budget((3, wire((1, 1), (2, 0), (3, "50%")))),
        SPEC,
        {"maxUnavailable": "50%"},
    ),
    "a time is in UTC and whole seconds": (
        config((1, wire((8, wire((1, 1_700_000_000), (2, 999)))))),
        WHOLE,
        {"metadata": {"creationTimestamp": "2023-11-14T22:13:20Z"}},
    ),
    "the epoch is a time": (
        config((1, wire((8, wire((1, 0), (2, 0)))))),
        WHOLE,
        {"metadata": {"creationTimestamp": "1970-01-01T00:00:00Z"}},
    ),
    "a time before the epoch": (
        config((1, wire((8, wire((1, -1), (2, 0)))))),
        WHOLE,
        {"metadata": {"creationTimestamp": "1969-12-31T23:59:59Z"}},
    ),
    "a lease's time has microseconds": (
        lease((4, wire((1, 1_700_000_000), (2, 123_456_000)))),
        SPEC,
        {"renewTime": "2023-11-14T22:13:20.123456Z"},
    ),
    "an empty time is absent": (lease((2, 5), (4, b"")), SPEC, {"leaseDurationSeconds": 5}),
    "a negative number of 32 bits": (lease((2, -5)), SPEC, {"leaseDurationSeconds": -5}),
    "32 bits are cut out of 64": (lease((2, 2**32 - 5)), SPEC, {"leaseDurationSeconds": -5}),
    "a number of 64 bits": (
        config((1, wire((7, -(2**63))))),
        WHOLE,
        {"metadata": {"generation": -(2**63)}},
    ),
    "managed fields": (
        managed('{"f:data":{}}'),
        WHOLE,
        {"metadata": {"managedFields": [{"fieldsV1": {"f:data": {}}}]}},
    ),
    "managed fields of which nothing is said": (
        config((1, wire((17, wire((1, "m"), (7, wire((1, "")))))))),
        WHOLE,
        {"metadata": {"managedFields": [{"manager": "m"}]}},
    ),
    "a struct within a struct shares its fields": (
        container((1, "c"), (10, wire((1, wire((1, wire((1, "true"))))), (2, 0), (3, 5)))),
        CONTAINER,
        {"name": "c", "livenessProbe": {"exec": {"command": ["true"]}, "timeoutSeconds": 5}},
    ),
    "a list that is a value": (
        body(
            "authorization.k8s.io/v1",
            "SubjectAccessReview",
            (2, wire((5, wire((1, "k"), (2, wire((1, "a"), (1, "b"))))))),
        ),
        SPEC,
        {"extra": {"k": ["a", "b"]}},
    ),
    "numbers one by one": (
        pod((14, wire((4, 1), (4, -2)))),
        SPEC,
        {"securityContext": {"supplementalGroups": [1, -2]}},
    ),
    "numbers packed": (
        pod((14, wire((4, varint(1) + varint(-2)), (4, varint(300))))),
        SPEC,
        {"securityContext": {"supplementalGroups": [1, -2, 300]}},
    ),
    "unknown fields are passed over": (
        MAGIC
        + wire((1, wire((1, "v1"), (2, "ConfigMap"), (9, "x"))), (99, 1))
        + wire((2, varint(77 << 3 | 1) + bytes(8) + varint(78 << 3 | 5) + bytes(4) + wire((4, 1)))),
        WHOLE,
        {"immutable": True},
    ),
    "the last one of a value counts": (config((4, 1), (4, 0)), WHOLE, {"immutable": False}),
    "the last one counts even if it is left out": (
        container((1, "c"), (2, "x"), (2, "")),
        CONTAINER,
        {"name": "c"},
    ),
    "a message in two pieces is one": (
        job((4, wire((1, wire((1, "a"), (2, "b"))))), (4, wire((1, wire((1, "c")))))),
        SPEC,
        {"selector": {"matchLabels": {"a": "b", "c": ""}}},
    ),
    "options of a delete come in the version of what is deleted": (
        body("apps/v1", "DeleteOptions", (1, 0), (4, "Foreground")),
        WHOLE,
        {"gracePeriodSeconds": 0, "propagationPolicy": "Foreground"},
    ),
}


@pytest.mark.parametrize(("data", "part", "expected"), CASES.values(), ids=CASES)
def test_objects_are_what_they_are_as_json(
    data: bytes, part: Callable[[Object], Any], expected: object
) -> None:
    assert part(bodies.decode_object(data, MEDIA)) == expected


def test_identity_is_that_of_the_envelope() -> None:
    assert decode(body("policy/v1", "Eviction")) == {"apiVersion": "policy/v1", "kind": "Eviction"}


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "does not begin with k8s"),
    "JSON": (b"{}", "does not begin with k8s"),
    "the magic alone": (MAGIC, 'kind "" of version ""'),
    "no kind": (MAGIC + wire((1, wire((1, "v1")))), 'kind "" of version "v1"'),
    "a kind that is not known": (body("v1", "Prod"), 'kind "Prod" of version "v1"'),
    "a version that is not known": (body("v9", "Pod"), 'kind "Pod" of version "v9"'),
    "a list": (body("v1", "PodList"), "send it as JSON"),
    "something compressed": (MAGIC + wire((3, "gzip")), "not plain protobuf"),
    "JSON in the envelope": (MAGIC + wire((4, "application/json")), "not plain protobuf"),
    "an envelope cut short": (
        body("v1", "Pod", (1, METADATA))[:-8],
        "object: field 2 has 19 bytes, 15",
    ),
    "a field cut short": (pod_raw(b"\x1a\x06Alw"), "spec: field 3 has 6 bytes, 3 are left"),
    "a huge length": (pod_raw(b"\x1a" + varint(2**62)), "spec: field 3 has 4611686018427387904"),
    "a key cut short": (pod_raw(b"\x80"), "spec: the data ends within a number"),
    "a number cut short": (pod_raw(b"\x20\xff"), "spec: the data ends within a number"),
    "a number of 11 bytes": (pod_raw(b"\x20" + b"\x80" * 11), "spec: a number does not fit"),
    "a number of 65 bits": (pod_raw(b"\x20" + b"\xff" * 9 + b"\x02"), "spec: a number does not"),
    "field 0": (pod_raw(b"\x00\x00"), "spec: 0 is no field number"),
    "field 2**29": (pod_raw(varint(2**32) + b"\x00"), "spec: 536870912 is no field number"),
    "a group": (pod_raw(varint(50 << 3 | 3) * 9000), "spec: field 50 has wire type 3"),
    "wire type 7": (pod_raw(varint(50 << 3 | 7)), "spec: field 50 has wire type 7"),
    "a number for a text": (pod((3, 5)), "spec.restartPolicy: text, bytes or a message belong"),
    "a number for a message": (container((10, 1)), "spec.containers[0].livenessProbe: text"),
    "a number for a map": (config((2, 1)), "data: text, bytes or a message belong here"),
    "a text for a number": (pod((4, "x")), "spec.terminationGracePeriodSeconds: a number belongs"),
    "eight bytes for a number": (pod_raw(varint(4 << 3 | 1) + bytes(8)), "Seconds: a number"),
    "eight bytes for a text": (pod_raw(varint(3 << 3 | 1) + bytes(8)), "restartPolicy: text"),
    "packed numbers cut short": (pod((14, wire((4, b"\x80")))), "supplementalGroups[0]: the data"),
    "no UTF-8": (container((3, "a"), (3, b"\xff")), "containers[0].command[1]: text that is not"),
    "no UTF-8 in a key": (config((2, wire((1, b"\xff")))), "data: text that is not UTF-8"),
    "no UTF-8 in a value": (config((2, wire((1, "k"), (2, b"\xff")))), "data[k]: text that is"),
    "no JSON": (managed("{"), "metadata.managedFields[0].fieldsV1: not valid JSON"),
    "deep JSON": (managed("[" * 100_000), "fieldsV1: not valid JSON"),
    "JSON that is too deep for an object": (
        managed("[" * 500 + "]" * 500),
        "nested deeper than 200 levels",
    ),
    "a year beyond 9999": (
        lease((4, wire((1, 2**40)))),
        "spec.renewTime: a time outside the years 1 to 9999",
    ),
    "a time beyond all": (lease((4, wire((1, 2**63 - 1)))), "spec.renewTime: a time outside"),
    "the second of two containers": (
        pod((2, wire((1, "a"))), (2, wire((1, 1)))),
        "spec.containers[1].name: text",
    ),
    "a field of a struct within a struct": (
        pod((1, wire((1, "v"), (2, wire((2, wire((1, 1)))))))),
        "spec.volumes[0].emptyDir.medium: text",
    ),
}


@pytest.mark.parametrize(("data", "text"), BAD.values(), ids=BAD)
def test_what_is_broken_is_refused_with_its_place(data: bytes, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        bodies.decode_object(data, MEDIA)
    assert caught.value.code == 400
    assert text in caught.value.message


@cache
def table() -> Mapping[str, Any]:
    """Return the data file as written."""
    packed = resources.files(apiserver).joinpath("data/protobuf.json.gz").read_bytes()
    loaded: Mapping[str, Any] = json.loads(gzip.decompress(packed))
    return loaded


NOT_IN_SCHEMAS = {
    "k8s.io.apimachinery.pkg.apis.meta.v1.Time",
    "k8s.io.apimachinery.pkg.apis.meta.v1.MicroTime",
    "k8s.io.apimachinery.pkg.util.intstr.IntOrString",
}
"""Messages that are a single value in JSON."""
ONLY_INLINE = {
    "k8s.io.api.core.v1.EphemeralContainerCommon",
    "k8s.io.api.core.v1.PersistentVolumeSource",
    "k8s.io.api.core.v1.ProbeHandler",
    "k8s.io.api.core.v1.VolumeSource",
}
"""Messages whose fields, in JSON, are those of the message around them."""
ENVELOPE = {"k8s.io.apimachinery.pkg.runtime." + name for name in ("Unknown", "TypeMeta")}
NOT_SENT = {"apiVersion", "kind"}
"""Fields of an object that are in the envelope instead."""


def schema_of(message: str) -> Mapping[str, Any]:
    found = builtin_definitions()["io.k8s" + message.removeprefix("k8s.io")]
    return found.get("properties") or {}


def json_fields(message: str) -> set[str]:
    """Return the JSON names of all fields of `message`."""
    names: set[str] = set()
    for name, kind, mode in table()["messages"][message].values():
        names |= json_fields(kind) if mode == "inline" else {name}
    return names


@pytest.mark.parametrize(
    "message",
    sorted(
        set(table()["messages"]) - set(table()["wholes"]) - NOT_IN_SCHEMAS - ONLY_INLINE - ENVELOPE
    ),
)
def test_fields_are_those_of_the_schema(message: str) -> None:
    names, expected = json_fields(message), set(schema_of(message))
    assert names <= expected
    assert expected - names <= NOT_SENT


def test_lists_maps_and_values_are_those_of_the_schema() -> None:
    types = {"repeated": "array", "map": "object"}
    plain = {"string": "string", "bool": "boolean", "int32": "integer", "int64": "integer"}
    for message, fields in table()["messages"].items():
        if message in NOT_IN_SCHEMAS | ONLY_INLINE | ENVELOPE | set(table()["wholes"]):
            continue
        for name, kind, mode in fields.values():
            if mode != "inline":
                found = schema_of(message)[name].get("type", "object")
                expected = types.get(mode) or plain.get(kind)
                assert expected in (None, found), (message, name)


def test_every_served_kind_but_definitions_is_read() -> None:
    served = {
        f"{kind.api_version(version)}/{kind.kind}"
        for kind in BUILTINS
        for version in kind.versions
        if not kind.refusal
    }
    assert served - set(table()["kinds"]) == {"apiextensions.k8s.io/v1/CustomResourceDefinition"}


def test_no_message_holds_itself_so_that_nesting_is_bounded() -> None:
    def depth(message: str, around: tuple[str, ...] = ()) -> int:
        assert message not in around
        kinds = [kind for _, kind, _ in table_messages[message].values() if kind in table_messages]
        return 1 + max((depth(kind, (*around, message)) for kind in kinds), default=0)

    table_messages = table()["messages"]
    assert max(depth(message) for message in table()["kinds"].values()) < 20


def either_an_object_or_400(data: bytes) -> None:
    try:
        value = bodies.decode_object(data, MEDIA)
    except ApiError as error:
        assert error.code == 400
    else:
        json.dumps(value)


KINDS = st.sampled_from(sorted(table()["kinds"])).map(lambda name: name.rsplit("/", 1))
PARTS: st.SearchStrategy[list[Part]] = st.recursive(
    st.lists(
        st.tuples(
            st.integers(1, 45),
            st.one_of(st.integers(0, 2**64 - 1), st.text(max_size=5), st.binary(max_size=12)),
        ),
        max_size=6,
    ),
    lambda inner: st.lists(
        st.tuples(st.integers(1, 45), inner.map(lambda parts: wire(*parts))), max_size=6
    ),
    max_leaves=10,
)


@given(KINDS, PARTS)
def test_no_well_formed_message_breaks_it(kind: list[str], parts: list[Part]) -> None:
    either_an_object_or_400(body(kind[0], kind[1], *parts))


@given(KINDS, st.binary(max_size=200))
def test_no_bytes_break_it(kind: list[str], raw: bytes) -> None:
    either_an_object_or_400(MAGIC + raw)
    envelope = wire((1, wire((1, kind[0]), (2, kind[1]))), (2, raw))
    either_an_object_or_400(MAGIC + envelope)


@given(
    st.sampled_from([data for data, _, _ in CASES.values()]),
    st.integers(0, 10**6),
    st.binary(max_size=3),
    st.integers(0, 3),
)
def test_no_damage_breaks_it(data: bytes, at: int, new: bytes, cut: int) -> None:
    at %= len(data)
    either_an_object_or_400(data[:at])
    either_an_object_or_400(data[:at] + new + data[at + cut :])
