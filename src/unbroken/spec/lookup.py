"""Values in objects of which nothing is checked yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def value_at(thing: Any, *path: str) -> Any:
    """Return the value at a path of an object; None: there is none."""
    for key in path:
        thing = thing.get(key) if isinstance(thing, Mapping) else None
    return thing
