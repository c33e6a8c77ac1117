"""Objects against schemas, in Kubernetes' words.

The wording of type, range, length, pattern, enum, format, oneOf/anyOf/allOf/not errors was read off
a kube-apiserver v1.20.2 (which validates a default against its schema with the same code); reasons
and texts that are younger (FieldValueTypeInvalid, TooLong, TooMany, list indices) follow v1.33.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.tables import cases
from unbroken.errors import SpecError
from unbroken.local.apiserver.schema.constraints import FORMATS, pattern
from unbroken.local.apiserver.schema.schemas import Schema, builtin
from unbroken.local.apiserver.schema.structural import (
    decode_errors,
    default,
    prune,
    validate,
    without_nulls,
)

POD = builtin("io.k8s.api.core.v1.Pod")
INTEGER = {"type": "integer"}
STRING = {"type": "string"}
A_OR_B: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
NEEDS = [{"required": ["a"]}, {"required": ["b"]}]


def schema(raw: dict[str, Any]) -> Schema:
    """A schema as a CRD writes it."""
    return Schema(raw, {})


def at_f(raw: dict[str, Any], value: Any) -> list[tuple[str, str, str]]:
    """(reason, field, message) of everything wrong with an object's field `f`."""
    causes = validate({"f": value}, schema({"type": "object", "properties": {"f": raw}}))
    return [(cause.reason, cause.field, cause.message) for cause in causes]


def body(text: str, value: str) -> str:
    """Message of a failed constraint."""
    return f"Invalid value: {value}: f in body {text}"


ALL_OF = "must validate all the schemas (allOf)"
ONE_OF = "must validate one and only one schema (oneOf). Found "
INVALID, TYPE = "FieldValueInvalid", "FieldValueTypeInvalid"


@cases
def test_a_broken_constraint_is_told_as_kubernetes_tells_it(
    raw: dict[str, Any], value: Any, reason: str, message: str
) -> None:
    assert at_f(raw, value) == [(reason, "f", message)]


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (INTEGER, 1.0),
        ({"type": "number"}, 3),
        ({**INTEGER, "format": "int64"}, 2**40),
        ({**INTEGER, "enum": [1]}, 1.0),
        ({**STRING, "nullable": True}, None),
        ({**STRING, "nullable": True, "anyOf": [{"minLength": 1}]}, None),
        ({"x-kubernetes-int-or-string": True}, "50%"),
        ({"x-kubernetes-int-or-string": True, "anyOf": [INTEGER, STRING]}, 5),
        ({"x-kubernetes-preserve-unknown-fields": True}, [None, {"a": 1.5}]),
        ({**STRING, "maxLength": 2}, "éé"),
        ({**STRING, "format": "no-such-format"}, "x"),
        ({"type": "array", "items": STRING, "x-kubernetes-list-type": "atomic"}, ["a", "a"]),
    ],
)
def test_what_fits_is_taken(raw: dict[str, Any], value: Any) -> None:
    assert at_f(raw, value) == []


@pytest.mark.parametrize(
    ("keys", "value", "causes"),
    [
        ({"oneOf": NEEDS}, {}, [("<nil>", ONE_OF + "none valid"), ("f.a", None)]),
        ({"oneOf": NEEDS}, {"a": 1, "b": 1}, [("<nil>", ONE_OF + "2 valid alternatives")]),
        (
            {"anyOf": NEEDS},
            {},
            [("<nil>", "must validate at least one schema (anyOf)"), ("f.a", None)],
        ),
        (
            {"allOf": NEEDS},
            {},
            [("f.a", None), ("f.b", None), ("<nil>", ALL_OF + ". None validated")],
        ),
        ({"allOf": NEEDS}, {"a": 1}, [("f.b", None), ("<nil>", ALL_OF)]),
        ({"not": {"required": ["a"]}}, {"a": 1}, [("<nil>", "must not validate the schema (not)")]),
        ({"oneOf": NEEDS, "anyOf": NEEDS, "not": {"required": ["b"]}}, {"a": 1}, []),
    ],
)
def test_schemas_combine(
    keys: dict[str, Any], value: Any, causes: list[tuple[str, str | None]]
) -> None:
    expected = [
        ("FieldValueRequired", field, "Required value")
        if text is None
        else (INVALID, field, f'Invalid value: "": "f" {text}')
        for field, text in causes
    ]
    assert at_f({**A_OR_B, **keys}, value) == expected


