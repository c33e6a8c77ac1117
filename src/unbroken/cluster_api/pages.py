"""Lists in order and in pages.  Pure.

A NextToken says after which item the next page begins, and of which list it is. So no item appears
twice or is left out when others are added or deleted meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from .errors import invalid
from .validation import timestamp

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
