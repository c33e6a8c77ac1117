"""A message is read and written by what its class says of each field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest

from unbroken.errors import PeerError
from unbroken.wire.codec import Limits, dump, load, read, write


class Colour(Enum):
    """Two of them."""

    RED = "red"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Part:
    """A record in a list."""

    number: int
    common: int | None
    label: str
    at: float
    notes: Annotated[tuple[Annotated[str, Limits(3)], ...], Limits(2, keeps_last=True)]


@dataclass(frozen=True, slots=True)
class Whole:
    """One field of each kind."""

    name: Annotated[str, Limits(is_required=True)]
    colour: Annotated[Colour, Limits(unknown=Colour.OTHER)]
    state: Colour = Colour.RED
    parts: Annotated[tuple[Part, ...], Limits(2)] = ()
    ranks: Annotated[tuple[int, ...], Limits(3)] = ()
    rates: Annotated[Mapping[str, float], Limits(2)] = field(default_factory=dict)
    seconds: Annotated[float, Limits(60, 1)] = 5.0
    said: Annotated[str, Limits(is_written=True)] = ""
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
        ({"name": None}, "whole.name: missing"),
        ({"colour": None}, "whole.colour: missing"),
        ({"colour": 1}, "whole.colour: not a text"),
        ({"state": "green"}, "whole.state: not one of red, other"),
        ({"parts": [{"number": 1}, {}]}, "whole.parts[1].number: missing"),
        ({"parts": [None]}, "whole.parts[0]: not an object"),
        ({"parts": [{"number": 1, "notes": ["", "", 1]}]}, "whole.parts[0].notes[1]: not a text"),
        ({"ranks": [0, True]}, "whole.ranks[1]: not a natural number"),
        ({"rates": []}, "whole.rates: not an object"),
        ({"seconds": 0.5}, "whole.seconds: less than 1"),
        ({"seconds": float("nan")}, "whole.seconds: not a finite number"),
        ({"is_late": 1}, "whole.is_late: neither true nor false"),
    ],
)
def test_the_first_wrong_value_is_named_with_its_place(change: dict[str, Any], text: str) -> None:
    with pytest.raises(PeerError) as caught:
        read(Whole, FULL | change, "whole")
    assert str(caught.value) == text


def test_a_list_without_a_limit_is_refused_before_anything_is_read() -> None:
    @dataclass(frozen=True)
    class Unbounded:
        ranks: tuple[int, ...]

    with pytest.raises(TypeError, match="without a limit"):
        read(Unbounded, {}, "unbounded")
