"""Karpenter: a node is replaced by deletion of its NodeClaim.

Karpenter's finalizer is on the NodeClaim until the instance is terminated, so its absence is the
proof (karpenter.sh, concepts: NodeClaims, Disruption).  What takes the place is Karpenter's choice.
"""

from __future__ import annotations

from unbroken.kube.client import Object
from unbroken.spec.nodes.values import Action

from .base import ObjectProvider

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
