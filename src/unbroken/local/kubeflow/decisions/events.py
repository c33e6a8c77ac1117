"""Values that the controller of PyTorchJobs decides by, and its orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.spec.kubeflow.pytorchjob import Parsed, PyTorchJobStatus, Replica


@dataclass(frozen=True, slots=True)
class JobPod:
    """A pod of the job."""

    name: str
    uid: str
    replica: Replica
    index: int
    phase: str = "Pending"
    is_leaving: bool = False
    restarts: int = 0
    """Restarts of all containers of the pod."""
    exit_code: int | None = None
    """Exit code of the training container; None: it has not ended."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Failed pods that were replaced: they count as restarts against the backoff limit."""

    count: int = 0
    latest: frozenset[str] = frozenset()
    """Uids of the pods counted last, which informers may still show."""


@dataclass(frozen=True, slots=True)
class JobPicture:
    """All that is known of a job."""

    name: str
    namespace: str
    uid: str
    parsed: Parsed
    status: PyTorchJobStatus
    is_leaving: bool = False
    pods: tuple[JobPod, ...] = ()
    services: frozenset[str] = frozenset()
    """Names of the services of the job."""
    replaced: Replaced = Replaced()


@dataclass(frozen=True, slots=True)
class CreateService:
    """Create the service that gives a pod its name in DNS."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a pod."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod of this uid."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete a service."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself."""


@dataclass(frozen=True, slots=True)
class RecordJobEvent:
    """Record an event on the job."""

    reason: str
    message: str
    is_warning: bool = False


Order = CreateService | CreatePod | DeletePod | DeleteService | DeleteJob | RecordJobEvent


@dataclass(frozen=True, slots=True)
class Plan:
    """Orders, and the status and annotation to write."""

    orders: tuple[Order, ...] = ()
    status: PyTorchJobStatus | None = None
    """Status to write before the orders are carried out; None: it is up to date."""
    replaced: Replaced | None = None
    """Annotation to write after the status and before the orders; None: it is up to date."""
    again_at: float | None = None
    """Time at which to decide again without a change; None: only after a change."""
