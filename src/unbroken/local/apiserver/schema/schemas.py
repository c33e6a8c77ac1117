"""Schemas of objects: one view over Kubernetes' own definitions and those in a CRD.

`Schema` answers what the rest asks of a schema (fields, merge rules); validation, pruning and
defaulting are in `structural`.  Definitions refer to each other by name and may be recursive, so
everything is resolved when it is first asked for.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import cache, cached_property
from importlib import resources
from typing import Any

import msgspec

REF = "#/components/schemas/"


@cache
def builtin_definitions() -> dict[str, dict[str, Any]]:
    """Definitions by name (`io.k8s.api.core.v1.Pod`); made by tools/kubernetes_schemas.py."""
    packed = (
        resources.files("unbroken.local.apiserver").joinpath("data/kubernetes.json.gz").read_bytes()
    )
    loaded: dict[str, dict[str, Any]] = msgspec.json.decode(gzip.decompress(packed))
    return loaded


@cache
def builtin(name: str) -> Schema:
    """Schema of a built-in definition; KeyError if there is none of that name."""
    return Schema(builtin_definitions()[name], builtin_definitions())


class Schema:
    """One node of a schema.  `raw` holds constraints (enum, pattern, minimum, ...) as written."""

    def __init__(self, source: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
        target = source.get("$ref")
        if isinstance(target, str):
            # Keys beside the reference (merge rules, default) belong to this place.
            source = {**definitions[target.removeprefix(REF)], **source}
        self.raw: Mapping[str, Any] = source
        self._definitions = definitions

    @cached_property
    def memo(self) -> dict[str, Any]:
        """Room for what another module works out of this node once, under that module's name."""
        return {}

    @cached_property
    def type(self) -> str | None:
        """object, array, string, integer, number, boolean; None: anything."""
        result: str | None = self.raw.get("type")
        return result

    @cached_property
    def properties(self) -> dict[str, Schema]:
        """Declared fields of an object."""
        fields: Mapping[str, Any] = self.raw.get("properties") or {}
        return {name: Schema(field, self._definitions) for name, field in fields.items()}

    @cached_property
    def items(self) -> Schema | None:
        """Schema of a list's items."""
        items = self.raw.get("items")
        return Schema(items, self._definitions) if isinstance(items, Mapping) else None

    @cached_property
    def additional(self) -> Schema | None:
        """Schema of a map's values; None when the object has declared fields only."""
        result = self.raw.get("additionalProperties")
        if isinstance(result, Mapping):
            return Schema(result, self._definitions)
        return Schema({}, self._definitions) if result is True else None

    @cached_property
    def required(self) -> tuple[str, ...]:
        """Names of fields that must be there."""
        return tuple(self.raw.get("required") or ())

    @cached_property
    def preserves_unknown(self) -> bool:
        """Undeclared fields are kept (and, at `type` None, any value is taken)."""
        return bool(self.raw.get("x-kubernetes-preserve-unknown-fields"))

    @cached_property
    def is_embedded(self) -> bool:
        """The value is a whole object with apiVersion, kind and metadata."""
        return bool(self.raw.get("x-kubernetes-embedded-resource"))

    @cached_property
    def is_int_or_string(self) -> bool:
        """An integer or a string (for quantities of built-in kinds: any number or string)."""
        return bool(self.raw.get("x-kubernetes-int-or-string"))

    @cached_property
    def is_nullable(self) -> bool:
        """Null is a value of its own here (CRDs); elsewhere null means absent."""
        return bool(self.raw.get("nullable"))

    @cached_property
    def list_type(self) -> str:
        """atomic, set or map: how server-side apply merges a list."""
        result: str | None = self.raw.get("x-kubernetes-list-type")
        if result is None and "merge" in self.patch_strategy:
            return "map" if self.merge_key else "set"
        return result or "atomic"

    @cached_property
    def list_map_keys(self) -> tuple[str, ...]:
        """Fields that identify an item of a `map` list."""
        keys = tuple(self.raw.get("x-kubernetes-list-map-keys") or ())
        return keys or ((self.merge_key,) if self.merge_key else ())

    @cached_property
    def is_atomic_map(self) -> bool:
        """Server-side apply replaces this map or struct as one value."""
        return self.raw.get("x-kubernetes-map-type") == "atomic"

    @cached_property
    def patch_strategy(self) -> frozenset[str]:
        """Strategies of a strategic merge patch: merge, retainKeys, replace (built-in kinds
        only)."""
        return frozenset(filter(None, self.raw.get("x-kubernetes-patch-strategy", "").split(",")))

    @cached_property
    def merge_key(self) -> str | None:
        """Field that identifies an item in a strategic merge patch; None: a list of scalars."""
        result: str | None = self.raw.get("x-kubernetes-patch-merge-key")
        return result

    def field(self, name: str) -> Schema | None:
        """Schema of the value at key `name` of an object; None where nothing is declared."""
        return self.properties.get(name) or self.additional
