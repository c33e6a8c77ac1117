"""Objects that somebody with few rights may write, and that break who reads them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Object = dict[str, Any]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        ["9" * 5000, "\x00", "\x1b]0;x\x07", "a" * 70_000, "-0", "1e999", "٣", "", "²"]
    )
    | st.integers(10**30, 10**31)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
"""All JSON that an API server would store."""


def nested(levels: int) -> str:
    """JSON text nested so deeply; Python's own encoder does not go so far."""
    return '{"a":' * levels + "1" + "}" * levels


def mutated(base: Object) -> st.SearchStrategy[Object]:
    """The object with garbage in up to three of its places below metadata's identity."""
    places = [path for path in _places(base) if path[:1] != ("metadata",) or len(path) > 2]
    several = st.lists(st.tuples(st.sampled_from(places), JSON), min_size=1, max_size=3)
    return several.map(lambda changes: _changed(base, changes))


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in inside:
            found += _places(one, (*path, key))
    return found


def _changed(base: Object, changes: list[tuple[tuple[Any, ...], Any]]) -> Object:
    made = json.loads(json.dumps(base))
    for path, value in changes:
        place = made
        for key in path[:-1]:
            try:
                place = place[key]
            except (KeyError, IndexError, TypeError):
                break
        else:
            if isinstance(place, dict | list) and (not isinstance(place, list) or place):
                try:
                    place[path[-1]] = value
                except (IndexError, TypeError):
                    continue
    result: Object = made
    return result
