"""JSON messages from frozen dataclasses and back: a class is the only definition of its message.

Field names are the keys. Types define the allowed values, `Limits` how much of a value is kept.
`read` and `write` are derived from them once for each class, and so is the faster reader of
`agent_http.reports`.

Messages come from untrusted peers, which may be newer or older. `read` drops unknown fields, cuts
values that are too long, and raises PeerError with the place of the first wrong value. (Manifests
of users are read by `spec.schema`, which cuts nothing and reports all problems.) Texts lose NUL and
lone surrogates, which neither the Kubernetes API nor UTF-8 can store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from unbroken.errors import PeerError

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

Record = TypeVar("Record")
Reader = Callable[[Any], Any]
"""Reads a JSON value that is not null. The text of a PeerError begins with the place inside it."""
Writer = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a field, and whether it may be absent: metadata of `Annotated`."""

    most: int | None = None
    """Most characters of a text, items of a list or entries of a map; the rest is dropped.

    For a number it is the greatest value, which replaces greater ones. Lists and maps of numbers
    must have it.
    """
    least: int | None = None
    """Least number; a lower one is refused."""
    keeps_last: bool = False
    """A list that is too long loses its first items, not its last ones."""
    is_required: bool = False
    """True if it must be present, and is written even if it is empty.

    Integers and enums without a default are always required; other fields without a default are
    empty if absent.
    """
    is_written: bool = False
    """True if it is written even if it is empty."""
    unknown: Enum | None = None
    """Replaces values of an enum that only newer programs know; None: they are refused."""


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
        result: Record = _record_reader(cast(Hashable, record))(value)
    except PeerError as error:
        raise PeerError(f"{name}{error}") from None
    return result


def write(value: Any) -> dict[str, Any]:
    """Return the JSON object of a dataclass, without fields that are empty."""
    return {
        name: item if write_item is None else write_item(item)
        for name, get, write_item, is_written in _record_writer(cast(Hashable, type(value)))
        if (item := get(value)) or (is_written and item is not None)
    }


