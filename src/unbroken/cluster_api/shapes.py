"""Requests and answers of each operation: the shapes of `data/shapes.json` as values.

The file is made by `tools/cluster_api_shapes.py` from the public service model.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from importlib.resources import files

import msgspec


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


class Shape(msgspec.Struct, frozen=True):
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


class Schema(msgspec.Struct, frozen=True):
    """All operations and shapes."""

    version: str
    operations: Mapping[str, Operation]
    shapes: Mapping[str, Shape]


@cache
def schema() -> Schema:
    """The shapes of this version; read once."""
    text = (files(__package__) / "data/shapes.json").read_bytes()
    return msgspec.json.decode(text, type=Schema)
