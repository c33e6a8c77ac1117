"""Requests and answers of each operation: their shapes, their validation, and pages of lists.
Pure.

`data/shapes.json` is made by `tools/cluster_api_shapes.py` from the public service model.

The service itself ignores members that it does not know; here they are refused, for a member that
does nothing is mostly a misspelt one.

A NextToken says after which item the next page begins, and of which list it is. So no item appears
twice or is left out when others are added or deleted meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

from unbroken.spec.patterns import TRUSTED_MEMORY_BYTES, Pattern

from .errors import invalid


class Type(Enum):
    """Type of a shape."""

    STRUCTURE = "structure"
    LIST = "list"
    MAP = "map"
    STRING = "string"
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"


class ApiShape(msgspec.Struct, frozen=True):
    """A type with its limits; names in it are of other shapes."""

    type: Type
    members: Mapping[str, str] = {}
    required: tuple[str, ...] = ()
    union: bool = False
    """Exactly one member is given."""
    member: str = ""
    """Shape of the members of a list."""
    key: str = ""
    value: str = ""
    """Shape of the values of a map."""
    min: int | None = None
    max: int | None = None
    """Least and most: of a number its value, of a string or a list its length."""
    pattern: str | None = None
    enum: tuple[str, ...] = ()


class Operation(msgspec.Struct, frozen=True):
    """Names of the shapes of an operation; no output: it answers nothing."""

    input: str
    output: str | None = None


class ServiceModel(msgspec.Struct, frozen=True):
    """All operations and shapes."""

    version: str
    operations: Mapping[str, Operation]
    shapes: Mapping[str, ApiShape]


@cache
def schema() -> ServiceModel:
    """The shapes of this version; read once."""
    text = (files(__package__) / "data/shapes.json").read_bytes()
    return msgspec.json.decode(text, type=ServiceModel)


INT_MIN, INT_MAX = -(2**31), 2**31 - 1
"""Range of every integer of the service model."""
TIMESTAMP_MAX = 253_402_300_799
"""The end of the year 9999, in seconds since the epoch; an integer of JSON may have any length."""
SHOWN_CHARACTERS = 200
SHOWN_VIOLATIONS = 25
"""More are only counted: a list may have thousands of members."""
_HOST_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
IN_RE2 = {
    r"(?!\s*$).+": r".*\S.*",
    # Its look-ahead bounds the length, which the shape's `max` does as well.
    rf"(?=.{{1,255}}$)({_HOST_LABEL})(\.{_HOST_LABEL})*": rf"{_HOST_LABEL}(\.{_HOST_LABEL})*",
}
"""The model's patterns that have a look-ahead, as RE2 can express them."""


def check(schema: ServiceModel, operation: str, value: Any) -> None:
    """ValidationException with everything that is wrong with an operation's input."""
    result = list(violations(schema, schema.operations[operation].input, value))
    if not result:
        return
    count = len(result)
    noun = "validation error" if count == 1 else "validation errors"
    shown = "; ".join(result[:SHOWN_VIOLATIONS])
    more = f"; and {count - SHOWN_VIOLATIONS} more" if count > SHOWN_VIOLATIONS else ""
    raise invalid(f"{count} {noun} detected: {shown}{more}")


def violations(schema: ServiceModel, shape: str, value: Any, path: str = "") -> Iterator[str]:
    """Each constraint that the value fails to satisfy; `path` is where it stands."""
    result = schema.shapes[shape]
    match result.type:
        case Type.STRUCTURE:
            yield from _structure(schema, result, value, path)
        case Type.LIST:
            yield from _list(schema, result, value, path)
        case Type.MAP:
            yield from _map(schema, result, value, path)
        case Type.STRING:
            yield from _string(result, value, path)
        case Type.INTEGER | Type.FLOAT:
            yield from _number(result, value, path)
        case Type.BOOLEAN:
            if not isinstance(value, bool):
                yield _failed(value, path, "be a boolean")
        case Type.TIMESTAMP:
            if not is_timestamp(value):
                yield _failed(value, path, "be a timestamp")


