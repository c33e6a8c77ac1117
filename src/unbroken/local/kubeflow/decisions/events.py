"""What the built-in controller of PyTorchJobs is told, and what it orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.spec.kubeflow.pytorchjob import Parsed, Replica
from unbroken.spec.kubeflow.pytorchjob_status import PyTorchJobStatus


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
    """Of all its containers."""
    exit_code: int | None = None
    """Of the training container, where it has ended."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Failed pods that were made anew: they count as restarts against the backoff limit."""

    count: int = 0
    latest: frozenset[str] = frozenset()
    """Uids of those counted last, which may still be seen."""


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
    """Names of its services."""
    replaced: Replaced = Replaced()


@dataclass(frozen=True, slots=True)
class CreateService:
    """Make the service by which a pod is found."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Make a pod."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete this very pod."""

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
class Tell:
    """An event on the job."""

    reason: str
    message: str
    is_warning: bool = False


Order = CreateService | CreatePod | DeletePod | DeleteService | DeleteJob | Tell


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now."""

    orders: tuple[Order, ...] = ()
    status: PyTorchJobStatus | None = None
    """To be written before the orders are carried out; None: it is as it should be."""
    replaced: Replaced | None = None
    """To be written after the status and before the orders; None: it is as it should be."""
    again_at: float | None = None
    """When to look again, though nothing may have changed."""
