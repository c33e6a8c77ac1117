"""Rules for the schemas inside a CustomResourceDefinition: they are structural, and defaults fit.

Wording read off a kube-apiserver v1.20.2; paths are its paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.errors import SpecError
from unbroken.local.apiserver.http.status import Cause
from unbroken.local.apiserver.schema import structural
from unbroken.local.apiserver.schema.constraints import (
    FORMATS,
    forbidden,
    go_text,
    invalid_value,
    pattern,
    required_value,
)
from unbroken.local.apiserver.schema.constraints import unsupported as not_supported
from unbroken.local.apiserver.schema.schemas import Schema, builtin

Raw = Mapping[str, Any]
PROPS = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps"
TYPES = ["array", "boolean", "integer", "number", "object", "string"]
SCALARS = ("boolean", "integer", "number", "string")
UNSUPPORTED = (
    "$ref", "id", "patternProperties", "definitions", "dependencies", "additionalItems",
)  # fmt: skip
IGNORED_FORMATS = {
    "int32", "int64", "float", "double", "password", "bsonobjectid", "isbn", "isbn10", "isbn13",
    "creditcard", "ssn", "rgbcolor",
}  # fmt: skip
"""Formats that the API server knows and that constrain nothing, here or at all."""
NOT_IN_COMBINATIONS = {
    "type": "must be empty to be structural",
    "description": "must be empty to be structural",
    "title": "must be empty to be structural",
    "default": "must be undefined to be structural",
    "additionalProperties": "must be undefined to be structural",
    "nullable": "must be false to be structural",
    "x-kubernetes-preserve-unknown-fields": "must be undefined to be structural",
    "x-kubernetes-embedded-resource": "must be false to be structural",
    "x-kubernetes-int-or-string": "must be false to be structural",
    "x-kubernetes-list-type": "must be undefined to be structural",
    "x-kubernetes-list-map-keys": "must be empty to be structural",
    "x-kubernetes-map-type": "must be undefined to be structural",
}
INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]


def schema_causes(root: Raw, path: str) -> list[Cause]:
    """Everything wrong with the schema of a version; `path` is where it stands."""
    causes = list(_undecodable(root, path)) or [*_root(root, path), *_node(root, path, "")]
    # A default can only be tried against a schema that is sound.
    return causes or list(_defaults(root, path))


def schema_warnings(root: Raw, path: str) -> list[str]:
    """Return the parts of the schema that are accepted and have no effect here."""
    warnings = []
    for node, place in _walk(root, path):
        if node.get("x-kubernetes-validations"):
            warnings.append(
                f"{place}.x-kubernetes-validations: rules in CEL are not evaluated by this server"
            )
        name = node.get("format", "")
        if name and name not in FORMATS and name not in IGNORED_FORMATS:
            warnings.append(f'{place}.format: unrecognized format "{name}"')
    return warnings


def _children(raw: Raw, path: str) -> Iterator[tuple[Raw, str, str]]:
    """(schema, path, what it is a schema of) of the values inside."""
    for name, field in (raw.get("properties") or {}).items():
        yield field, f"{path}.properties[{name}]", "object fields"
    if isinstance(raw.get("additionalProperties"), Mapping):
        yield raw["additionalProperties"], f"{path}.additionalProperties", "object fields"
    if isinstance(raw.get("items"), Mapping):
        yield raw["items"], f"{path}.items", "array items"


def _combinations(raw: Raw, path: str) -> Iterator[tuple[Raw, str]]:
    for key in ("allOf", "anyOf", "oneOf"):
        for index, part in enumerate(raw.get(key) or ()):
            yield part, f"{path}.{key}[{index}]"
    if isinstance(raw.get("not"), Mapping):
        yield raw["not"], f"{path}.not"


def _walk(raw: Raw, path: str) -> Iterator[tuple[Raw, str]]:
    yield raw, path
    for child, place, _ in _children(raw, path):
        yield from _walk(child, place)


def _undecodable(raw: Any, path: str) -> Iterator[Cause]:
    """Wrong JSON types; `items` and `additionalProperties` may be of several, and nest."""
    if problem := structural.decode_errors(raw, builtin(PROPS)):
        yield invalid_value(path, raw, problem)
        return
    for node, place in _all(raw, path):
        if not isinstance(node, Mapping):
            yield invalid_value(place, node, "must be a schema")
            continue
        for key, other in (("items", list), ("additionalProperties", bool)):
            inside = node.get(key)
            if isinstance(inside, Mapping):
                yield from _undecodable(inside, f"{place}.{key}")
            elif inside is not None and not isinstance(inside, other):
                yield invalid_value(f"{place}.{key}", inside, "must be a schema")


def _all(raw: Any, path: str) -> Iterator[tuple[Any, str]]:
    """A node and all below that are no `items` or `additionalProperties`."""
    yield raw, path
    if isinstance(raw, Mapping):
        for name, field in (raw.get("properties") or {}).items():
            yield from _all(field, f"{path}.properties[{name}]")
        for part, place in _combinations(raw, path):
            yield from _all(part, place)


def _root(raw: Raw, path: str) -> Iterator[Cause]:
    if not raw.get("type"):
        yield required_value(f"{path}.type", "must not be empty at the root")
    elif raw["type"] != "object":
        yield invalid_value(f"{path}.type", raw["type"], "must be object at the root")
    if raw.get("nullable"):
        yield forbidden(f"{path}.nullable", "nullable cannot be true at the root")
    if "additionalProperties" in raw:
        yield forbidden(f"{path}.additionalProperties", "must not be used at the root")
    for name, kind in (("apiVersion", "string"), ("kind", "string"), ("metadata", "object")):
        field = (raw.get("properties") or {}).get(name)
        if field is not None and field.get("type") != kind:
            place = f"{path}.properties[{name}].type"
            yield invalid_value(place, field.get("type", ""), f"must be {kind}")
    yield from _metadata(raw, path)


def _metadata(raw: Raw, path: str) -> Iterator[Cause]:
    declared = (raw.get("properties") or {}).get("metadata") or {}
    is_allowed = set(declared) <= {"type", "description", "properties"} and set(
        declared.get("properties") or ()
    ) <= {"name", "generateName"}
    if not is_allowed:
        yield forbidden(
            f"{path}.properties[metadata]",
            "must not specify anything other than name and generateName, but metadata is "
            "implicitly specified",
        )


def _node(raw: Raw, path: str, of: str) -> Iterator[Cause]:
    """Rules of one node and all below; `of` is empty at the root."""
    yield from _type(raw, path, of)
    yield from _shape(raw, path)
    yield from _lists_and_maps(raw, path)
    for part, place in _combinations(raw, path):
        yield from _combination(part, place, raw)
    for child, place, kind in _children(raw, path):
        yield from _node(child, place, kind)


def _type(raw: Raw, path: str, of: str) -> Iterator[Cause]:
    kind = raw.get("type") or ""
    is_open = raw.get("x-kubernetes-int-or-string") or raw.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if not kind and of and not is_open:
        yield required_value(f"{path}.type", f"must not be empty for specified {of}")
    if kind and kind not in TYPES:
        yield not_supported(f"{path}.type", kind, TYPES)
    if kind == "null":
        yield forbidden(
            f"{path}.type", "type cannot be set to null, use nullable as an alternative"
        )
    if kind == "array" and raw.get("items") is None:
        yield required_value(f"{path}.items", "must be specified")
    if isinstance(raw.get("items"), list):
        yield forbidden(f"{path}.items", "items must be a schema object and not an array")


def _shape(raw: Raw, path: str) -> Iterator[Cause]:
    for key in UNSUPPORTED:
        if key in raw:
            yield forbidden(f"{path}.{key}", f"{key} is not supported")
    if raw.get("uniqueItems"):
        yield forbidden(
            f"{path}.uniqueItems",
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        )
    if raw.get("properties") and raw.get("additionalProperties", True) is not True:
        yield forbidden(
            f"{path}.additionalProperties",
            "additionalProperties and properties are mutual exclusive",
        )
    yield from _pattern(raw, path)
    if raw.get("x-kubernetes-preserve-unknown-fields") is False:
        place = f"{path}.x-kubernetes-preserve-unknown-fields"
        yield invalid_value(place, False, "must be true or undefined")
    if raw.get("x-kubernetes-embedded-resource"):
        yield from _embedded(raw, path)


def _pattern(raw: Raw, path: str) -> Iterator[Cause]:
    if text := raw.get("pattern"):
        try:
            pattern(text)
        except SpecError as error:
            why = f"must be a valid regular expression, but isn't: {error}"
            yield invalid_value(f"{path}.pattern", text, why)


def _embedded(raw: Raw, path: str) -> Iterator[Cause]:
    if not raw.get("properties") and not raw.get("x-kubernetes-preserve-unknown-fields"):
        yield required_value(
            f"{path}.properties",
            "must not be empty if x-kubernetes-embedded-resource is true without "
            "x-kubernetes-preserve-unknown-fields",
        )
    if raw.get("type") != "object":
        yield invalid_value(
            f"{path}.type",
            raw.get("type", ""),
            "must be object if x-kubernetes-embedded-resource is true",
        )


def _lists_and_maps(raw: Raw, path: str) -> Iterator[Cause]:
    kind, of_list, of_map = (
        raw.get(key) for key in ("type", "x-kubernetes-list-type", "x-kubernetes-map-type")
    )
    if of_list is not None:
        if kind != "array":
            why = "must be array if x-kubernetes-list-type is specified"
            yield invalid_value(f"{path}.type", kind or "", why)
        if of_list not in ("atomic", "set", "map"):
            place = f"{path}.x-kubernetes-list-type"
            yield not_supported(place, of_list, ["atomic", "set", "map"])
    if of_map is not None:
        if kind != "object":
            why = "must be object if x-kubernetes-map-type is specified"
            yield invalid_value(f"{path}.type", kind or "", why)
        if of_map not in ("atomic", "granular"):
            place = f"{path}.x-kubernetes-map-type"
            yield not_supported(place, of_map, ["atomic", "granular"])
    items = raw.get("items")
    if isinstance(items, Mapping):
        yield from _set(raw, items, path)
        yield from _map_keys(raw, items, path)


def _set(raw: Raw, items: Raw, path: str) -> Iterator[Cause]:
    if raw.get("x-kubernetes-list-type") != "set":
        return
    inside = "map" if items.get("type") == "object" else "list"
    if items.get("type") not in ("object", "array"):
        return
    key = f"x-kubernetes-{inside}-type"
    if items.get(key) != "atomic" and (inside == "map" or key in items):
        yield invalid_value(
            f"{path}.items.{key}",
            items.get(key),
            "must be atomic as item of a list with x-kubernetes-list-type=set",
        )


def _map_keys(raw: Raw, items: Raw, path: str) -> Iterator[Cause]:
    keys: list[str] = raw.get("x-kubernetes-list-map-keys") or []
    place = f"{path}.x-kubernetes-list-map-keys"
    if raw.get("x-kubernetes-list-type") != "map":
        if keys:
            why = "must be map if x-kubernetes-list-map-keys is non-empty"
            yield required_value(f"{path}.x-kubernetes-list-type", why)
        return
    if not keys:
        yield required_value(place, "must not be empty if x-kubernetes-list-type is map")
    if items.get("type") != "object":
        why = "must be object if parent array's x-kubernetes-list-type is map"
        yield invalid_value(f"{path}.items.type", items.get("type", ""), why)
    fields = items.get("properties") or {}
    shown = "[]string{" + ", ".join(map(go_text, keys)) + "}"
    if not set(keys) <= set(fields):
        why = "entries must all be names of item properties"
        yield Cause("FieldValueInvalid", place, f"Invalid value: {shown}: {why}")
    if len(set(keys)) < len(keys):
        why = "must not contain duplicate entries"
        yield Cause("FieldValueInvalid", place, f"Invalid value: {shown}: {why}")
    for key in sorted(set(keys) & set(fields)):
        yield from _map_key(key, items, f"{path}.items.properties[{key}]")


def _map_key(key: str, items: Raw, path: str) -> Iterator[Cause]:
    field = items["properties"][key]
    if "default" not in field and key not in (items.get("required") or ()):
        yield required_value(
            f"{path}.default",
            "this property is in x-kubernetes-list-map-keys, so it must have a default or be a "
            "required property",
        )
    if field.get("type") and field["type"] not in SCALARS:
        why = "must be a scalar type if parent array's x-kubernetes-list-type is map"
        yield invalid_value(f"{path}.type", field["type"], why)


def _combination(raw: Raw, path: str, outer: Raw) -> Iterator[Cause]:
    """Inside allOf, anyOf, oneOf and not, values are constrained and nothing is declared."""
    is_type_allowed = outer.get("x-kubernetes-int-or-string") and raw in INT_OR_STRING
    for key in sorted(NOT_IN_COMBINATIONS.keys() & raw.keys()):
        is_unset = raw[key] is False or raw[key] == ""
        if not is_unset and not (key == "type" and is_type_allowed):
            yield forbidden(f"{path}.{key}", NOT_IN_COMBINATIONS[key])
    yield from _pattern(raw, path)
    for child, place, _ in _children(raw, path):
        if not place.endswith(".additionalProperties"):
            yield from _combination(child, place, {})
    for part, place in _combinations(raw, path):
        yield from _combination(part, place, outer)


def _defaults(raw: Raw, path: str) -> Iterator[Cause]:
    for node, place in _walk(raw, path):
        value = node.get("default")
        if value is None:
            continue
        holder = Schema({"type": "object", "properties": {"default": node}}, {})
        _, dropped = structural.prune({"default": value}, holder)
        if dropped:
            yield invalid_value(f"{place}.default", value, "must not have unknown fields")
        for cause in structural.validate(value, Schema(node, {})):
            inside = "" if cause.field in ("", "<nil>") else f".{cause.field}"
            yield Cause(cause.reason, f"{place}.default{inside}", cause.message)
