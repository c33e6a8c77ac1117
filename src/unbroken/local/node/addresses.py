"""Addresses of nodes and pods in 127.0.0.0/8: a /16 for each cluster, a /24 for each of its nodes.

Linux answers on all of it without set-up.  A pod's address is written down in its directory, so it
stays with the pod over restarts of the runner; a freed one is used again last.
"""

from __future__ import annotations

from collections.abc import Iterable

from unbroken.errors import SpecError, WorldError

FIRST_NET = 64
"""Cluster 0 has 127.64.0.0/16; what lies below is left to the host's own uses."""
CLUSTERS_MAX = 255 - FIRST_NET
NODES_MAX = 256
"""Nodes of one cluster."""
FIRST_POD, LAST_POD = 2, 254


def node_address(index: int) -> str:
    """Address of a node; its server listens there.  `index`: cluster * NODES_MAX + node."""
    if not 0 <= index < CLUSTERS_MAX * NODES_MAX:
        raise SpecError(f"node index {index} is not between 0 and {CLUSTERS_MAX * NODES_MAX - 1}")
    return f"127.{FIRST_NET + index // NODES_MAX}.{index % NODES_MAX}.1"


class PodAddresses:
    """Hands out the addresses of one node's pods, each to one pod at a time."""

    def __init__(self, index: int) -> None:
        self._prefix = node_address(index).rpartition(".")[0]
        self._used: set[str] = set()
        self._next = FIRST_POD

    def keep(self, addresses: Iterable[str]) -> None:
        """These belong to pods of an earlier runner."""
        for address in addresses:
            self._used.add(address)
            self._next = max(self._next, int(address.rpartition(".")[2]) + 1)

    def take(self) -> str:
        """An address that no pod has; WorldError when all are taken."""
        for _ in range(LAST_POD):
            number = self._next if FIRST_POD <= self._next <= LAST_POD else FIRST_POD
            self._next = number + 1
            address = f"{self._prefix}.{number}"
            if address not in self._used:
                self._used.add(address)
                return address
        raise WorldError("all addresses of the node are taken")

    def free(self, address: str) -> None:
        """The pod is gone."""
        self._used.discard(address)
