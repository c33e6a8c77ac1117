"""Values that the controller of RayClusters decides by, and its orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

HEAD, WORKER = "head", "worker"
"""Values of the label ray.io/node-type."""


@dataclass(frozen=True, slots=True)
class RayPod:
    """A pod of a RayCluster."""

    name: str
    uid: str
    node_type: str
    group: str
    """The worker group; `headgroup` for the head."""
    address: str = ""
    """The pod's IP address; empty: it has none yet."""
    phase: str = "Pending"
    is_leaving: bool = False
    is_ready: bool = False
    why_not_ready: tuple[str, str] = ("", "")
    """Reason and message of the pod's condition Ready."""
    exit_code: int | None = None
    """Exit code of the Ray container; None: it has not ended."""
    restart_policy: str = "Always"
    head_uid: str = ""
    """Uid of the head that a worker joined."""


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """All that is known of a RayCluster."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    is_leaving: bool = False
    pods: tuple[RayPod, ...] = ()
    service: Mapping[str, Any] | None = None
    """The head's service; None: it does not exist."""

    @property
    def head(self) -> RayPod | None:
        """The head's pod; None: it does not exist."""
        return next((pod for pod in self.pods if pod.node_type == HEAD), None)

    def workers(self, group: str) -> list[RayPod]:
        """List the pods of a worker group, by name."""
        result = (pod for pod in self.pods if pod.node_type == WORKER and pod.group == group)
        return sorted(result, key=lambda pod: pod.name)


@dataclass(frozen=True, slots=True)
class RecordClusterEvent:
    """Record an event on the RayCluster."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Create a pod or service, then record the event."""

    collection: str
    """`pods` or `services`."""
    body: Mapping[str, Any]
    then: RecordClusterEvent
    failure: str
    """Reason of the event for a refusal."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod of this uid, then record the event."""

    name: str
    uid: str
    then: RecordClusterEvent


Order = Create | DeletePod


@dataclass(frozen=True, slots=True)
class Plan:
    """Orders, and the status to write after they are carried out."""

    orders: tuple[Order, ...] = ()
    status: Mapping[str, Any] | None = None
    """The whole new status; None: it is up to date."""
