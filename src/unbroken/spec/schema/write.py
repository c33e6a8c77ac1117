"""JSON objects from values, by the fields that their classes declare."""

from __future__ import annotations

from typing import Any

from unbroken.spec.times import time_text

from .fields import Base, Shape, fields_of


def write_record(value: Any, *, is_minimal: bool = False) -> dict[str, Any]:
    """Return an object of a dataclass, without fields that are empty by default.

    `is_minimal` leaves out all defaults: the stock client refuses keys that it does not know, such
    as `faultOnMatch`, whatever their value.
    """
    out = {}
    for field in fields_of(type(value)):
        given = getattr(value, field.name)
        is_default = field.default is not None and given == field.default()
        if is_default and (is_minimal or _is_empty(field.shape, given)):
            continue
        out[field.key] = _write(field.shape, given, is_minimal)
    return out


def _is_empty(shape: Shape, value: Any) -> bool:
    return value in (None, "", (), {}) or (shape.base is Base.TIME and value == 0)


def _write(shape: Shape, value: Any, is_minimal: bool) -> Any:
    match shape.base:
        case Base.RECORD:
            return write_record(value, is_minimal=is_minimal)
        case Base.LIST:
            assert shape.item is not None
            return [_write(shape.item, item, is_minimal) for item in value]
        case Base.ENUM:
            return value.value
        case Base.TIME:
            return time_text(value, has_microseconds=shape.limits.has_microseconds)
        case Base.NUMBER:
            return int(value) if value == int(value) else value
        case Base.OBJECT | Base.STRINGS:
            return dict(value)
        case _:
            return value
