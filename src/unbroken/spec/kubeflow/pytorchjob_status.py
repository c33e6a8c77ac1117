"""The status of a PyTorchJob as values, as the training operator 1.8 writes it (`common_types.go`).

Reading is tolerant: malformed parts become defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import Limits
from unbroken.spec.schema.read import read_record
from unbroken.spec.schema.write import write_record

from .pytorchjob import Replica

Time = Annotated[float, Limits(is_time=True)]


@dataclass(frozen=True, slots=True)
class JobCondition:
    """A condition: Created, Running, Restarting, Suspended, Succeeded or Failed."""

    type: str
    status: str
    """`True` or `False`."""
    reason: str = ""
    message: str = ""
    last_update_time: Time = 0.0
    last_transition_time: Time = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Numbers of pods of one type."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    """Includes running pods that are being deleted: they may never report how they ended."""
    selector: str = ""
    label_selector: Mapping[str, Any] = field(default_factory=dict)
    """The older form of `selector`; read, never written."""


@dataclass(frozen=True, slots=True)
class ReplicaStatuses:
    """Numbers of pods by type; None: the job has no pods of that type."""

    master: ReplicaStatus | None = field(default=None, metadata={"key": Replica.MASTER.value})
    worker: ReplicaStatus | None = field(default=None, metadata={"key": Replica.WORKER.value})


@dataclass(frozen=True, slots=True)
class PyTorchJobStatus:
    """The status of a PyTorchJob."""

    conditions: tuple[JobCondition, ...] = ()
    """Conditions, the newest last."""
    replica_statuses: ReplicaStatuses = ReplicaStatuses()
    start_time: Time | None = None
    completion_time: Time | None = None
    last_reconcile_time: Time | None = None
    """Never written by this controller."""

    def has(self, type: str) -> bool:
        """True if the condition is true."""
        return any(
            condition.type == type and condition.status == "True" for condition in self.conditions
        )

    @property
    def is_finished(self) -> bool:
        """True if nothing is run any more."""
        return self.has("Succeeded") or self.has("Failed")


def status_from(content: Any) -> PyTorchJobStatus:
    """Return the status of an object; empty if it has none."""
    result = content if isinstance(content, Mapping) else {}
    return read_record(PyTorchJobStatus, result, "status", Report())


def status_to(status: PyTorchJobStatus) -> dict[str, Any]:
    """Return the status as a merge patch that leaves no stale part of it."""
    written = write_record(status)
    replicas = written.get("replicaStatuses") or {}
    counts = dict.fromkeys(("active", "succeeded", "failed"))
    written["replicaStatuses"] = {
        replica: None if item is None else {**counts, **{k: v for k, v in item.items() if v}}
        for replica, item in {**dict.fromkeys(r.value for r in Replica), **replicas}.items()
    }
    return {"startTime": None, "completionTime": None, **written}
