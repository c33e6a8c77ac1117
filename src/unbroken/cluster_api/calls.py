"""Arguments of the operations: the request, the store, the time, and ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import limit_exceeded
from .store import Store

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Values that are the same for every call."""

    store: Store
    now: Callable[[], float]
    """Seconds since the epoch."""
    new_hex: Callable[[int], str]
    """Make this number of random hexadecimal digits."""
    region: str
    account: str
    """Account in the ARNs of clusters whose creation was not signed."""
    makes_machines: bool
    """As in `ClusterApiOptions`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, of the right shape."""

    context: CallContext
    body: Mapping[str, Any]
    region: str

    @property
    def store(self) -> Store:
        """The store of clusters."""
        return self.context.store

    def require_machines(self, count: int) -> None:
        """ResourceLimitExceeded if `count` new machines are needed and nothing makes machines."""
        if count and not self.context.makes_machines:
            raise limit_exceeded(
                f"New instances needed: {count}, but nothing in this Kubernetes cluster "
                "makes machines. Add nodes with the tools of your cloud: jobs on them need no "
                "CreateCluster. If a controller of yours makes Machine objects, install "
                "unbroken with nodes.provider=machines (--node-provider machines)."
            )

    def text(self, name: str) -> str:
        """A member; empty where it was not given."""
        return str(self.body.get(name) or "")


Handler = Callable[[Call], Awaitable[Object]]
