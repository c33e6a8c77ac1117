"""A message is read and written by what its class says of each field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest
from msgspec import Meta

from unbroken.errors import PeerError
from unbroken.wire.codec import (
    KEEPS_LAST,
    REQUIRED,
    UNKNOWN,
    WRITTEN,
    Natural,
    Real,
    Text,
    dump,
    load,
    read,
    write,
)


class Colour(Enum):
    """Two of them."""

    RED = "red"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Part:
    """A record in a list."""

    number: Natural
    common: Natural | None
    label: Text
    at: Real
    notes: Annotated[tuple[Annotated[str, Meta(max_length=3)], ...], Meta(max_length=2), KEEPS_LAST]


@dataclass(frozen=True, slots=True)
class Whole:
    """One field of each kind."""

    name: Annotated[Text, REQUIRED]
    colour: Annotated[Colour, Meta(extra={UNKNOWN: Colour.OTHER})]
    state: Colour = Colour.RED
    parts: Annotated[tuple[Part, ...], Meta(max_length=2)] = ()
    ranks: Annotated[tuple[Natural, ...], Meta(max_length=3)] = ()
    rates: Annotated[Mapping[str, float], Meta(max_length=2)] = field(default_factory=dict)
    seconds: Annotated[float, Meta(ge=1, le=60)] = 5.0
    said: Annotated[Text, WRITTEN] = ""
    is_late: bool = False


FULL = {
    "name": "", "colour": "red", "state": "red", "parts": [{"number": 0, "at": 0.0}],
    "ranks": [1, 2], "rates": {"a": 0.5, "b": "inf"}, "seconds": 5.0, "said": "", "is_late": False,
}  # fmt: skip


def test_a_message_keeps_its_form() -> None:
    found = read(Whole, FULL, "whole")
    assert found.parts == (Part(0, None, "", 0.0, ()),)
    assert load(dump(write(found))) == FULL


def test_absent_and_null_fields_are_empty_or_have_their_default() -> None:
    value = dict.fromkeys(FULL, None) | {"name": "n", "colour": "green", "new": 1}
    assert read(Whole, value, "whole") == Whole("n", Colour.OTHER)


def test_what_is_too_long_is_cut() -> None:
    part = {"number": 1, "notes": ["a", "bcdef", "\0\ud800g"]}
    value = {**FULL, "parts": [part] * 3, "ranks": [1, 2, 3, -4], "seconds": 600}
    found = read(Whole, {**value, "rates": {"a": 1, "b": 2, "c": 3}}, "whole")
    assert len(found.parts) == 2
    assert found.parts[0].notes == ("bcd", "?g")
    assert (found.ranks, found.rates, found.seconds) == ((1, 2, 3), {"a": 1.0, "b": 2.0}, 60.0)
    assert json.dumps(write(found)["seconds"]) == "60.0"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": None}, "whole: Object missing required field `name`"),
        ({"colour": None}, "whole: Object missing required field `colour`"),
        ({"colour": 1}, "whole.colour: Expected `str`, got `int`"),
        ({"state": "green"}, "whole.state: Invalid enum value 'green'"),
        ({"parts": [{"number": 1}, {}]}, "whole.parts[1]: Object missing required field `number`"),
        ({"parts": [None]}, "whole.parts[0]: Expected `object`, got `null`"),
        ({"parts": [{"notes": ["", "", 1]}]}, "whole.parts[0].notes[1]: Expected `str`, got `int`"),
        ({"ranks": [0, True]}, "whole.ranks[1]: Expected `int`, got `bool`"),
        ({"ranks": ["\ud800"]}, "whole: a text with half of a surrogate pair"),
        ({"rates": []}, "whole.rates: Expected `object`, got `array`"),
        ({"seconds": 0.5}, "whole.seconds: Expected `float` >= 1.0"),
        ({"seconds": float("nan")}, "whole.seconds: Expected `float` >= 1.0"),
        ({"is_late": 1}, "whole.is_late: Expected `bool`, got `int`"),
    ],
)
def test_the_first_wrong_value_is_named_with_its_place(change: dict[str, Any], text: str) -> None:
    with pytest.raises(PeerError) as caught:
        read(Whole, FULL | change, "whole")
    assert str(caught.value) == text


def test_a_list_without_a_limit_is_refused_before_anything_is_read() -> None:
    @dataclass(frozen=True)
    class Unbounded:
        ranks: tuple[Natural, ...]

    with pytest.raises(TypeError, match="without a limit"):
        read(Unbounded, {}, "unbounded")
