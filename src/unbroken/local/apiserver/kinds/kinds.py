"""Kinds of objects as the server knows them: names, versions, scope, schema, columns.

The generic resource path works from these values alone. Built-in kinds are in `builtins`, kinds of
custom resources are made from their definitions in `crds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.schema.schemas import Schema


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`: `metav1.TableColumnDefinition` and where its cell comes from."""

    name: str
    cell: Callable[[Object, float], Any]
    """(object, now in seconds since the epoch) -> the cell's value: string, integer or None."""
    type: str = "string"
    format: str = ""
    priority: int = 0
    """0: always shown; 1: with `-o wide` only."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Version:
    """One served version of a kind."""

    name: str
    schema: Schema
    schema_name: str
    """Key under which OpenAPI publishes the schema, such as io.k8s.api.core.v1.Pod."""
    columns: tuple[Column, ...] = ()
    has_status: bool = False
    """The `status` subresource exists; then a write of the object leaves status alone."""
    scale: Mapping[str, str] | None = None
    """JSON paths of the `scale` subresource: specReplicasPath, statusReplicasPath, ..."""
    selectable_fields: tuple[str, ...] = ("metadata.name", "metadata.namespace")
    """Field selectors that are taken."""
    deprecation: str | None = None
    """Warning sent with every answer in this version."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object in one API group; objects are stored in `storage_version`."""

    group: str
    """Empty for the core group."""
    kind: str
    plural: str
    singular: str
    namespaced: bool
    versions: Mapping[str, Version]
    """Served versions by name, the preferred one first."""
    storage_version: str
    list_kind: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    is_custom: bool = False
    """Made from a CustomResourceDefinition: pruned and defaulted by its schema."""
    stored_as: str | None = None
    """Collection of another kind that holds the objects, in that kind's form (see `events`)."""
    refusal: str = ""
    """Answer to every request for the kind, which only discovery knows; empty: it is served."""
    verbs: tuple[str, ...] = field(
        default=("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
    )

    @property
    def resource(self) -> str:
        """Name of the stored collection, unique over groups: `pods`, `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def storage(self) -> str:
        """Name of the collection that holds the objects."""
        return self.stored_as or self.resource

    def api_version(self, version: str) -> str:
        """Return the API version as objects write it: `v1`, `batch/v1`."""
        return f"{self.group}/{version}" if self.group else version
