"""Our own Machines: the local cluster's, and those of other controllers of `Machine.unbroken.dev`.

Reboots and resets are counts in the spec: an order raises one, once, and is done when the status
has come up to it. A replacement is made first, under a name that follows from the order, so that it
is the same if it is made again. The old Machine's finalizer is removed when nothing of the machine
runs.
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from unbroken.core.nodes.repair.events import ALL_ACTIONS, Answer, OrderStatus, RepairOrder
from unbroken.foreign_numbers import whole_number
from unbroken.kube.client import KubeClient, Object
from unbroken.spec.keys import HEALTH, MACHINE_FINALIZER, REPAIR_ORDER
from unbroken.spec.nodes.kinds import MACHINE, MachinePhase
from unbroken.spec.nodes.values import TAINT_EFFECT, TAINT_VALUE, Action, Health

from .base import annotate

COUNTS = {Action.REBOOT: "boots", Action.RESET_GPU: "resets"}
CLUSTER_DIGITS, NODE_DIGITS = 17, 5
"""Digits in a name: `hyperpod-i-<17 hex>`, `node-1-<5 hex>` (docs/design/nodes.md)."""


class MachinesProvider:
    """Orders of Machines."""

    name = "machines"
    supports = ALL_ACTIONS

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def status(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.status`."""
        return await self.order(order)

    async def order(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.order`."""
        result = await self._client.get_or_none(_path(order.node), Object)
        if order.action is Action.REPLACE:
            return await self._replace(order, result)
        if result is None:
            return OrderStatus(Answer.UNSUPPORTED, f"no Machine is behind {order.node}")
        return await self._count(order, result)

    async def _count(self, order: RepairOrder, found: Object) -> OrderStatus:
        key = COUNTS[order.action]
        metadata = found["metadata"]
        identity, _, text = (metadata.get("annotations") or {}).get(REPAIR_ORDER, "").partition(" ")
        wanted = whole_number(text)
        status = found.get("status") or {}
        done = int(status.get(key) or 0)
        if metadata.get("deletionTimestamp"):
            return OrderStatus(Answer.FAILED, f"Machine {order.node} is being deleted")
        if identity != order.id or wanted is None:
            # One that somebody else has ordered, and that is not yet done, will do.
            count = max(int((found.get("spec") or {}).get(key) or 0), done + 1)
            await self._raise(order, found, key, count)
            return OrderStatus(Answer.WORKING, "ordered")
        if done >= wanted:
            return OrderStatus(Answer.DONE)
        phase, message = status.get("phase") or "", status.get("message") or ""
        if phase == MachinePhase.FAILED.value:
            return OrderStatus(Answer.FAILED, message or "the Machine has failed")
        return OrderStatus(Answer.WORKING, message)

    async def _raise(self, order: RepairOrder, found: Object, key: str, count: int) -> None:
        notes = {REPAIR_ORDER: f"{order.id} {count}"}
        body = {"metadata": {"annotations": notes}, "spec": {key: count}}
        version = found["metadata"]["resourceVersion"]
        await self._client.merge(_path(order.node), body, version=version)

    async def _replace(self, order: RepairOrder, found: Object | None) -> OrderStatus:
        if found is None:
            return await self._replaced(order)
        metadata = found["metadata"]
        name = replacement_name(found, order.id)
        is_ours = (metadata.get("annotations") or {}).get(REPAIR_ORDER) == order.id
        if not metadata.get("deletionTimestamp") or not is_ours:
            if not is_ours:
                await annotate(self._client, _path(order.node), found, {REPAIR_ORDER: order.id})
            await self._create(name, found, order)
            await self._client.delete_if_present(_path(order.node), metadata["uid"])
        text = f"{name} takes the place; {(found.get('status') or {}).get('message') or ''}"
        return OrderStatus(Answer.WORKING, text.removesuffix("; "), name)

    async def _create(self, name: str, old: Object, order: RepairOrder) -> None:
        """Another machine for the same place; it has booted and been reset never."""
        metadata = old["metadata"]
        spec = {key: value for key, value in old["spec"].items() if key not in COUNTS.values()}
        if not spec.get("cluster") and not spec.get("logicalId"):
            spec["logicalId"] = order.node
        if order.is_tested:
            spec = held_back(spec)
        body: Object = {
            **{key: old[key] for key in ("apiVersion", "kind")},
            "metadata": {
                "name": name,
                "labels": metadata.get("labels") or {},
                "ownerReferences": metadata.get("ownerReferences") or [],
                "finalizers": [MACHINE_FINALIZER],
                "annotations": {REPAIR_ORDER: f"for {order.id}"},
            },
            "spec": spec,
        }
        await self._client.create_if_absent(MACHINE.path, body)

    async def _replaced(self, order: RepairOrder) -> OrderStatus:
        """The old Machine is gone: by this order, if there is one that was made for it."""
        listed = await self._client.get_or_none(MACHINE.path, Object) or {}
        for item in listed.get("items") or ():
            if (item["metadata"].get("annotations") or {}).get(REPAIR_ORDER) == f"for {order.id}":
                return OrderStatus(Answer.DONE, replacement=item["metadata"]["name"])
        node = await self._client.get_or_none(f"api/v1/nodes/{quote(order.node)}", Object)
        if node is None:
            return OrderStatus(Answer.GONE, f"Machine and node {order.node} are gone")
        return OrderStatus(Answer.UNSUPPORTED, f"no Machine is behind {order.node}")


def held_back(spec: Object) -> Object:
    """The spec of a Machine whose node takes no pods from its first moment on."""
    others = [item for item in spec.get("taints") or () if item.get("key") != HEALTH]
    taint = {"key": HEALTH, "value": TAINT_VALUE, "effect": TAINT_EFFECT}
    labels = {**(spec.get("labels") or {}), HEALTH: Health.UNSCHEDULABLE.value}
    return {**spec, "labels": labels, "taints": [*others, taint]}


def replacement_name(old: Object, order_id: str) -> str:
    """Name of the Machine that takes the place; the same for the same order."""
    digest = hashlib.sha256(order_id.encode()).hexdigest()
    spec = old["spec"]
    if spec.get("cluster"):
        return f"hyperpod-i-{digest[:CLUSTER_DIGITS]}"
    place = spec.get("logicalId") or old["metadata"]["name"]
    return f"{place}-{digest[:NODE_DIGITS]}"


def _path(name: str) -> str:
    return f"{MACHINE.path}/{quote(name)}"
