"""The Cluster: groups of equal machines, as the cluster API made them.

The API's own objects are stored unchanged; this module has the parts that the rest of the project
needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from unbroken.errors import SpecError
from unbroken.spec.schema.fields import Limits

from .values import Recovery

Time = Annotated[float, Limits(is_time=True, has_microseconds=True)]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The request for a cluster. The object's name is the cluster's, in lower case."""

    name: str
    """Name as given: a cluster's name may have capitals."""
    cluster_id: str
    """12 of [a-z0-9], the end of its ARN."""
    request: Mapping[str, Any]
    """The members of CreateCluster as UpdateCluster left them, InstanceGroups among them."""
    node_recovery: Recovery = Recovery.AUTOMATIC
    tags: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, Any] = field(default_factory=dict)
    """Instance group -> machines wanted, if different from the request's InstanceCount."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The state of a cluster."""

    phase: str = "Creating"
    """A ClusterStatus of the API."""
    message: str = ""
    created_at: Time | None = None
    updated_at: Time | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    """Groups, instances, operations and events, as the controller of clusters keeps them."""


def script_names(path: str) -> tuple[str, ...]:
    """Return the path of a lifecycle script below its folder, split. Raises SpecError if it may
    lead elsewhere.

    Names are taken literally: `%2e%2e` is an ordinary name.
    """
    names = tuple(path.split("/"))
    for name in names:
        if name in ("", ".", "..") or not name.isprintable():
            raise SpecError(
                f"{path[:200]!r}: each part between slashes must be the name of a folder or file, "
                f"not {name[:80]!r}"
            )
    return names
