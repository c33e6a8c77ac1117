"""Values from JSON objects, by the fields that their classes declare.

It is lenient in form (numbers as text, text as numbers, null as absent) and strict in meaning. It
never raises, whatever the input. An unusable value becomes the field's default and a problem.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from unbroken.foreign_numbers import finite_number
from unbroken.spec.problems import Report, below
from unbroken.spec.times import time_seconds

from .fields import INT_MAX, Base, Limits, Shape, fields_of

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


def _blank(shape: Shape) -> Any:
    match shape.base:
        case Base.RECORD:
            return blank_record(shape.of)
        case Base.ENUM:
            return next(iter(shape.of))
        case _:
            return BLANKS[shape.base]()


def _read(shape: Shape, value: Any, path: str, report: Report) -> Any:
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


def _items(shape: Shape, values: Any, path: str, report: Report) -> Any:
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
