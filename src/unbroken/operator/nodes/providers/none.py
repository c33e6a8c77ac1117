"""No provider: nodes are labelled and drained, a person does the rest."""

from __future__ import annotations

from unbroken.core.nodes.repair.events import Answer, OrderStatus, RepairOrder
from unbroken.spec.nodes.values import Action


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
