"""Kinds of this project about nodes as data, and their objects as values.

Reading is tolerant: malformed parts become a default and a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unbroken.spec.job.incident import GROUP, VERSION
from unbroken.spec.problems import Problem, Report
from unbroken.spec.schema.read import blank_record, read_record
from unbroken.spec.schema.write import write_record

from .check import NodeCheckSpec, NodeCheckStatus
from .cluster import ClusterSpec, ClusterStatus
from .machine import MachineSpec, MachineStatus
from .record import NodeRecordSpec

Spec = TypeVar("Spec")
Status = TypeVar("Status")


@dataclass(frozen=True, slots=True)
class OwnKind(Generic[Spec, Status]):
    """A kind of `unbroken.dev/v1` whose objects have no namespace."""

    kind: str
    plural: str
    short: str
    """Short name that kubectl accepts for the plural."""
    spec: type[Spec]
    status: type[Status] | None
    """Class of the status; None: the kind has no status."""

    @property
    def path(self) -> str:
        """Return the path of the collection at the API server."""
        return f"apis/{GROUP}/{VERSION}/{self.plural}"

    def new(self, name: str, spec: Spec, metadata: Mapping[str, Any] | None = None) -> Any:
        """Return an object to create; `metadata` has its fields besides the name."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": self.kind,
            "metadata": {"name": name, **(metadata or {})},
            "spec": write_record(spec),
        }

    def spec_of(self, content: Any) -> tuple[Spec, tuple[Problem, ...]]:
        """Return the spec of an object, and its problems."""
        return _part(self.spec, content, "spec")

    def status_of(self, content: Any) -> tuple[Status, tuple[Problem, ...]]:
        """Return the status of an object, and its problems; defaults if it has none yet."""
        assert self.status is not None
        return _part(self.status, content, "status")


Record = TypeVar("Record")


def _part(record: type[Record], content: Any, part: str) -> tuple[Record, tuple[Problem, ...]]:
    report = Report()
    result = content.get(part) if isinstance(content, Mapping) else None
    if not isinstance(result, Mapping):
        if result is not None:
            report.invalid(part, result, "must be an object")
        return blank_record(record), tuple(report.problems)
    return read_record(record, result, part, report), tuple(report.problems)


CLUSTER = OwnKind("Cluster", "clusters", "ubc", ClusterSpec, ClusterStatus)
MACHINE = OwnKind("Machine", "machines", "ubm", MachineSpec, MachineStatus)
NODE_CHECK = OwnKind("NodeCheck", "nodechecks", "nc", NodeCheckSpec, NodeCheckStatus)
NODE_RECORD: OwnKind[NodeRecordSpec, None] = OwnKind(
    "NodeRecord", "noderecords", "nr", NodeRecordSpec, None
)
OWN_KINDS: tuple[OwnKind[Any, Any], ...] = (CLUSTER, MACHINE, NODE_CHECK, NODE_RECORD)
