"""The fields of values as data: JSON keys, types, defaults and limits; values from JSON objects,
and back.

Reading, writing and the CRD are all derived from this, so that they cannot disagree.

Reading is lenient in form (numbers as text, text as numbers, null as absent) and strict in meaning.
It never raises, whatever the input. An unusable value becomes the field's default and a problem.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from msgspec import Meta, inspect

from unbroken import typed_fields
from unbroken.foreign_numbers import finite_number
from unbroken.spec.problems import Report, below
from unbroken.spec.times import time_seconds, time_text
from unbroken.typed_fields import Field, ValueType, value_type

INT_MAX = 2**31 - 1
"""Greatest value of every count: what Kubernetes' int32 holds."""
CHOICES, IS_INT_OR_STRING, TIME_DIGITS = "choices", "is_int_or_string", "time_digits"
"""Keys of `Meta.extra`: texts that are allowed; a text that people also write as a number; digits
of the seconds of a time."""

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=INT_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT_MAX)]
Seconds = Annotated[float, Meta(ge=0)]
"""Seconds, with fractions."""
Filled = Annotated[str, Meta(min_length=1)]
IntOrString = Annotated[str, Meta(min_length=1, extra={IS_INT_OR_STRING: True})]
Time = Annotated[float, Meta(extra={TIME_DIGITS: 0})]
"""Seconds since the epoch; RFC 3339 in whole seconds on the wire."""
PreciseTime = Annotated[float, Meta(extra={TIME_DIGITS: 6})]
"""Seconds since the epoch; RFC 3339 in microseconds on the wire."""


