"""Objects against their schemas: validation, pruning, defaulting, and the decoding of built-ins.

A value is validated as apiextensions-apiserver validates a custom resource, with its wording and
field paths.  A built-in kind is decoded first: there a wrong type is a bad request, as it is where
the server decodes into Go structs.  Rules in CEL (`x-kubernetes-validations`) are not evaluated.
Except by `default`, input is never changed; where there is nothing to change, it comes back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from operator import is_not
from typing import Any

from unbroken.kube.quantity import QuantityError, canonical_quantity
from unbroken.local.apiserver.http.status import Cause, Object

from .constraints import (
    INTEGER_RANGES,
    QUANTITY,
    Check,
    checks_of,
    enum_check,
    go_number,
    go_text,
    is_date_time,
    required_value,
    same,
)
from .schemas import REF, Schema, builtin, builtin_definitions

OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
IDENTITY = ("apiVersion", "kind", "metadata")
"""Fields of a whole object that its schema need not declare."""

JSON_TYPES: dict[str, frozenset[type]] = {
    "object": frozenset({dict}),
    "array": frozenset({list}),
    "string": frozenset({str}),
    "integer": frozenset({int}),
    "number": frozenset({int, float}),
    "boolean": frozenset({bool}),
}
ANYTHING: frozenset[type] = frozenset({dict, list, str, int, float, bool, type(None)})
TYPE_NAMES: dict[type, str] = {
    dict: "object", list: "array", str: "string", int: "integer", float: "number",
    bool: "boolean", type(None): "null",
}  # fmt: skip
GO_KINDS: dict[type, str] = {
    dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "bool",
}  # fmt: skip

QUANTITY_FORM = "([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)"
"""Quantity as Kubernetes writes it; with backtracking, it takes time quadratic in the digits."""
QUANTITY_OUTLINE = re.compile(r"[+-]?[0-9.]++[eEinumkKMGTP]*[-+]?[0-9]*")
BASE64 = re.compile(r"[A-Za-z0-9+/\r\n]*={0,2}")


class _Rules:
    """Validation rules of one schema node, computed on first use."""

    __slots__ = ("checks", "expected", "nested", "types", "unique")

    def __init__(self, schema: Schema) -> None:
        raw = schema.raw
        self.expected = schema.type or ""
        self.types: frozenset[type] = JSON_TYPES.get(self.expected, ANYTHING)
        if schema.is_int_or_string and not schema.type:
            self.expected = "integer,string"
            is_quantity = raw.get("format") == "quantity"
            self.types = frozenset({int, str, float} if is_quantity else {int, str})
        if schema.is_nullable:
            self.types |= {type(None)}
        self.checks: dict[type, tuple[Check, ...]] = checks_of(raw)
        self.nested: tuple[Check, ...] = tuple(
            make([Schema(part, {}) for part in parts])
            for key, make in (("allOf", _all_of), ("anyOf", _any_of), ("oneOf", _one_of))
            if (parts := raw.get(key))
        ) + ((_not(Schema(raw["not"], {})),) if raw.get("not") else ())
        # Built-in lists have a patch strategy, and their duplicates are up to each kind's rules.
        self.unique: Check | None = None
        if schema.list_type in ("set", "map") and not schema.patch_strategy:
            self.unique = _unique(schema.list_map_keys)


def _rules(schema: Schema) -> _Rules:
    result = schema.memo.get(__name__)
    if result is None:
        result = schema.memo[__name__] = _Rules(schema)
    assert isinstance(result, _Rules)
    return result


def validate(value: Any, schema: Schema, path: str = "") -> list[Cause]:
    """Everything about `value` that breaks its schema; `path` is where the value stands."""
    causes: list[Cause] = []
    _validate(value, schema, path, causes)
    return causes


def _validate(value: Any, schema: Schema, path: str, causes: list[Cause]) -> None:
    rules = _rules(schema)
    kind = type(value)
    if kind not in rules.types and not _is_whole(value, rules.types):
        causes.append(_wrong_type(value, schema, rules.expected, path))
        if "enum" in schema.raw:
            enum_check(schema.raw["enum"])(value, path, causes)
        return
    for check in rules.nested if value is not None else ():
        check(value, path, causes)
    for check in rules.checks.get(kind, ()):
        check(value, path, causes)
    if kind is dict:
        _validate_fields(value, schema, path, causes)
    elif kind is list:
        _validate_items(value, schema, path, causes)


def _validate_items(value: list[Any], schema: Schema, path: str, causes: list[Cause]) -> None:
    items, unique = schema.items, _rules(schema).unique
    if items is not None:
        for index, item in enumerate(value):
            _validate(item, items, f"{path}[{index}]", causes)
    if unique:
        unique(value, path, causes)


def _validate_fields(value: Object, schema: Schema, path: str, causes: list[Cause]) -> None:
    prefix = f"{path}." if path else ""
    causes += [required_value(prefix + name) for name in schema.required if name not in value]
    fields, rest = schema.properties, schema.additional
    for name, item in value.items():
        field = fields.get(name) or rest
        if field is not None:
            _validate(item, field, prefix + name, causes)
    if schema.is_embedded:
        names = [name for name in ("apiVersion", "kind") if not value.get(name)]
        causes += [required_value(prefix + name, "must not be empty") for name in names]


def _is_whole(value: Any, types: frozenset[type]) -> bool:
    """A number such as 1.0 is an integer."""
    return type(value) is float and int in types and value.is_integer()


def _wrong_type(value: Any, schema: Schema, expected: str, path: str) -> Cause:
    result = TYPE_NAMES[type(value)]
    # kube-openapi reports the format in place of the type for some values; v1.20 to v1.33.
    form = schema.raw.get("format")
    if form in INTEGER_RANGES and type(value) in (bool, dict, float):
        expected, result = form, "float64" if type(value) is float else ""
    detail = f'{path} in body must be of type {expected}: "{result}"'
    return Cause("FieldValueTypeInvalid", path, f'Invalid value: "{result}": {detail}')


def _unique(keys: tuple[str, ...]) -> Check:
    def check(value: list[Any], path: str, causes: list[Cause]) -> None:
        seen: list[Any] = []
        for index, item in enumerate(value):
            identity = item
            if keys:
                if not isinstance(item, dict):
                    continue
                identity = {key: item[key] for key in keys if key in item}
            if any(same(identity, other) for other in seen):
                text = f"Duplicate value: {go_text(identity)}"
                causes.append(Cause("FieldValueDuplicate", f"{path}[{index}]", text))
            seen.append(identity)

    return check


def _whole_object(path: str, text: str) -> Cause:
    # The server has no path of its own for these (a nil path is printed so); the text has it.
    return Cause("FieldValueInvalid", "<nil>", f'Invalid value: "": "{path}" must {text}')


def _all_of(parts: list[Schema]) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        result = [validate(value, part, path) for part in parts]
        if any(result):
            causes.extend(cause for one in result for cause in one)
            tail = ". None validated" if all(result) else ""
            causes.append(_whole_object(path, f"validate all the schemas (allOf){tail}"))

    return check


def _any_of(parts: list[Schema]) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        result = [validate(value, part, path) for part in parts]
        if all(result):
            causes.append(_whole_object(path, "validate at least one schema (anyOf)"))
            causes.extend(result[0])

    return check


def _one_of(parts: list[Schema]) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        result = [validate(value, part, path) for part in parts]
        valid = sum(not one for one in result)
        start = "validate one and only one schema (oneOf). Found "
        if valid == 0:
            causes.append(_whole_object(path, start + "none valid"))
            causes.extend(result[0])
        elif valid > 1:
            causes.append(_whole_object(path, f"{start}{valid} valid alternatives"))

    return check


def _not(part: Schema) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        if not validate(value, part, path):
            causes.append(_whole_object(path, "not validate the schema (not)"))

    return check


def prune(value: Object, schema: Schema) -> tuple[Object, list[str]]:
    """Drop what the schema does not declare: the rest, and the paths of what was dropped."""
    dropped: list[str] = []
    return _prune_fields(value, schema, "", dropped, is_object=True), dropped


def _prune(value: Any, schema: Schema, path: str, dropped: list[str]) -> Any:
    kind = type(value)
    if kind is dict:
        return _prune_fields(value, schema, path, dropped, schema.is_embedded)
    if kind is list and schema.items is not None:
        items = schema.items
        out = [_prune(item, items, f"{path}[{i}]", dropped) for i, item in enumerate(value)]
        return out if any(map(is_not, out, value)) else value
    return value


_GONE = object()


def _prune_fields(
    value: Object, schema: Schema, path: str, dropped: list[str], is_object: bool
) -> Object:
    prefix = f"{path}." if path else ""
    fields, rest = schema.properties, schema.additional
    keeps = schema.preserves_unknown or schema.type is None
    changed: Object = {}
    for name, item in value.items():
        field = fields.get(name) or rest
        if is_object and name in IDENTITY:
            field = builtin(OBJECT_META) if name == "metadata" else _SCALAR
        if field is not None:
            kept = _prune(item, field, prefix + name, dropped)
            if kept is not item:
                changed[name] = kept
        elif not keeps:
            dropped.append(prefix + name)
            changed[name] = _GONE
    if not changed:
        return value
    merged = {**value, **changed}
    return {name: item for name, item in merged.items() if item is not _GONE}


_SCALAR = Schema({"type": "string"}, {})


def default(value: Any, schema: Schema) -> Any:
    """Put declared defaults where a field is missing, or is null and may not be; in place.

    Nulls that may not be and have no default are dropped from objects.
    """
    if type(value) is dict:
        _default_fields(value, schema)
    elif type(value) is list and schema.items is not None:
        items = schema.items
        for index, item in enumerate(value):
            if item is None and not items.is_nullable:
                value[index] = copy.deepcopy(items.raw.get("default"))
            default(value[index], items)
    return value


def _default_fields(value: Object, schema: Schema) -> None:
    fields, rest = schema.properties, schema.additional
    for name, item in list(value.items()):
        field = fields.get(name) or rest
        if item is None and field is not None and not field.is_nullable:
            del value[name]
            if name not in fields and field.raw.get("default") is not None:
                value[name] = copy.deepcopy(field.raw["default"])
    for name, field in fields.items():
        if name not in value and field.raw.get("default") is not None:
            value[name] = copy.deepcopy(field.raw["default"])
    for name, item in value.items():
        if type(item) in (dict, list):
            field = fields.get(name) or rest
            if field is not None:
                default(item, field)


_ZERO: dict[str, Callable[[], Any]] = {
    "string": str, "object": dict, "integer": int, "number": int, "boolean": bool,
}  # fmt: skip
"""Value that Go makes of a null that must be a value."""


def without_nulls(value: Any, schema: Schema | None = None) -> Any:
    """A built-in object as Go decodes it: a null field is as good as none.

    Quantities get their canonical spelling.  A null in a list or a map is the zero value of its
    type.  Values that no schema describes (a default in a CRD, a raw extension) keep their nulls;
    without a schema every null field goes.
    """
    if type(value) is dict:
        return _fields_without_nulls(value, schema)
    if type(value) is not list:
        return _canonical(value, schema) if schema else value
    items = schema.items if schema else None
    if schema and items is None:
        return value
    zero = _ZERO.get(items.type or "") if items else None
    return [zero() if item is None and zero else without_nulls(item, items) for item in value]


def _canonical(value: Any, schema: Schema) -> Any:
    """Quantities are stored in one spelling: `1024Mi` as `1Gi`, 2 as "2"."""
    if schema.raw.get("format") != "quantity" or not isinstance(value, str | int | float):
        return value
    try:
        return canonical_quantity(value)
    except QuantityError:
        return value  # `decode_errors` reports it


def _fields_without_nulls(value: Object, schema: Schema | None) -> Object:
    fields = schema.properties if schema else {}
    rest = schema.additional if schema else None
    if schema and not fields and rest is None:
        return value
    zero = _ZERO.get(rest.type or "") if rest else None
    out: Object = {}
    for name, item in value.items():
        field = fields.get(name) or rest
        if item is None:
            if zero:
                out[name] = zero()
        else:
            out[name] = without_nulls(item, field) if field or not schema else item
    return out


def decode_errors(value: Any, schema: Schema, *, is_custom: bool = False) -> str | None:
    """Return the error of Go's JSON decoder for the first value of a wrong type; None if there is
    none.

    The caller adds `Pod in version "v1" cannot be handled as a Pod: `. `is_custom`: only the fields
    of every object are decoded (apiVersion, kind, metadata); the schema covers the rest.
    """
    if is_custom:
        schema = _partial()
        value = {name: value[name] for name in IDENTITY if name in value}
    return _Decoding().value(value, schema, "", "")


@cache
def _partial() -> Schema:
    """Return the schema of the parts that the server decodes of a custom resource."""
    text = {"type": "string"}
    fields = {"apiVersion": text, "kind": text, "metadata": {"$ref": REF + OBJECT_META}}
    return Schema({"type": "object", "properties": fields}, builtin_definitions())


class _Decoding:
    """Finds the first wrong type; `holder` is the Go struct whose field is decoded."""

    def value(self, value: Any, schema: Schema, holder: str, path: str) -> str | None:
        kind = type(value)
        if value is None or (schema.type is None and not schema.is_int_or_string):
            return None
        if schema.is_int_or_string:
            return _quantity_error(value, schema)
        if kind not in JSON_TYPES[schema.type or ""] and not _is_whole(
            value, JSON_TYPES[schema.type or ""]
        ):
            return self.mismatch(value, schema, holder, path)
        if kind is dict:
            return self.fields(value, schema, holder, path)
        if kind is list and schema.items is not None:
            items = schema.items
            result = (self.value(item, items, holder, path) for item in value)
            return next(filter(None, result), None)
        return self.scalar(value, schema, holder, path)

    def fields(self, value: Object, schema: Schema, holder: str, path: str) -> str | None:
        fields, rest = schema.properties, schema.additional
        inside = _definition(schema) or holder
        for name, item in value.items():
            if name in fields:
                result = self.value(item, fields[name], inside, f"{path}.{name}" if path else name)
            elif rest is not None:
                result = self.value(item, rest, holder, path)
            else:
                continue
            if result:
                return result
        return None

    def scalar(self, value: Any, schema: Schema, holder: str, path: str) -> str | None:
        form = schema.raw.get("format")
        if form in INTEGER_RANGES:
            low, high = INTEGER_RANGES[form]
            return None if low <= value <= high else self.mismatch(value, schema, holder, path)
        if form == "date-time" and not is_date_time(value):
            layout = "2006-01-02T15:04:05Z07:00"
            shown = go_text(value)
            return f'parsing time {shown} as "{layout}": cannot parse {shown} as "2006"'
        if form == "byte":
            bad = BASE64.match(value)
            if bad is None or bad.end() < len(value) or len(value) % 4:
                return f"illegal base64 data at input byte {bad.end() if bad else 0}"
        return None

    def mismatch(self, value: Any, schema: Schema, holder: str, path: str) -> str:
        kind = GO_KINDS[type(value)]
        if schema.raw.get("format") == "date-time":
            return f"json: cannot unmarshal {kind} into Go value of type string"
        if kind == "number" and schema.type == "integer":
            kind += " " + go_number(value)
        where = f"struct field {holder}.{path}" if path else "value"
        return f"json: cannot unmarshal {kind} into Go {where} of type {_go_type(schema)}"


def _definition(schema: Schema) -> str:
    """Name of the Go struct of a node: ContainerPort."""
    reference: str = schema.raw.get("$ref", "")
    known = schema.raw.get("x-kubernetes-group-version-kind")
    return known[0]["kind"] if known and not reference else reference.rpartition(".")[2]


def _go_type(schema: Schema) -> str:
    """Go's name of a field's type: []v1.ContainerPort."""
    if schema.type == "array" and schema.items is not None:
        return "[]" + _go_type(schema.items)
    if schema.type == "object":
        if schema.additional is not None and "$ref" not in schema.raw:
            return "map[string]" + _go_type(schema.additional)
        return ".".join(schema.raw.get("$ref", "").rsplit(".", 2)[1:]) or "object"
    if schema.type == "integer":
        return str(schema.raw.get("format", "int64"))
    return {"number": "float64", "boolean": "bool"}.get(schema.type or "", schema.type or "any")


def _quantity_error(value: Any, schema: Schema) -> str | None:
    """Error of a value written as number or string: int-or-string and quantity."""
    if schema.raw.get("format") == "quantity":
        text = value if isinstance(value, str) else go_text(value)
        if QUANTITY.fullmatch(text):
            return None
        if QUANTITY_OUTLINE.fullmatch(text):
            return "unable to parse quantity's suffix"
        return f"quantities must match the regular expression '^{QUANTITY_FORM}$'"
    if type(value) in (str, int):
        return None
    number = f" {go_number(value)}" if isinstance(value, float) else ""
    return f"json: cannot unmarshal {GO_KINDS[type(value)]}{number} into Go value of type int32"
