"""The fields of values as data: JSON keys, types, defaults and limits; values from JSON objects,
and back.

Reading, writing and the CRD are all derived from this, so that they cannot disagree.

Reading is lenient in form (numbers as text, text as numbers, null as absent) and strict in meaning.
It never raises, whatever the input. An unusable value becomes the field's default and a problem.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from unbroken.foreign_numbers import finite_number
from unbroken.spec.problems import Report, below
from unbroken.spec.times import time_seconds, time_text

INT_MAX = 2**31 - 1
"""Greatest value of every count: what Kubernetes' int32 holds."""


class Base(Enum):
    """Kind of a field's value."""

    INTEGER = "integer"
    NUMBER = "number"
    STRING = "string"
    BOOLEAN = "boolean"
    TIME = "time"
    """RFC 3339 on the wire, seconds since the epoch as a value."""
    ENUM = "enum"
    LIST = "list"
    RECORD = "record"
    """A dataclass of this project."""
    OBJECT = "object"
    """Any object, unchanged."""
    STRINGS = "strings"
    """An object of strings."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits beyond the type, as `typing.Annotated` metadata."""

    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    min_length: int = 0
    """Least length of a string or a list."""
    max_length: int | None = None
    is_int_or_string: bool = False
    """A string that people also write as a number."""
    is_time: bool = False
    has_microseconds: bool = False


@dataclass(frozen=True, slots=True)
class FieldShape:
    """The type of a value."""

    base: Base
    of: Any = None
    """The class of an enum or a record."""
    item: FieldShape | None = None
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass."""

    name: str
    key: str
    shape: FieldShape
    default: Callable[[], Any] | None
    """Makes the default; None: the field must be given."""


BASES: Mapping[Any, Base] = {
    int: Base.INTEGER,
    float: Base.NUMBER,
    str: Base.STRING,
    bool: Base.BOOLEAN,
}


def fields_of(record: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a dataclass in order; a field's metadata may name its `key`."""
    return _fields(cast(Hashable, record))


@cache
def _fields(record: Hashable) -> tuple[Field, ...]:
    assert isinstance(record, type)
    hints = get_type_hints(record, include_extras=True)
    return tuple(
        Field(f.name, f.metadata.get("key") or camel(f.name), shape(hints[f.name]), _default(f))
        for f in fields(record)
    )


def _default(field: Any) -> Callable[[], Any] | None:
    if field.default_factory is not MISSING:
        factory: Callable[[], Any] = field.default_factory
        return factory
    if field.default is MISSING:
        return None
    value = field.default
    return lambda: value


