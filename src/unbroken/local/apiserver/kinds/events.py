"""Events have two forms, core/v1 and events.k8s.io/v1, and one store: that of core/v1.

The pairs of names are those of pkg/apis/events/v1/conversion.go of Kubernetes v1.33.
"""

from __future__ import annotations

from unbroken.local.apiserver.http.status import Object

from .kinds import Kind

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