def test_paths_lead_through_lists_and_maps() -> None:
    item = {"type": "object", "required": ["k"], "properties": {"k": STRING}}
    raw = {"type": "object", "additionalProperties": {"type": "array", "items": item}}
    assert at_f(raw, {"a.b/c": [{"k": "x"}, {}, {"k": 1}]}) == [
        ("FieldValueRequired", "f.a.b/c[1].k", "Required value"),
        (
            TYPE,
            "f.a.b/c[2].k",
            'Invalid value: "integer": f.a.b/c[2].k in body must be of type string: "integer"',
        ),
    ]


def test_duplicates_are_refused_in_sets_and_maps_of_custom_kinds_only() -> None:
    item = {"type": "object", "properties": {"k": STRING, "v": INTEGER}}
    listed = {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"]}
    duplicate = "FieldValueDuplicate"
    assert at_f({**listed, "items": item}, [{"k": "a", "v": 1}, {"k": "a"}, {"v": 1}]) == [
        (duplicate, "f[1]", 'Duplicate value: map[string]interface {}{"k":"a"}')
    ]
    as_set = {"type": "array", "x-kubernetes-list-type": "set", "items": STRING}
    assert at_f(as_set, ["a", "b", "a"]) == [(duplicate, "f[2]", 'Duplicate value: "a"')]
    env = [{"name": "A"}, {"name": "A"}]
    assert validate({"spec": {"containers": [{"name": "c", "env": env}]}}, POD) == []


def test_an_embedded_object_needs_its_identity() -> None:
    raw = {"type": "object", "x-kubernetes-embedded-resource": True}
    required = ("FieldValueRequired", "f.kind", "Required value: must not be empty")
    assert at_f(raw, {"apiVersion": "v1"}) == [required]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date-time", "2024-02-29T23:59:59.5+01:00", "2023-02-29T00:00:00Z"),
        ("date", "2024-02-29", "2024-2-9"),
        ("duration", "1h30m", "1 fortnight"),
        ("email", "a@b.example", "a b@c"),
        ("hostname", "a-1.example.com", "-a"),
        ("ipv4", "10.0.0.1", "10.0.0.256"),
        ("ipv6", "::1", "10.0.0.1"),
        ("cidr", "10.0.0.0/8", "10.0.0.0"),
        ("mac", "01:23:45:67:89:ab", "01:23"),
        ("uri", "https://example.com/a", "a b"),
        ("uuid", "5b1b8f70-0c86-4a1c-8e2f-0c1b6a9f0a11", "5b1b"),
        ("uuid4", "5b1b8f70-0c86-4a1c-8e2f-0c1b6a9f0a11", "5b1b8f70-0c86-3a1c-8e2f-0c1b6a9f0a11"),
        ("byte", "YWI=", "YWI"),
        ("hexcolor", "#ff0000", "red"),
    ],
)
def test_formats(name: str, good: str, bad: str) -> None:
    assert FORMATS[name](good)
    assert not FORMATS[name](bad)


@pytest.mark.parametrize(
    ("text", "matches", "other"),
    [
        (r"^a$", "a", "a\n"),
        (r"[$]$", "1$", "1"),
        (r"^[[:alpha:]_]+\z", "ab_", "a1"),
        (r"\$x", "$x", "x"),
        (r"[]$]b", "]b", "b"),
    ],
)
def test_patterns_are_those_of_re2(text: str, matches: str, other: str) -> None:
    assert pattern(text).is_found(matches.encode())
    assert not pattern(text).is_found(other.encode())


def test_a_pattern_that_cannot_be_compiled_is_an_error() -> None:
    with pytest.raises(SpecError):
        pattern("[")


