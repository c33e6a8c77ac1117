"""Who resets, reboots and replaces machines: one small interface, and what stands behind it.

A provider is asked for an order any number of times and carries it out once, also after a restart
of who asks: it knows orders again by their identity.  It alone says when a machine is gone.
"""

from __future__ import annotations

from .base import ORDER, Provider
from .cluster_api import ClusterApiProvider
from .command import CommandProvider, parse_command
from .karpenter import KarpenterProvider
from .machines import MachinesProvider
from .none import NoProvider

__all__ = [
    "ORDER",
    "ClusterApiProvider",
    "CommandProvider",
    "KarpenterProvider",
    "MachinesProvider",
    "NoProvider",
    "Provider",
    "parse_command",
]
