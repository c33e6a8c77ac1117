"""OpenAPI v2 as protobuf, the one form that kubectl before 1.27 asks for.

The messages are those of gnostic's OpenAPIv2.proto; of them what our own v2 document contains.  A
message is a table: JSON key -> (field number, how its value is written).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from .status import Object

Writer = Callable[[int, Any], bytes]
"""(field number, value) -> bytes"""
Table = Mapping[str, tuple[int, Writer]]


def encode(document: Object) -> bytes:
    """A v2 document as `openapi.v2.Document`."""
    return _message(DOCUMENT, document)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(int(value) % 2**64)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _any(number: int, value: Any) -> bytes:
    """`Any`: YAML text in field 2; JSON is YAML, and quicker to write."""
    return _bytes(number, _bytes(2, msgspec.json.encode(value)))


def _each(write: Writer) -> Writer:
    return lambda number, values: b"".join(write(number, value) for value in values)


def _named(write: Writer, inner: int) -> Writer:
    """A message of name (1) and value (2) for every pair, in field `inner`; 0: without holder."""

    def pairs(number: int, values: Mapping[str, Any]) -> bytes:
        made = [_text(1, name) + write(2, value) for name, value in values.items()]
        if not inner:
            return b"".join(_bytes(number, pair) for pair in made)
        return _bytes(number, b"".join(_bytes(inner, pair) for pair in made))

    return pairs


def _message(table: Table, value: Object) -> bytes:
    """A message; keys with `x-` are vendor extensions, others without a place are left out."""
    out = [
        write(number, value[key])
        for key, (number, write) in table.items()
        if key in value and value[key] is not None
    ]
    extensions = {key: item for key, item in value.items() if key.startswith("x-")}
    if extensions and "x-" in table:
        number, write = table["x-"]
        out.append(write(number, extensions))
    return b"".join(out)


def _nested(table: Table) -> Writer:
    return lambda number, value: _bytes(number, _message(table, value))


def _schema(number: int, value: Object) -> bytes:
    return _bytes(number, _message(SCHEMA, value))


def _wrapped(inner: int, write: Writer, number: int, value: Any) -> bytes:
    """A message whose one field `inner` holds the value (a proto `oneof`, or a list's holder)."""
    return _bytes(number, write(inner, value))


def _additional(number: int, value: Any) -> bytes:
    is_schema = isinstance(value, dict)
    return _bytes(number, _schema(1, value) if is_schema else _integer(2, value))


def _parameter(number: int, value: Object) -> bytes:
    """ParametersItem > Parameter > BodyParameter, or > NonBodyParameter > query or path."""
    if value["in"] == "body":
        return _bytes(number, _bytes(1, _nested(BODY)(1, value)))
    in_query = value["in"] == "query"
    made = _nested(QUERY if in_query else PATH)(3 if in_query else 4, value)
    return _bytes(number, _bytes(1, _bytes(2, made)))


def _response(number: int, value: Object) -> bytes:
    """ResponseValue > Response; its schema is a SchemaItem."""
    return _bytes(number, _nested(RESPONSE)(1, value))


EXTENSIONS = _named(_any, 0)
SCHEMA: Table = {
    "$ref": (1, _text), "format": (2, _text), "title": (3, _text), "description": (4, _text),
    "default": (5, _any), "multipleOf": (6, _double), "maximum": (7, _double),
    "exclusiveMaximum": (8, _integer), "minimum": (9, _double), "exclusiveMinimum": (10, _integer),
    "maxLength": (11, _integer), "minLength": (12, _integer), "pattern": (13, _text),
    "maxItems": (14, _integer), "minItems": (15, _integer), "uniqueItems": (16, _integer),
    "maxProperties": (17, _integer), "minProperties": (18, _integer),
    "required": (19, _each(_text)), "enum": (20, _each(_any)),
    "additionalProperties": (21, _additional), "type": (22, partial(_wrapped, 1, _text)),
    "items": (23, partial(_wrapped, 1, _schema)), "properties": (25, _named(_schema, 1)),
    "x-": (31, EXTENSIONS),
}  # fmt: skip
BODY: Table = {
    "description": (1, _text), "name": (2, _text), "in": (3, _text), "required": (4, _integer),
    "schema": (5, _schema),
}  # fmt: skip
QUERY: Table = {
    "required": (1, _integer), "in": (2, _text), "description": (3, _text), "name": (4, _text),
    "type": (6, _text), "uniqueItems": (20, _integer),
}  # fmt: skip
PATH: Table = {
    "required": (1, _integer), "in": (2, _text), "description": (3, _text), "name": (4, _text),
    "type": (5, _text), "uniqueItems": (19, _integer),
}  # fmt: skip
RESPONSE: Table = {"description": (1, _text), "schema": (2, partial(_wrapped, 1, _schema))}
OPERATION: Table = {
    "tags": (1, _each(_text)), "description": (3, _text), "operationId": (5, _text),
    "produces": (6, _each(_text)), "consumes": (7, _each(_text)),
    "parameters": (8, _each(_parameter)), "responses": (9, _named(_response, 1)),
    "schemes": (10, _each(_text)), "x-": (13, EXTENSIONS),
}  # fmt: skip
_operation = _nested(OPERATION)
PATH_ITEM: Table = {
    "get": (2, _operation), "put": (3, _operation), "post": (4, _operation),
    "delete": (5, _operation), "patch": (8, _operation), "parameters": (9, _each(_parameter)),
}  # fmt: skip
DOCUMENT: Table = {
    "swagger": (1, _text),
    "info": (2, _nested({"title": (1, _text), "version": (2, _text)})),
    "paths": (8, _named(_nested(PATH_ITEM), 2)),
    "definitions": (9, _named(_schema, 1)),
}