CUSTOM = schema(
    {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "properties": {
                    "known": STRING,
                    "kept": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                        "properties": {"inner": A_OR_B},
                    },
                    "map": {"type": "object", "additionalProperties": A_OR_B},
                    "list": {"type": "array", "items": A_OR_B},
                    "whole": {
                        "type": "object",
                        "x-kubernetes-embedded-resource": True,
                        "properties": {"spec": A_OR_B},
                    },
                    "any": {"x-kubernetes-preserve-unknown-fields": True},
                },
            }
        },
    }
)
IDENTITY = {"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "n"}}


@cases
def test_undeclared_fields_are_dropped_and_named(spec: Any, left: Any, dropped: list[str]) -> None:
    given = {**IDENTITY, "spec": spec}
    before = copy.deepcopy(given)
    assert prune(given, CUSTOM) == ({**IDENTITY, "spec": left}, dropped)
    assert given == before


def test_metadata_is_pruned_by_its_own_schema() -> None:
    given = {**IDENTITY, "metadata": {"name": "n", "lables": {}}, "other": 1}
    assert prune(given, CUSTOM) == (IDENTITY, ["metadata.lables", "other"])


def test_nothing_to_drop_returns_the_object_itself() -> None:
    given = {"kind": "Pod", "spec": {"containers": [{"name": "a", "env": []}]}}
    assert prune(given, POD)[0] is given


def test_unknown_fields_of_built_in_kinds_are_named_with_indices() -> None:
    given = {"spec": {"containers": [{"name": "a"}, {"name": "b", "imag": "x"}]}}
    assert prune(given, POD)[1] == ["spec.containers[1].imag"]


@cases
def test_defaults_fill_what_is_missing(properties: Any, value: Any, completed: Any) -> None:
    raw = {"type": "object", "properties": properties}
    assert default(value, schema(raw)) == completed


def test_a_default_is_not_shared_between_objects() -> None:
    raw = schema({"type": "object", "properties": {"l": {"type": "array", "default": []}}})
    first = default({}, raw)
    first["l"].append(1)
    assert default({}, raw) == {"l": []}


IN = "json: cannot unmarshal {} into Go struct field {} of type {}"


@cases
def test_wrong_types_of_built_in_kinds_are_told_as_by_go(pod: Any, text: str | None) -> None:
    assert decode_errors(pod, POD) == text


def test_base64_of_a_secret_is_checked() -> None:
    secret = builtin("io.k8s.api.core.v1.Secret")
    assert decode_errors({"data": {"a": "YWI="}}, secret) is None
    found = decode_errors({"data": {"a": "ab!c"}}, secret)
    assert found == "illegal base64 data at input byte 2"


def test_of_a_custom_kind_only_metadata_is_decoded() -> None:
    value = {"metadata": {"labels": []}, "spec": 1}
    expected = IN.format("array", "ObjectMeta.metadata.labels", "map[string]string")
    assert decode_errors(value, CUSTOM, is_custom=True) == expected
    assert decode_errors({"spec": 1}, CUSTOM, is_custom=True) is None


def test_null_is_absent_in_built_in_kinds() -> None:
    pod = {
        "metadata": {"creationTimestamp": None, "labels": {"a": None}},
        "spec": {"containers": [{"name": "a", "env": None}], "volumes": None},
    }
    expected = {"metadata": {"labels": {"a": ""}}, "spec": {"containers": [{"name": "a"}]}}
    assert without_nulls(pod, POD) == expected


def test_null_in_a_list_or_map_is_the_zero_value() -> None:
    pod = {"spec": {"containers": [None, {"name": "a", "command": [None]}]}}
    expected = {"spec": {"containers": [{}, {"name": "a", "command": [""]}]}}
    assert without_nulls(pod, POD) == expected


def test_null_is_kept_where_no_schema_describes_the_value() -> None:
    given = {"metadata": {"managedFields": [{"fieldsV1": {"a": None}}]}}
    assert without_nulls(given, POD) == given