def shape(hint: Any, limits: Limits = Limits()) -> FieldShape:
    """Return the shape of a type hint; `X | None` is the same as X, for null means absent."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        result = next((a for a in arguments[1:] if isinstance(a, Limits)), limits)
        return shape(arguments[0], result)
    if origin in (Union, types.UnionType):
        return shape(next(a for a in arguments if a is not type(None)), limits)
    if origin is tuple:
        return FieldShape(Base.LIST, item=shape(arguments[0]), limits=limits)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return FieldShape(Base.STRINGS if arguments[1] is str else Base.OBJECT)
    if limits.is_time:
        return FieldShape(Base.TIME, limits=limits)
    if hint in BASES:
        return FieldShape(BASES[hint], limits=limits)
    return FieldShape(Base.RECORD if is_dataclass(hint) else Base.ENUM, of=hint)


def camel(name: str) -> str:
    """Return the camel case: `clean_pod_policy` -> `cleanPodPolicy`."""
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


Record = TypeVar("Record")
BAD: Final = object()
"""Replaces a value that cannot be used."""


def read_record(record: type[Record], value: Any, path: str, report: Report) -> Record:
    """Return a dataclass from an object; `report` gets every problem with it."""
    if not isinstance(value, Mapping):
        report.invalid(path, value, "must be an object")
        return blank_record(record)
    fields = fields_of(record)
    known = [field.key for field in fields]
    for key in value:
        if key not in known and value[key] is not None:
            report.unknown(path, str(key), known)
    result = {}
    for field in fields:
        place, given = below(path, field.key), value.get(field.key)
        if given is None and field.default is None:
            report.required(place)
        usable = BAD if given is None else _read(field.shape, given, place, report)
        if usable is BAD:
            usable = field.default() if field.default is not None else _blank(field.shape)
        result[field.name] = usable
    return record(**result)


def blank_record(record: type[Record]) -> Record:
    """Return a dataclass of defaults, if no usable object was given."""
    fields = fields_of(record)
    return record(**{f.name: f.default() if f.default else _blank(f.shape) for f in fields})


def _blank(shape: FieldShape) -> Any:
    match shape.base:
        case Base.RECORD:
            return blank_record(shape.of)
        case Base.ENUM:
            return next(iter(shape.of))
        case _:
            return BLANKS[shape.base]()


def _read(shape: FieldShape, value: Any, path: str, report: Report) -> Any:
    """Return a value of the shape, or BAD after a problem was reported."""
    match shape.base:
        case Base.RECORD if isinstance(value, Mapping):
            return read_record(shape.of, value, path, report)
        case Base.LIST if isinstance(value, list | tuple):
            return _items(shape, value, path, report)
        case Base.ENUM:
            choices = {member.value: member for member in shape.of}
            if isinstance(value, str) and value in choices:
                return choices[value]
            report.unsupported(path, value, choices)
            return BAD
        case Base.RECORD | Base.LIST:
            result = BAD
        case _:
            result = READERS[shape.base](value)
    if result is BAD:
        report.invalid(path, value, f"must be {WANTED[shape.base]}")
    elif not _is_within(shape.limits, result, path, report):
        result = BAD
    return result


def _items(shape: FieldShape, values: Any, path: str, report: Report) -> Any:
    assert shape.item is not None
    most, least = shape.limits.max_length, shape.limits.min_length
    if most is not None and len(values) > most:
        report.invalid(path, values, f"must have at most {most} items")
        return BAD
    if len(values) < least:
        report.required(path, f"at least {least} needed")
    result = []
    for index, value in enumerate(values):
        place = f"{path}[{index}]"
        if value is None:
            report.required(place)
        item = BAD if value is None else _read(shape.item, value, place, report)
        # An unusable item keeps its place, so that later problems name the right ones.
        result.append(_blank(shape.item) if item is BAD else item)
    return tuple(result)


def _is_within(limits: Limits, value: Any, path: str, report: Report) -> bool:
    """True if a value keeps its limits; report the first that it does not."""
    if limits.choices and value not in limits.choices:
        report.unsupported(path, value, limits.choices)
    elif limits.minimum is not None and value < limits.minimum:
        report.invalid(path, value, f"must be greater than or equal to {limits.minimum}")
    elif limits.maximum is not None and value > limits.maximum:
        report.invalid(path, value, f"must be less than or equal to {limits.maximum}")
    elif limits.min_length and len(value) < limits.min_length:
        report.required(path)
    elif limits.max_length is not None and len(value) > limits.max_length:
        report.invalid(path, value, f"must be no longer than {limits.max_length}")
    else:
        return True
    return False


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return BAD
    try:
        number = (
            finite_number(value, -sys.float_info.max, sys.float_info.max)
            if isinstance(value, str)
            else float(value)
        )
    except OverflowError:
        return BAD
    return number if number is not None and math.isfinite(number) else BAD


def _integer(value: Any) -> Any:
    number = _number(value)
    return int(number) if number is not BAD and number.is_integer() else BAD


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    # A larger number is not a known text, and Python may refuse to print it.
    number = _integer(value)
    return str(number) if number is not BAD and abs(number) <= INT_MAX else BAD


def _boolean(value: Any) -> Any:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), BAD)
    return value if isinstance(value, bool) else BAD


def _time(value: Any) -> Any:
    try:
        return time_seconds(value) if isinstance(value, str) else BAD
    except (ValueError, OverflowError):
        return BAD


def _object(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else BAD


def _strings(value: Any) -> Any:
    is_good = isinstance(value, Mapping) and all(
        isinstance(part, str) for pair in value.items() for part in pair
    )
    return dict(value) if is_good else BAD


READERS: Final[Mapping[Base, Callable[[Any], Any]]] = {
    Base.INTEGER: _integer,
    Base.NUMBER: _number,
    Base.STRING: _text,
    Base.BOOLEAN: _boolean,
    Base.TIME: _time,
    Base.OBJECT: _object,
    Base.STRINGS: _strings,
}
BLANKS: Final[Mapping[Base, Callable[[], Any]]] = {
    Base.INTEGER: int,
    Base.NUMBER: float,
    Base.STRING: str,
    Base.BOOLEAN: bool,
    Base.TIME: float,
    Base.LIST: tuple,
    Base.OBJECT: dict,
    Base.STRINGS: dict,
}
WANTED: Final[Mapping[Base, str]] = {
    Base.INTEGER: "a whole number",
    Base.NUMBER: "a number",
    Base.STRING: "text",
    Base.BOOLEAN: "true or false",
    Base.TIME: "an RFC 3339 time with a zone, such as 2026-01-31T12:00:00Z",
    Base.LIST: "a list",
    Base.RECORD: "an object",
    Base.OBJECT: "an object",
    Base.STRINGS: "an object of strings",
}


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


def _is_empty(shape: FieldShape, value: Any) -> bool:
    return value in (None, "", (), {}) or (shape.base is Base.TIME and value == 0)


def _write(shape: FieldShape, value: Any, is_minimal: bool) -> Any:
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