def resolve(hint: Any, limits: Limits = Limits()) -> tuple[Any, Limits, bool]:
    """Return the bare type in a type hint, its limits, and whether it may be None."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        result = (argument for argument in arguments[1:] if isinstance(argument, Limits))
        return resolve(arguments[0], next(result, limits))
    if get_origin(hint) in (Union, UnionType):
        inner = next(argument for argument in arguments if argument is not NoneType)
        return (*resolve(inner, limits)[:2], True)
    return hint, limits, False


def is_map(bare: Any) -> bool:
    """True if a type is `Mapping[str, X]`."""
    origin = get_origin(bare)
    return isinstance(origin, type) and issubclass(origin, Mapping)


@cache
def _record_reader(record: Hashable) -> Reader:
    assert isinstance(record, type)
    hints = get_type_hints(record, include_extras=True)
    rows, blanks = [], {}
    for field in fields(record):
        bare, limits, is_optional = resolve(hints[field.name])
        has_default = (field.default, field.default_factory) != (MISSING, MISSING)
        blank = None if is_optional else _blank(bare)
        is_required = limits.is_required or (blank is MISSING and not has_default)
        if not has_default and not is_required:
            blanks[field.name] = blank
        rows.append((field.name, _reader(hints[field.name]), is_required))
    return partial(_record, record, rows, blanks)


@cache
def _record_writer(record: Hashable) -> list[tuple[str, Writer, Writer | None, bool]]:
    """Return name, getter and writer of each field, and whether it is written even if it is
    empty."""
    assert isinstance(record, type)
    hints = get_type_hints(record, include_extras=True)
    found: list[tuple[str, Writer, Writer | None, bool]] = []
    for name in (field.name for field in fields(record)):
        bare, limits, _ = resolve(hints[name])
        is_scalar = isinstance(bare, type) and bare is not str
        is_written = limits.is_required or limits.is_written or is_scalar
        found.append((name, attrgetter(name), _writer(bare), is_written))
    return found


def _reader(hint: Any) -> Reader:
    bare, limits, _ = resolve(hint)
    if get_origin(bare) is tuple:
        most = _most(limits)
        kept = slice(-most, None) if limits.keeps_last else slice(most)
        return partial(_list, _reader(get_args(bare)[0]), kept)
    if is_map(bare):
        return partial(_numbers, _most(limits)) if get_args(bare)[1] is float else _object
    if is_dataclass(bare):
        return _record_reader(cast(Hashable, bare))
    if issubclass(bare, Enum):
        return partial(_enum, {member.value: member for member in bare}, limits.unknown)
    if bare is str:
        return partial(_text, TEXT_MAX if limits.most is None else limits.most)
    read_scalar = {int: _integer, float: _float, bool: _flag}[bare]
    if limits.least is None and limits.most is None:
        return read_scalar
    return partial(_limited, read_scalar, limits)


def _writer(bare: Any) -> Writer | None:
    """Return the writer of a type; None: the value is JSON already."""
    if get_origin(bare) is tuple:
        write_item = _writer(resolve(get_args(bare)[0])[0])
        return None if write_item is None else lambda items: [*map(write_item, items)]
    if is_map(bare):
        return _named_numbers if get_args(bare)[1] is float else None
    if is_dataclass(bare):
        return write
    return attrgetter("value") if issubclass(bare, Enum) else None


def _blank(bare: Any) -> Any:
    """Return the value of an absent field without a default; MISSING: there is none."""
    if get_origin(bare) is tuple:
        return ()
    return {} if is_map(bare) else {str: "", float: 0.0, bool: False}.get(bare, MISSING)


def _most(limits: Limits) -> int:
    if limits.most is None:
        raise TypeError("a list or a map of numbers without a limit")
    return limits.most


def _wrong(text: str) -> PeerError:
    return PeerError(f": {text}")


def _record(
    record: type[Any], rows: list[tuple[str, Reader, bool]], blanks: Mapping[str, Any], value: Any
) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong("not an object")
    result, name = dict(blanks), ""
    try:
        for name, read_field, is_required in rows:
            given = value.get(name)
            if given is not None:
                result[name] = read_field(given)
            elif is_required:
                raise _wrong("missing")
    except PeerError as error:
        raise PeerError(f".{name}{error}") from None
    return record(**result)


def _list(read_item: Reader, kept: slice, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong("not a list")
    result: list[Any] = []
    try:
        result.extend(map(read_item, value[kept]))
    except PeerError as error:
        raise PeerError(f"[{len(result)}]{error}") from None
    return tuple(result)


def _text(longest: int, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("not a text")
    return clean(value, longest)


def _enum(members: Mapping[str, Enum], unknown: Enum | None, value: Any) -> Enum:
    member = members.get(_text(TEXT_MAX, value), unknown)
    if member is None:
        raise _wrong(f"not one of {', '.join(members)}")
    return member


def _integer(value: Any) -> int:
    # `True` is not of this type.
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise _wrong("not a natural number")
    return value


def _float(value: Any) -> float:
    # NaN is not less than any number.
    if type(value) not in (int, float) or not abs(value) <= NUMBER_MAX:
        raise _wrong("not a finite number")
    return float(value)


def _limited(read_number: Callable[[Any], float], limits: Limits, value: Any) -> float:
    number = read_number(value)
    if limits.least is not None and number < limits.least:
        raise _wrong(f"less than {limits.least}")
    return number if limits.most is None else min(number, type(number)(limits.most))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("neither true nor false")
    return value


def _object(value: Any) -> Mapping[str, Any]:
    """Return a small object of any values."""
    if not isinstance(value, dict):
        raise _wrong("not an object")
    if not is_small(value, PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX):
        limit = f"{PROGRESS_BYTES_MAX} bytes and a depth of {PROGRESS_DEPTH_MAX}"
        raise _wrong(f"more than {limit}")
    return value


def _numbers(most: int, value: Any) -> dict[str, float]:
    """Return numbers by name; other values are dropped."""
    if not isinstance(value, dict):
        raise _wrong("not an object")
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
