"""JSON messages from frozen dataclasses and back: a class is the only definition of its message.

Field names are the keys. Types and their `msgspec.Meta` define the allowed values; every text,
list, map of numbers and number must have a limit.

Messages come from untrusted peers, which may be newer or older. `read` drops unknown fields and
cuts what is too long; then msgspec refuses what is wrong, as a PeerError with the place of the
first wrong value. (Manifests of users are read by `spec.schema`, which cuts nothing and reports all
problems.) Texts lose NUL and lone surrogates, which neither the Kubernetes API nor UTF-8 can store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta, inspect

from unbroken.errors import PeerError
from unbroken.typed_fields import ValueType, fields_of, value_type

NUMBER_MAX = 2**53
"""Largest integer that every JSON reader represents exactly."""
CLEAN_TEXT_MAX = 4096
"""Characters of a text; a longer one is cut or refused.  Agents cut theirs here or earlier."""
PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX = 64 * 1024, 4
"""`progress`, the checkpoints of a node: bytes as JSON, and objects inside each other (HyperPod's
agent has 2)."""
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def clean(text: str, longest: int = CLEAN_TEXT_MAX) -> str:
    """Return the beginning of a text, with `?` for lone surrogates and without NUL."""
    text = text[:longest]
    if not text.isascii():
        text = text.encode(errors="replace").decode()
    return text.replace("\0", "") if "\0" in text else text


def is_clean(text: str) -> bool:
    """True if `clean` would leave a text of any length unchanged."""
    return clean(text, len(text)) == text


def is_small(value: object, bytes_max: int, depth_max: int) -> bool:
    """True if a decoded JSON value is within these bounds of depth and length as JSON."""
    values, count = [value], 0
    for _ in range(depth_max + 1):
        outer = [one for one in values if isinstance(one, dict | list)]
        if not outer:
            return len(_ENCODE(value)) <= bytes_max
        values = [
            inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)
        ]
        count += len(values)
        if count > bytes_max:  # each takes at least one byte
            return False
    return False


FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Longest message either side takes; a start with the addresses of 12,500 nodes has 0.5 MB."""
TEXT_MAX = 16 * 1024
"""Characters that are kept of a text without a limit of its own."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Natural = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
"""Natural number. One with a lower `le` is reduced to it; one above NUMBER_MAX is refused."""
Real = Annotated[float, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
"""Finite number; `le` as for Natural."""
Amount = Annotated[float, Meta(ge=0, le=NUMBER_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
KEEPS_LAST = Meta(extra={"keeps_last": True})
"""A list that is too long loses its first items, not its last ones."""
REQUIRED = Meta(extra={"is_required": True, "is_written": True})
"""The field must be present, and is written even if it is empty.

