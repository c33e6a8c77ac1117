"""The interface of providers, and those that delete or mark an object of the API, or do nothing.

Cluster API: a node is replaced by deletion of its Machine, rebooted by its remediation. A
MachineHealthCheck takes any Machine with the annotation `cluster.x-k8s.io/remediate-machine` for
unhealthy, whatever else it looks at. It then remediates the Machine as it is configured
(MachineHealthCheck of v1beta2, `spec.checks`): by a reboot if an external remediation does so (such
as Metal3's), else by replacement. Without a MachineHealthCheck that covers the Machine the
annotation has no effect, and the rung ends at its time limit. Only Machines in this very cluster
are found: the provider is for clusters that manage themselves.

Karpenter: a node is replaced by deletion of its NodeClaim. Karpenter's finalizer is on the
NodeClaim until the instance is terminated, so its absence is the proof (karpenter.sh, concepts:
NodeClaims, Disruption).  What takes the place is Karpenter's choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from unbroken.core.nodes.repair.events import Answer, OrderStatus, RepairOrder
from unbroken.core.nodes.repair.records import other_machine
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, Object
from unbroken.spec.keys import REPAIR_ORDER
from unbroken.spec.nodes.kinds import NODE_RECORD
from unbroken.spec.nodes.values import Action

NOTED_SECONDS = 5.0
"""Seconds until the repairer is likely to have written a NodeRecord."""
Named = Callable[[Object], str | None]
"""Returns the machine that a Node says it is; None: it names none."""


class Provider(Protocol):
    """Resets, reboots and replaces machines."""

    @property
    def name(self) -> str:
        """As `--node-provider` has it."""

    @property
    def supports(self) -> frozenset[Action]:
        """Actions that the provider can carry out."""

    async def order(self, order: RepairOrder) -> OrderStatus:
        """See to the order; doing it once is enough, however often it is asked.

        Raises WorldError and PeerError as `unbroken.kube.client.api_errors`, of them Conflict where
        an object has just changed; the order is asked for again then.
        """

    async def status(self, order: RepairOrder) -> OrderStatus:
        """Return the status of an order, which an earlier process may have given."""


async def node_boot(client: KubeClient, name: str) -> str | None:
    """The boot ID that a node shows; empty: it shows none; None: there is no such node."""
    node = await client.get_or_none(f"api/v1/nodes/{quote(name)}", Object)
    if node is None:
        return None
    info = (node.get("status") or {}).get("nodeInfo") or {}
    return str(info.get("bootID") or "")


async def annotate(client: KubeClient, path: str, found: Object, notes: dict[str, str]) -> None:
    """Annotate this very object. Raises Conflict if another has its name now."""
    await client.merge(path, {"metadata": {"annotations": notes}}, uid=found["metadata"]["uid"])


def stale(order: RepairOrder, boot_id: str | None) -> OrderStatus | None:
    """The answer to an order about a boot that is over; None: it is about this one."""
    if boot_id is None or not order.boot_id or not boot_id or boot_id == order.boot_id:
        return None
    if order.action is Action.REBOOT:
        return OrderStatus(Answer.DONE, "the node has booted since")
    return OrderStatus(Answer.FAILED, "the node has booted since it was ordered")


async def machine_of(client: KubeClient, name: str, node: Object | None) -> str | OrderStatus:
    """Return the provider ID of a node's machine, as the node had it when it joined; empty: none.

    An OrderStatus refuses a node that names another machine now, or one that another node names,
    too: one of them lies.  Raises WorldError while the repairer has not noted the machine.
    """
    found = await client.get_or_none(f"{NODE_RECORD.path}/{quote(name)}", Object)
    record, _ = NODE_RECORD.spec_of(found or {})
    if node is None:
        return record.machine
    shown = str((node.get("spec") or {}).get("providerID") or "")
    if node["metadata"]["uid"] != record.node_uid:
        if not shown:
            return ""
        raise WorldError(f"the machine of node {name} is not noted yet", NOTED_SECONDS)
    if shown != record.machine:
        return OrderStatus(Answer.UNSUPPORTED, other_machine(record, shown))
    return record.machine


async def namesake(client: KubeClient, node: str, machine: str, name_of: Named) -> str:
    """Return another node that names the same machine, by `name_of`; empty: there is none."""
    listed = await client.get_or_none("api/v1/nodes", Object) or {}
    found = [one for one in listed.get("items") or () if name_of(one) == machine]
    names = (str(one["metadata"]["name"]) for one in found)
    return next((name for name in names if name != node), "")


class ObjectProvider(ABC):
    """Provider whose API has an object behind each node; deleting the object replaces the node."""

    what = "object"
    """Kind of the object, in words for people."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    @abstractmethod
    async def collection(self) -> str | None:
        """Path of the objects; None: the cluster serves none."""

    @abstractmethod
    def is_of(self, found: Object, node: str) -> bool:
        """True if an object stands behind a node."""

    async def status(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.status`."""
        return await self.order(order)

    async def order(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.order`."""
        path = await self.collection()
        listed = None if path is None else await self._client.get_or_none(path, Object)
        if listed is None or path is None:
            return OrderStatus(Answer.UNSUPPORTED, f"the cluster serves no {self.what}")
        boot_id = await node_boot(self._client, order.node)
        for result in listed.get("items") or ():
            notes = result["metadata"].get("annotations") or {}
            if notes.get(REPAIR_ORDER) == order.id or self.is_of(result, order.node):
                return await self._order_of(order, path, result, boot_id)
        if boot_id is None:
            return OrderStatus(Answer.GONE, f"node and {self.what} are gone")
        return OrderStatus(Answer.UNSUPPORTED, f"no {self.what} is behind {order.node}")

    async def _order_of(
        self, order: RepairOrder, path: str, found: Object, boot_id: str | None
    ) -> OrderStatus:
        metadata = found["metadata"]
        name = quote(metadata["name"])
        if namespace := metadata.get("namespace"):
            root, _, plural = path.rpartition("/")
            path = f"{root}/namespaces/{quote(namespace)}/{plural}"
        path = f"{path}/{name}"
        is_ours = (metadata.get("annotations") or {}).get(REPAIR_ORDER) == order.id
        over = stale(order, boot_id)
        if over is not None and not (is_ours and order.action is Action.REPLACE):
            return over
        if not is_ours and (text := self.refusal(order, found)):
            return OrderStatus(Answer.UNSUPPORTED, text)
        if not is_ours:
            await annotate(
                self._client, path, found, {REPAIR_ORDER: order.id, **self.request(order)}
            )
        if order.action is Action.REPLACE and not metadata.get("deletionTimestamp"):
            await self._client.delete_if_present(path, metadata["uid"])
        return OrderStatus(Answer.WORKING, f"{self.what} {metadata['name']} is asked for it")

    def refusal(self, order: RepairOrder, found: Object) -> str:
        """Why the object cannot be used for the order; empty: it can."""
        return ""

    def request(self, order: RepairOrder) -> dict[str, str]:
        """Further annotations that ask for what is ordered."""
        return {}


class NoProvider:
    """Can do nothing."""

    name = "none"
    supports: frozenset[Action] = frozenset()

    async def order(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.order`."""
        return OrderStatus(
            Answer.UNSUPPORTED, f"there is no provider to {order.action.value} a node"
        )

    async def status(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.status`."""
        return await self.order(order)


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


PATH = "apis/karpenter.sh/v1/nodeclaims"


class KarpenterProvider(ObjectProvider):
    """Deletes NodeClaims."""

    name = "karpenter"
    supports = frozenset({Action.REPLACE})
    what = "NodeClaim"

    async def collection(self) -> str | None:
        """As `ObjectProvider.collection`."""
        return PATH

    def is_of(self, found: Object, node: str) -> bool:
        """As `ObjectProvider.is_of`."""
        return bool((found.get("status") or {}).get("nodeName") == node)
