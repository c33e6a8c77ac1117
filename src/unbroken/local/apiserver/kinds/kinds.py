"""Kinds of objects as the server knows them, and the catalogue of those that are served.

The generic resource path works from these values alone. Built-in kinds are in `builtin`, kinds of
custom resources are made from their definitions in `crds`.

Events have two forms, core/v1 and events.k8s.io/v1, and one store: that of core/v1.

The pairs of names are those of pkg/apis/events/v1/conversion.go of Kubernetes v1.33.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.local.apiserver.http.status import ApiError, Object
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


def no_such_page() -> ApiError:
    """404 for a path or a resource that is not served."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


class Catalogue:
    """Finds a kind by the names in a request.  `generation` grows with every change."""

    def __init__(self, builtins: Iterable[Kind]) -> None:
        self._kinds: dict[tuple[str, str], Kind] = {}
        self._builtin = {(kind.group, kind.plural) for kind in builtins}
        for kind in builtins:
            self._kinds[kind.group, kind.plural] = kind
        self.generation = 0

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds.values())

    def find(self, group: str, version: str, plural: str) -> tuple[Kind, Version]:
        """Find a kind and its version. Raises ApiError 404 when they are not served."""
        kind = self._kinds.get((group, plural))
        served = kind.versions.get(version) if kind is not None else None
        if kind is None or served is None:
            raise no_such_page()
        if kind.refusal:
            raise ApiError(404, "NotFound", kind.refusal)
        return kind, served

    def resource(self, plural: str, group: str) -> Kind | None:
        """The kind of a collection; None when it is not served."""
        return self._kinds.get((group, plural))

    def put(self, kind: Kind) -> None:
        """Serve a custom kind, or serve it as it is now."""
        assert (kind.group, kind.plural) not in self._builtin
        self._kinds[kind.group, kind.plural] = kind
        self.generation += 1

    def drop(self, group: str, plural: str) -> None:
        """Serve a custom kind no longer."""
        if self._kinds.pop((group, plural), None) is not None:
            self.generation += 1

    def is_builtin(self, group: str, plural: str) -> bool:
        """True if the name belongs to the server itself."""
        return (group, plural) in self._builtin


_TO_CORE = {
    "note": "message",
    "regarding": "involvedObject",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_FROM_CORE = {core: name for name, core in _TO_CORE.items()}


def to_storage(kind: Kind, content: Object) -> Object:
    """The object in the form that is stored; it shares its parts with `content`."""
    return content if kind.stored_as is None else stored_form(content)


def stored_form(content: Object) -> Object:
    """An event of either form in that of core/v1."""
    return {_TO_CORE.get(name, name): value for name, value in content.items()}


def from_storage(kind: Kind, content: Object) -> Object:
    """A stored object in the form of `kind`; it shares its parts with `content`."""
    if kind.stored_as is None:
        return content
    return {_FROM_CORE.get(name, name): value for name, value in content.items()}