Natural numbers and enums without a default are always required; other fields without a default are
empty if absent.
"""
WRITTEN = Meta(extra={"is_written": True})
"""The field is written even if it is empty."""
UNKNOWN: Final = "unknown"
"""Key of `Meta.extra`: the member of an enum that replaces values that only newer programs know."""

Record = TypeVar("Record")
Cut = Callable[[Any], Any]
"""Cuts a JSON value that is not null to its limits. Values of a wrong type stay as they are."""
Writer = Callable[[Any], Any]
_BLANKS: Final[Mapping[type[inspect.Type], Any]] = {
    inspect.StrType: "",
    inspect.FloatType: 0.0,
    inspect.BoolType: False,
    inspect.VarTupleType: (),
    inspect.DictType: {},
    inspect.NoneType: None,
}
"""Values of absent fields without a default."""


def load(frame: str | bytes) -> Mapping[str, Any]:
    """Return the object of a frame. Raises PeerError."""
    if len(frame) > FRAME_BYTES_MAX:
        raise PeerError(f"a message of {len(frame)} bytes; at most {FRAME_BYTES_MAX} are read")
    try:
        # json.loads() would also read UTF-16 and UTF-32.
        value: object = json.loads(frame.decode() if isinstance(frame, bytes) else frame)
    except (ValueError, RecursionError):
        raise PeerError("a message that is not JSON") from None
    if not isinstance(value, dict):
        raise PeerError("a message that is not an object")
    return value


def dump(value: Mapping[str, Any]) -> str:
    """Return a frame."""
    return _ENCODE(value)


def read(record: type[Record], value: object, name: str) -> Record:
    """Return a dataclass from a decoded JSON value. Raises PeerError, whose text begins with the
    name."""
    try:
        return msgspec.convert(_record_cut(cast(Hashable, record))(value), record)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        raise PeerError(f"{name}{place.removesuffix('`')}: {text}") from None
    except UnicodeEncodeError:  # msgspec's, where there is a text instead of something else
        raise PeerError(f"{name}: a text with half of a surrogate pair") from None
    except PeerError as error:
        raise PeerError(f"{name}: {error}") from None


def write(value: Any) -> dict[str, Any]:
    """Return the JSON object of a dataclass, without fields that are empty."""
    return {
        name: item if write_item is None else write_item(item)
        for name, get, write_item, is_written in _record_writer(cast(Hashable, type(value)))
        if (item := get(value)) or (is_written and item is not None)
    }


@cache
def _record_cut(record: Hashable) -> Cut:
    rows, blanks = [], {}
    for field in fields_of(cast(type, record)):
        rows.append((field.name, _cut(field.value)))
        blank = inspect.NoneType if field.is_optional else type(field.value.type)
        if field.default is None and "is_required" not in field.value.extra and blank in _BLANKS:
            blanks[field.name] = _BLANKS[blank]
    return partial(_cut_record, rows, blanks)


def _cut(value: ValueType) -> Cut | None:
    """Return how values of a type are cut; None: never."""
    match value.type:
        case inspect.DataclassType(cls=record):
            return _record_cut(cast(Hashable, record))
        case inspect.VarTupleType(item_type=item, max_length=int(most)):
            kept = slice(-most, None) if "keeps_last" in value.extra else slice(most)
            return partial(_cut_list, _cut(value_type(item)), kept)
        case inspect.DictType(value_type=inspect.FloatType(), max_length=int(most)):
            return partial(_numbers, most)
        case inspect.DictType(value_type=inspect.AnyType()):
            return _object
        case inspect.StrType(max_length=int(most)):
            return partial(_text, most)
        case inspect.EnumType(cls=members):
            return partial(_known, {member.value for member in members}, value.extra.get(UNKNOWN))
        case inspect.IntType(le=int(most)):
            return None if most == NUMBER_MAX else partial(_reduced, (int,), most)
        case inspect.FloatType(le=float() | int() as most):
            return None if most == NUMBER_MAX else partial(_reduced, (int, float), most)
        case inspect.BoolType():
            return None
        case _:
            raise TypeError(f"a type without a limit: {value.type}")


@cache
def _record_writer(record: Hashable) -> list[tuple[str, Writer, Writer | None, bool]]:
    """Return name, getter and writer of each field, and whether it is written even if it is
    empty."""
    may_be_empty = (inspect.StrType, inspect.VarTupleType, inspect.DictType)
    return [
        (field.name, attrgetter(field.name), _writer(field.value.type),
         "is_written" in field.value.extra or not isinstance(field.value.type, may_be_empty))
        for field in fields_of(cast(type, record))
    ]  # fmt: skip


def _writer(bare: inspect.Type) -> Writer | None:
    """Return the writer of a type; None: the value is JSON already."""
    match bare:
        case inspect.VarTupleType(item_type=item):
            write_item = _writer(value_type(item).type)
            return None if write_item is None else lambda items: [*map(write_item, items)]
        case inspect.DictType(value_type=inspect.FloatType()):
            return _named_numbers
        case inspect.DataclassType():
            return write
        case inspect.EnumType():
            return attrgetter("value")
        case _:
            return None


def _text(most: int, value: object) -> object:
    return clean(value, most) if isinstance(value, str) else value


def _cut_record(
    rows: list[tuple[str, Cut | None]], blanks: Mapping[str, Any], value: object
) -> object:
    if not isinstance(value, Mapping):
        return value
    given = {
        name: item if cut is None else cut(item)
        for name, cut in rows
        if (item := value.get(name)) is not None
    }
    return {**blanks, **given}


def _cut_list(cut: Cut | None, kept: slice, value: object) -> object:
    if not isinstance(value, list):
        return value
    return value[kept] if cut is None else [*map(cut, value[kept])]


def _known(values: set[str], unknown: Enum | None, value: object) -> object:
    if not isinstance(value, str) or value in values:
        return value
    return clean(value, 40) if unknown is None else unknown.value


def _reduced(types: tuple[type, ...], most: float, value: Any) -> object:
    # `True` is of another type. NaN is not less than any number.
    is_number = type(value) in types and abs(value) <= NUMBER_MAX
    return min(value, most) if is_number else value


def _object(value: object) -> object:
    """Return a small object of any values. Raises PeerError."""
    if isinstance(value, dict) and not is_small(value, PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX):
        limit = f"{PROGRESS_BYTES_MAX} bytes and a depth of {PROGRESS_DEPTH_MAX}"
        raise PeerError(f"an object of more than {limit}")
    return value


def _numbers(most: int, value: object) -> object:
    """Return numbers by name; other values are dropped."""
    if not isinstance(value, dict):
        return value
    return {
        clean(key, TEXT_MAX): number
        for key, given in islice(value.items(), most)
        if (number := _any_float(given)) is not None
    }


def _any_float(value: object) -> float | None:
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf if value > 0 else -math.inf


def _named_numbers(value: Mapping[str, float]) -> dict[str, float | str]:
    """Return the numbers with NaN and infinities, which JSON lacks, as their names."""
    return {key: one if math.isfinite(one) else str(float(one)) for key, one in value.items()}
