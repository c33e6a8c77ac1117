"""Fields of dataclasses with the limits of their types (`msgspec.Meta`), as msgspec reads them.

`wire.codec` and `spec.schema` derive readers, writers and definitions from them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, cast

from msgspec import NODEFAULT, inspect


class ValueType(NamedTuple):
    """The type of a value that is not null."""

    type: inspect.Type
    extra: Mapping[str, Any]
    """`Meta.extra` of its annotations."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass."""

    name: str
    key: str
    """Key in JSON."""
    value: ValueType
    is_optional: bool
    """True if null is a value."""
    default: Callable[[], Any] | None
    """Makes the default; None: the field must be given."""


def value_type(shape: inspect.Type) -> ValueType:
    """Return the type of a value; `X | None` is the same as X."""
    if isinstance(shape, inspect.UnionType):
        return value_type(next(one for one in shape.types if not _is_null(one)))
    if isinstance(shape, inspect.Metadata):
        inner = value_type(shape.type)
        return ValueType(inner.type, {**inner.extra, **(shape.extra or {})})
    return ValueType(shape, {})


def fields_of(record: type[Any], key_of: Callable[[str], str] = str) -> tuple[Field, ...]:
    """Return the fields of a dataclass in order. Their metadata may name a `key`; other keys are
    made of the name."""
    return _fields(cast(Hashable, record), key_of)


@cache
def _fields(record: Hashable, key_of: Callable[[str], str]) -> tuple[Field, ...]:
    shape = inspect.type_info(record)
    assert isinstance(shape, inspect.DataclassType)
    return tuple(
        Field(
            field.name,
            declared.metadata.get("key") or key_of(field.name),
            value_type(field.type),
            isinstance(field.type, inspect.UnionType) and any(map(_is_null, field.type.types)),
            _default(field),
        )
        for field, declared in zip(shape.fields, fields(shape.cls), strict=True)
    )


def _default(field: inspect.Field) -> Callable[[], Any] | None:
    if field.default_factory is not NODEFAULT:
        factory: Callable[[], Any] = field.default_factory
        return factory
    return None if field.required else lambda: field.default


def _is_null(shape: inspect.Type) -> bool:
    return isinstance(shape, inspect.NoneType)
