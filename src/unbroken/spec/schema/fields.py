"""The fields of values as data: JSON keys, types, defaults and limits.

Reading, writing and the CRD are all derived from this, so that they cannot disagree.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

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
class Shape:
    """The type of a value."""

    base: Base
    of: Any = None
    """The class of an enum or a record."""
    item: Shape | None = None
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass."""

    name: str
    key: str
    shape: Shape
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


def shape(hint: Any, limits: Limits = Limits()) -> Shape:
    """Return the shape of a type hint; `X | None` is the same as X, for null means absent."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        result = next((a for a in arguments[1:] if isinstance(a, Limits)), limits)
        return shape(arguments[0], result)
    if origin in (Union, types.UnionType):
        return shape(next(a for a in arguments if a is not type(None)), limits)
    if origin is tuple:
        return Shape(Base.LIST, item=shape(arguments[0]), limits=limits)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Shape(Base.STRINGS if arguments[1] is str else Base.OBJECT)
    if limits.is_time:
        return Shape(Base.TIME, limits=limits)
    if hint in BASES:
        return Shape(BASES[hint], limits=limits)
    return Shape(Base.RECORD if is_dataclass(hint) else Base.ENUM, of=hint)


def camel(name: str) -> str:
    """Return the camel case: `clean_pod_policy` -> `cleanPodPolicy`."""
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)