def _structure(schema: ServiceModel, shape: ApiShape, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _failed(value, path, "be a structure")
        return
    given = {name: item for name, item in value.items() if item is not None}
    for name in shape.required:
        if name not in given:
            yield _failed(None, _below(path, name), "not be null")
    for name, item in given.items():
        if name not in shape.members:
            known = ", ".join(shape.members) or "none"
            yield _failed(item, _below(path, name), f"be one of the known members: [{known}]")
        else:
            yield from violations(schema, shape.members[name], item, _below(path, name))
    if shape.union and len(given) != 1:
        choices = ", ".join(shape.members)
        yield _failed(value, path, f"have exactly one of the members: [{choices}]")


def _list(schema: ServiceModel, shape: ApiShape, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield _failed(value, path, "be a list")
        return
    yield from _length(shape, value, path)
    for number, item in enumerate(value, 1):
        place = f"{path}.{number}.member"
        if item is None:
            yield _failed(None, place, "not be null")
        else:
            yield from violations(schema, shape.member, item, place)


def _map(schema: ServiceModel, shape: ApiShape, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _failed(value, path, "be a map")
        return
    yield from _length(shape, value, path)
    for key, item in value.items():
        yield from violations(schema, shape.key, key, f"{path}.key")
        yield from violations(schema, shape.value, item, f"{path}.{_cut(key)}.value")


def _string(shape: ApiShape, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield _failed(value, path, "be a string")
        return
    yield from _length(shape, value, path)
    if shape.enum and value not in shape.enum:
        yield _failed(value, path, f"satisfy enum value set: [{', '.join(shape.enum)}]")
    if shape.pattern is not None and not _matches(shape.pattern, value):
        yield _failed(value, path, f"satisfy regular expression pattern: {shape.pattern}")


def _number(shape: ApiShape, value: Any, path: str) -> Iterator[str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (shape.type is Type.INTEGER and not isinstance(value, int)):
        yield _failed(
            value, path, f"be {'an integer' if shape.type is Type.INTEGER else 'a number'}"
        )
        return
    least = INT_MIN if shape.min is None else shape.min
    most = INT_MAX if shape.max is None else shape.max
    if value < least:
        yield _failed(value, path, f"have value greater than or equal to {least}")
    if value > most:
        yield _failed(value, path, f"have value less than or equal to {most}")


def _length(shape: ApiShape, value: str | list[Any] | dict[str, Any], path: str) -> Iterator[str]:
    if shape.min is not None and len(value) < shape.min:
        yield _failed(value, path, f"have length greater than or equal to {shape.min}")
    if shape.max is not None and len(value) > shape.max:
        yield _failed(value, path, f"have length less than or equal to {shape.max}")


def is_timestamp(value: Any) -> bool:
    """Seconds since the epoch, or an ISO 8601 time with a zone."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= TIMESTAMP_MAX


def timestamp(value: float | str) -> float:
    """Seconds since the epoch of what `is_timestamp`."""
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)


@cache
def _compiled(pattern: str) -> Pattern:
    return Pattern(IN_RE2.get(pattern, pattern), TRUSTED_MEMORY_BYTES)


def _matches(pattern: str, value: str) -> bool:
    try:
        return _compiled(pattern).is_whole(value.encode())
    except UnicodeEncodeError:
        return False  # half of a surrogate pair, which is no text


def _failed(value: Any, path: str, constraint: str) -> str:
    shown = "null" if value is None else f"'{_cut(_text(value))}'"
    return f"Value {shown} at '{path}' failed to satisfy constraint: Member must {constraint}"


def _text(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return f"[{', '.join(_text(one) for one in value[:SHOWN_VIOLATIONS])}]"
        case dict():
            pairs = list(value.items())[:SHOWN_VIOLATIONS]
            return "{" + ", ".join(f"{key}={_text(item)}" for key, item in pairs) + "}"
        case _:
            return str(value)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _below(path: str, name: str) -> str:
    # The service names members as its own programs do: `instanceGroups.1.member.instanceCount`.
    name = _cut(name)
    own = name[:1].lower() + name[1:]
    return f"{path}.{own}" if path else own


T = TypeVar("T")
Key = tuple[float | str, str]
"""Sort key of a list, and an id that makes it unique."""
PAGE = 100
"""Default of MaxResults, and its maximum (API 2017-07-24)."""
NOT_OF_THE_LIST = ("NextToken", "MaxResults")


class _Token(msgspec.Struct, array_like=True):
    digest: str
    value: float | str
    id: str


def page(
    items: Sequence[T],
    key: Callable[[T], Key],
    body: Mapping[str, Any],
    *,
    is_descending: bool,
) -> tuple[list[T], str | None]:
    """The page of the items that the request asks for, and the token of the next one."""
    digest = _digest(body)
    ordered = sorted(items, key=key, reverse=is_descending)
    if body.get("NextToken"):
        after = _read(str(body["NextToken"]), digest)
        try:
            ordered = [one for one in ordered if _is_after(key(one), after, is_descending)]
        except TypeError as error:
            raise _garbled() from error
    size = body.get("MaxResults") or PAGE
    result = ordered[:size]
    if len(ordered) <= size:
        return result, None
    value, id = key(result[-1])
    token = msgspec.json.encode(_Token(digest, value, id))
    return result, base64.urlsafe_b64encode(token).decode()


def _is_after(key: Any, last: Any, is_descending: bool) -> bool:
    return bool(key < last if is_descending else key > last)


def _digest(body: Mapping[str, Any]) -> str:
    asked = {name: item for name, item in body.items() if name not in NOT_OF_THE_LIST}
    encoded = msgspec.json.encode(asked, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:16]


def _read(text: str, digest: str) -> Key:
    try:
        token = msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=_Token)
    except (binascii.Error, msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise _garbled() from error
    if token.digest != digest:
        raise invalid("NextToken is of another request: repeat the one that it came with")
    return token.value, token.id


def _garbled() -> Exception:
    return invalid("NextToken is none that was given out here")


def is_between(at: float, body: Mapping[str, Any], prefix: str) -> bool:
    """True if a time is after `<prefix>After` and before `<prefix>Before`, where they are given."""
    after, before = body.get(f"{prefix}After"), body.get(f"{prefix}Before")
    is_late_enough = after is None or at > timestamp(after)
    return is_late_enough and (before is None or at < timestamp(before))