def fields_of(record: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a dataclass in order."""
    return typed_fields.fields_of(record, camel)


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
        usable = BAD if given is None else _read(field.value, given, place, report)
        if usable is BAD:
            usable = field.default() if field.default is not None else _blank(field.value)
        result[field.name] = usable
    return record(**result)


def blank_record(record: type[Record]) -> Record:
    """Return a dataclass of defaults, if no usable object was given."""
    fields = fields_of(record)
    return record(**{f.name: f.default() if f.default else _blank(f.value) for f in fields})


def _blank(of: ValueType) -> Any:
    scalar = scalar_of(of)
    if scalar is not None:
        return scalar.blank()
    match of.type:
        case inspect.DataclassType(cls=record):
            return blank_record(record)
        case inspect.EnumType(cls=members):
            return next(iter(members))
        case _:
            return ()


def _read(of: ValueType, value: Any, path: str, report: Report) -> Any:
    """Return a value of the type, or BAD after a problem was reported."""
    scalar = scalar_of(of)
    if scalar is not None:
        result = scalar.read(value)
        if result is BAD:
            report.invalid(path, value, f"must be {scalar.wanted}")
        return result if result is not BAD and _is_within(of, result, path, report) else BAD
    match of.type:
        case inspect.DataclassType(cls=record):
            if isinstance(value, Mapping):
                return read_record(record, value, path, report)
            report.invalid(path, value, "must be an object")
        case inspect.VarTupleType():
            if isinstance(value, list | tuple):
                return _items(of.type, value, path, report)
            report.invalid(path, value, "must be a list")
        case inspect.EnumType(cls=members):
            choices = {member.value: member for member in members}
            if isinstance(value, str) and value in choices:
                return choices[value]
            report.unsupported(path, value, choices)
        case _:
            raise TypeError(f"values of this type are not read: {of.type}")
    return BAD


def _items(shape: inspect.VarTupleType, values: Any, path: str, report: Report) -> Any:
    item_type = value_type(shape.item_type)
    if shape.max_length is not None and len(values) > shape.max_length:
        report.invalid(path, values, f"must have at most {shape.max_length} items")
        return BAD
    if len(values) < (shape.min_length or 0):
        report.required(path, f"at least {shape.min_length} needed")
    result = []
    for index, value in enumerate(values):
        place = f"{path}[{index}]"
        if value is None:
            report.required(place)
        item = BAD if value is None else _read(item_type, value, place, report)
        # An unusable item keeps its place, so that later problems name the right ones.
        result.append(_blank(item_type) if item is BAD else item)
    return tuple(result)


def _is_within(of: ValueType, value: Any, path: str, report: Report) -> bool:
    """True if a value keeps its limits; report the first that it does not."""
    match of.type:
        case inspect.IntType(ge=least, le=most) | inspect.FloatType(ge=least, le=most):
            if least is not None and value < least:
                report.invalid(path, value, f"must be greater than or equal to {least}")
            elif most is not None and value > most:
                report.invalid(path, value, f"must be less than or equal to {most}")
            else:
                return True
        case inspect.StrType(min_length=least, max_length=most):
            choices = of.extra.get(CHOICES)
            if choices and value not in choices:
                report.unsupported(path, value, choices)
            elif len(value) < (least or 0):
                report.required(path)
            elif most is not None and len(value) > most:
                report.invalid(path, value, f"must be no longer than {most}")
            else:
                return True
        case _:
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


class Scalar(NamedTuple):
    """A kind of values that are neither records, lists nor enums."""

    name: str
    read: Callable[[Any], Any]
    """Returns the value of what was given, or BAD."""
    blank: Callable[[], Any]
    wanted: str
    """Description of a good value, for errors."""


_TIME: Final = Scalar(
    "time", _time, float, "an RFC 3339 time with a zone, such as 2026-01-31T12:00:00Z"
)
_OBJECT: Final = Scalar("object", _object, dict, "an object")
_STRINGS: Final = Scalar("strings", _strings, dict, "an object of strings")
_SCALARS: Final[Mapping[type[inspect.Type], Scalar]] = {
    inspect.IntType: Scalar("integer", _integer, int, "a whole number"),
    inspect.FloatType: Scalar("number", _number, float, "a number"),
    inspect.StrType: Scalar("string", _text, str, "text"),
    inspect.BoolType: Scalar("boolean", _boolean, bool, "true or false"),
}


def scalar_of(of: ValueType) -> Scalar | None:
    """Return the kind of a scalar; None: a record, a list or an enum."""
    if TIME_DIGITS in of.extra:
        return _TIME
    if isinstance(of.type, inspect.DictType):
        return _STRINGS if isinstance(of.type.value_type, inspect.StrType) else _OBJECT
    return _SCALARS.get(type(of.type))


def write_record(value: Any, *, is_minimal: bool = False) -> dict[str, Any]:
    """Return an object of a dataclass, without fields that are empty by default.

    `is_minimal` leaves out all defaults: the stock client refuses keys that it does not know, such
    as `faultOnMatch`, whatever their value.
    """
    out = {}
    for field in fields_of(type(value)):
        given = getattr(value, field.name)
        is_default = field.default is not None and given == field.default()
        if is_default and (is_minimal or _is_empty(field.value, given)):
            continue
        out[field.key] = _write(field.value, given, is_minimal)
    return out


def _is_empty(of: ValueType, value: Any) -> bool:
    return value in (None, "", (), {}) or (TIME_DIGITS in of.extra and value == 0)


def _write(of: ValueType, value: Any, is_minimal: bool) -> Any:
    match of.type:
        case inspect.StrType() | inspect.IntType() | inspect.BoolType():
            return value
        case inspect.FloatType() if TIME_DIGITS in of.extra:
            return time_text(value, has_microseconds=of.extra[TIME_DIGITS] > 0)
        case inspect.FloatType():
            return int(value) if value == int(value) else value
        case inspect.DataclassType():
            return write_record(value, is_minimal=is_minimal)
        case inspect.VarTupleType(item_type=item):
            inner = value_type(item)
            return [_write(inner, one, is_minimal) for one in value]
        case inspect.EnumType():
            return value.value
        case _:
            return dict(value)
