"""Read a Grafana dashboard by the types of Grafana's SDK, and print what they refuse.

It runs where `grafana-foundation-sdk` is importable. The SDK drops fields that it does not know,
and checks no types. So this program writes the dashboard again and compares, and compares each
value with the annotation of its field.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models.dashboard import Dashboard, RowPanel


def lost(given: Any, written: Any, place: str = "") -> Iterator[str]:
    """Yield the places of values that are not in what the SDK has written."""
    if isinstance(given, dict):
        for name, value in given.items():
            if isinstance(written, dict) and name in written:
                yield from lost(value, written[name], f"{place}/{name}")
            else:
                yield f"{place}/{name}: unknown field"
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for number, pair in enumerate(zip(given, written, strict=True)):
            yield from lost(*pair, f"{place}/{number}")
    elif given != written:
        yield f"{place}: {given!r} became {written!r}"


def mistyped(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Yield the places of values that are not of the type that the SDK annotates."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Union:
        findings = [list(mistyped(value, one, place)) for one in parts]
        if all(findings):  # the alternative that fits best fails deepest inside of the value
            yield from max(findings, key=lambda found: found[0].partition(":")[0].count("/"))
    elif origin is list and isinstance(value, list):
        for number, one in enumerate(value):
            yield from mistyped(one, parts[0], f"{place}/{number}")
    elif origin is dict and isinstance(value, dict):
        for name, one in value.items():
            yield from mistyped(one, parts[1], f"{place}/{name}")
    elif isinstance(value, UnknownDataquery):
        yield f"{place}: query of an unknown data source"
    elif hint is Any or hint is object:
        yield from _fields(value, place)
    elif not _fits(value, hint, origin or hint):
        yield f"{place}: {value!r} is not {hint}"
    else:
        yield from _fields(value, place)


def _fits(value: Any, hint: Any, kind: Any) -> bool:
    if kind is Literal:
        return value in get_args(hint)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [one.value for one in kind]
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def _fields(value: Any, place: str) -> Iterator[str]:
    if type(value).__module__.startswith("grafana_foundation_sdk."):
        for name, hint in get_type_hints(type(value)).items():
            yield from mistyped(getattr(value, name), hint, f"{place}/{name}")


def unknown_kinds(board: Any) -> Iterator[str]:
    """Yield the places of panels that no plugin of the SDK draws."""
    for number, one in enumerate(board.get("panels", ())):
        if plugins.cogruntime.panelcfg_config(one.get("type", "")) is None:
            yield f"/panels/{number}/type: no panel is called {one.get('type')!r}"


if __name__ == "__main__":
    plugins.register_default_plugins()
    given = json.load(sys.stdin)
    read = Dashboard.from_json(given)
    assert not any(isinstance(one, RowPanel) for one in read.panels or ())
    written = json.loads(json.dumps(read, cls=JSONEncoder))
    found = [*lost(given, written), *mistyped(read, Dashboard, ""), *unknown_kinds(given)]
    json.dump(found, sys.stdout)
