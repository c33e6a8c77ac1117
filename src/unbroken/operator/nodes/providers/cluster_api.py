"""Cluster API: a node is replaced by deletion of its Machine, rebooted by its remediation.

A MachineHealthCheck takes any Machine with the annotation `cluster.x-k8s.io/remediate-machine` for
unhealthy, whatever else it looks at. It then remediates the Machine as it is configured
(MachineHealthCheck of v1beta2, `spec.checks`): by a reboot if an external remediation does so (such
as Metal3's), else by replacement. Without a MachineHealthCheck that covers the Machine the
annotation has no effect, and the rung ends at its time limit. Only Machines in this very cluster
are found: the provider is for clusters that manage themselves.
"""

from __future__ import annotations

from unbroken.core.nodes.repair.events import RepairOrder
from unbroken.kube.client import Object
from unbroken.spec.nodes.values import Action

from .base import ObjectProvider

GROUP = "cluster.x-k8s.io"
REMEDIATE = f"{GROUP}/remediate-machine"


class ClusterApiProvider(ObjectProvider):
    """Deletes Machines, and asks for their remediation."""

    name = "cluster-api"
    supports = frozenset({Action.REBOOT, Action.REPLACE})
    what = f"Machine of {GROUP}"

    async def collection(self) -> str | None:
        """As `ObjectProvider.collection`; in the version that the cluster prefers."""
        group = await self._client.get_or_none(f"apis/{GROUP}", Object)
        if group is None:
            return None
        return f"apis/{group['preferredVersion']['groupVersion']}/machines"

    def is_of(self, found: Object, node: str) -> bool:
        """As `ObjectProvider.is_of`."""
        reference = (found.get("status") or {}).get("nodeRef") or {}
        return bool(reference.get("name") == node)

    def refusal(self, order: RepairOrder, found: Object) -> str:
        """As `ObjectProvider.refusal`: a Machine is only deleted where another follows it."""
        owners = found["metadata"].get("ownerReferences") or ()
        if order.action is not Action.REPLACE or any(owner.get("controller") for owner in owners):
            return ""
        name = found["metadata"]["name"]
        return (
            f"Machine {name} belongs to no MachineSet or control plane; none would take its place"
        )

    def request(self, order: RepairOrder) -> dict[str, str]:
        """As `ObjectProvider.request`."""
        return {REMEDIATE: ""} if order.action is Action.REBOOT else {}
