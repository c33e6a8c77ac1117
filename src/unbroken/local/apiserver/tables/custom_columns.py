"""Columns of `kubectl get` for custom kinds: JSON paths, cells, and ages as people read them.

The paths are those of k8s.io/client-go/util/jsonpath that printer columns use; recursive descent
(`..`) is not understood, and a definition that needs it is refused.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.kinds import Column
from unbroken.local.apiserver.schema.constraints import go_number

from .cells import human_duration

Step = Callable[[list[Any]], list[Any]]
"""Values in, values one step further on."""

LITERAL = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|-?\d+(?:\.\d+)?|true|false"""
TOKEN = re.compile(
    rf"""
      (?P<all>\.\*|\[\*\])
    | \.(?P<field>(?:\\.|[^.\[\]\\{{}}\s])+)
    | \[(?P<quoted>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\]
    | \[(?P<index>-?\d{{1,9}})\]
    | \[(?P<start>(?:-?\d{{1,9}})?):(?P<end>(?:-?\d{{1,9}})?)\]
    | \[\?\(\s*@(?P<path>(?:\.(?:\\.|[\w\-/\\])+|\[\d+\])*)
        (?:\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?P<literal>{LITERAL}))?\s*\)\]
    """,
    re.VERBOSE,
)
OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NAME = Column(
    "Name",
    lambda content, now: content["metadata"]["name"],
    format="name",
    description=(
        "Name must be unique within a namespace. Is required when creating resources, although "
        "some resources may allow a client to request the generation of an appropriate name "
        "automatically. Name is primarily intended for creation idempotence and configuration "
        "definition. Cannot be updated. More info: "
        "https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names"
    ),
)
CREATED = {
    "name": "Age",
    "type": "date",
    "description": (
        "CreationTimestamp is a timestamp representing the server time when this object was "
        "created. It is not guaranteed to be set in happens-before order across separate "
        "operations. Clients may not set this value. It is represented in RFC3339 form and is in "
        "UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: "
        "https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md"
        "#metadata"
    ),
    "jsonPath": ".metadata.creationTimestamp",
}


def json_path(text: str) -> Callable[[Any], list[Any]]:
    """Compile a path; ValueError if it is none.  The result gives all values at the path."""
    steps: list[Step] = []
    position = 0
    while position < len(text):
        token = TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"unrecognized path at {text[position:]!r}")
        steps.append(_step(token))
        position = token.end()
    if not steps:
        raise ValueError("path is empty")

    def find(content: Any) -> list[Any]:
        values = [content]
        for step in steps:
            values = step(values)
        return values

    return find


def _step(token: re.Match[str]) -> Step:
    result = token.groupdict()
    if result["all"]:
        return _members
    if result["field"] is not None or result["quoted"] is not None:
        name = result["field"] if result["field"] is not None else result["quoted"][1:-1]
        return _field(re.sub(r"\\(.)", r"\1", name))
    if result["index"] is not None:
        return _index(int(result["index"]))
    if result["path"] is not None:
        return _filter(result["path"], result["operator"], result["literal"])
    start = int(result["start"]) if result["start"] else None
    end = int(result["end"]) if result["end"] else None
    return lambda values: [x for v in values if isinstance(v, list) for x in v[start:end]]


def _members(values: list[Any]) -> list[Any]:
    out: list[Any] = []
    for value in values:
        out += value.values() if isinstance(value, dict) else value if type(value) is list else ()
    return out


def _field(name: str) -> Step:
    return lambda values: [v[name] for v in values if isinstance(v, dict) and name in v]


def _index(index: int) -> Step:
    def step(values: list[Any]) -> list[Any]:
        lists = [value for value in values if isinstance(value, list)]
        return [value[index] for value in lists if -len(value) <= index < len(value)]

    return step


def _filter(path: str, sign: str | None, literal: str | None) -> Step:
    find = json_path(path) if path else lambda value: [value]
    wanted = _literal(literal) if literal is not None else None

    def fits(item: Any) -> bool:
        result = find(item)
        if sign is None or not result:
            return bool(result)
        try:
            return bool(OPERATORS[sign](result[0], wanted))
        except TypeError:
            return False

    return lambda values: [item for item in _members(values) if fits(item)]


def _literal(text: str) -> Any:
    if text[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return json.loads(text)


def age(value: Any, now: float) -> str | None:
    """Time since an RFC 3339 time; None if `value` is no text, <invalid> if it is no time."""
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return "<invalid>"
    return human_duration(now - at.timestamp()) if at.tzinfo else "<invalid>"


def _text(value: Any) -> str:
    """A value in a column of type string."""
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    return go_number(value) if isinstance(value, int | float) else str(value)


def _cell(kind: str, value: Any, now: float) -> Any:
    """Cell of a value in a column of type `kind`; None is shown as nothing."""
    if kind == "date":
        return age(value, now)
    if kind == "string":
        return None if value is None else _text(value)
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if kind == "integer" else float(value)


def _column(declared: Mapping[str, Any]) -> Column:
    find, kind = json_path(declared["jsonPath"]), declared["type"]

    def cell(content: Object, now: float) -> Any:
        result = find(content)
        return _cell(kind, result[0], now) if result else None

    return Column(
        declared["name"],
        cell,
        type=kind,
        format=declared.get("format", ""),
        priority=declared.get("priority", 0),
        description=declared.get("description")
        or f"Custom resource definition column (in JSONPath format): {declared['jsonPath']}",
    )


def custom_columns(declared: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The name, then `additionalPrinterColumns` of a definition, or the age if there are none."""
    return (NAME, *map(_column, declared or [CREATED]))
