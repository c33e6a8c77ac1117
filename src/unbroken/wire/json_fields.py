"""Frames of JSON, and checked fields of the objects in them.

Unknown fields are dropped, so that either side may be newer.  A wrong value raises PeerError.
Every text, list and map that is kept has a bound.  Texts lose NUL and lone surrogates, which
neither the Kubernetes API nor UTF-8 can store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum
from itertools import islice
from typing import Any

from unbroken.errors import PeerError

from .bounds import (
    NUMBER_MAX,
    PROGRESS_BYTES_MAX,
    PROGRESS_DEPTH_MAX,
    clean,
    is_small,
)

FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Longest frame either side takes; a start with the addresses of 12,500 nodes has 0.5 MB."""
LINES_MAX = 64
"""Lines of one fault; an agent sends 24."""
METRICS_MAX = 64
"""Metrics of one rank; a worker can tell 16."""
TEXT_MAX = 16 * 1024
"""Characters of a text in a report or in evidence; a longer one is cut."""
_REQUIRED = ("agent_id", "state")
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def load(frame: str | bytes) -> Mapping[str, Any]:
    """The object of a frame; PeerError."""
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
    """A frame."""
    return _ENCODE(value)


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """A dataclass as `asdict` has it, without what is empty."""
    found = {}
    for name, item in value.items():
        if isinstance(item, Enum):
            found[name] = item.value
        elif isinstance(item, tuple) and item and isinstance(item[0], dict):
            found[name] = [plain(each) for each in item]
        elif name == "metrics" and item:
            found[name] = {key: _number(each) for key, each in item.items()}
        elif name in _REQUIRED or item not in (None, "", (), {}):
            found[name] = item
    return found


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinities, and what others read must be JSON."""
    return value if math.isfinite(value) else str(float(value))


class Taker:
    """Takes checked fields out of an object."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise PeerError(f"{where}: not an object")
        self._value = value
        self._where = where

    def text(self, name: str) -> str:
        """One that must be there."""
        found = self.optional_text(name)
        if found is None:
            raise self.wrong(name, "missing")
        return found

    def optional_text(self, name: str) -> str | None:
        """None: absent or null."""
        found = self._value.get(name)
        if found is None:
            return None
        if not isinstance(found, str):
            raise self.wrong(name, "not a text")
        return clean(found, TEXT_MAX)

    def number(self, name: str) -> int:
        """A natural number that must be there."""
        found = self.count(name)
        if found is None:
            raise self.wrong(name, "missing")
        return found

    def count(self, name: str) -> int | None:
        """A natural number; None: absent or null."""
        found = self._value.get(name)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= NUMBER_MAX:
            raise self.wrong(name, "not a natural number")
        return found

    def counts(self, name: str, longest: int) -> tuple[int, ...]:
        """The first of a list of natural numbers."""
        found = self._list(name)[:longest]
        if not all(type(one) is int and 0 <= one <= NUMBER_MAX for one in found):
            raise self.wrong(name, "not natural numbers")
        return tuple(found)

    def time(self, name: str) -> float | None:
        """A finite number; None: absent or null."""
        found = self._value.get(name)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not abs(found) <= NUMBER_MAX or not math.isfinite(found):
            raise self.wrong(name, "not a time")
        return float(found)

    def flag(self, name: str) -> bool | None:
        """None: absent or null."""
        found = self._value.get(name)
        if not isinstance(found, bool | None):
            raise self.wrong(name, "neither true nor false")
        return found

    def progress(self, name: str) -> Mapping[str, Any]:
        """A small object with any values; empty: absent or null."""
        found = self._mapping(name)
        if not is_small(found, PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX):
            limit = f"{PROGRESS_BYTES_MAX} bytes and a depth of {PROGRESS_DEPTH_MAX}"
            raise self.wrong(name, f"more than {limit}")
        return found

    def _mapping(self, name: str) -> Mapping[str, Any]:
        found = self._value.get(name)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self.wrong(name, "not an object")
        return found

    def floats(self, name: str) -> dict[str, float]:
        """Numbers by name; other values are left out."""
        found = islice(self._mapping(name).items(), METRICS_MAX)
        return {
            clean(key, TEXT_MAX): number
            for key, value in found
            if (number := _float(value)) is not None
        }

    def items(self, name: str, longest: int) -> list[Taker]:
        """The first objects of a list."""
        found = self._list(name)[:longest]
        return [Taker(item, f"{self._where}.{name}[{i}]") for i, item in enumerate(found)]

    def lines(self, name: str) -> tuple[str, ...]:
        """The last lines of a list of texts, each cut."""
        return self._cleaned(name, self._list(name)[-LINES_MAX:], TEXT_MAX)

    def texts(self, name: str, longest: int, characters: int) -> tuple[str, ...]:
        """The first texts of a list, each cut."""
        return self._cleaned(name, self._list(name)[:longest], characters)

    def _cleaned(self, name: str, found: list[Any], characters: int) -> tuple[str, ...]:
        if not all(isinstance(text, str) for text in found):
            raise self.wrong(name, "not texts")
        return tuple(clean(text, characters) for text in found)

    def _list(self, name: str) -> list[Any]:
        found = self._value.get(name)
        if found is not None and not isinstance(found, list):
            raise self.wrong(name, "not a list")
        return found or []

    def wrong(self, name: str, text: str) -> PeerError:
        """To be raised."""
        return PeerError(f"{self._where}.{name}: {text}")


def _float(value: object) -> float | None:
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer that no float comes near
        return math.inf if value > 0 else -math.inf
