"""Plan of an agent's memory for snapshots: slots of all its ranks first, then copies, or none.

Either has room for all ranks or is left out: state in shards of which one rank has no snapshot
cannot be restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Key = tuple[str, int]
"""Name of the snapshot, and rank."""
SLOT_STATES = 3
"""States of a rank in slots: two and, after a restart, the one that was restored."""
COPY_STATES = 4
"""States of a rank in copies: two that are held for the buddy, and two of another node's rank."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that snapshots of all ranks of an agent take."""

    slots: int
    copies: int
    """0: there is no buddy."""

    def slots_missing(self, available: int) -> int:
        """Return the bytes that are missing for slots; 0: there is room."""
        return max(0, self.slots - available)

    def copies_missing(self, available: int) -> int:
        """Return the bytes that are missing for copies beside slots; 0: there is room."""
        return max(0, self.slots + self.copies - available) if self.copies else 0


def memory_plan(sizes: Mapping[Key, int], nproc: int, *, has_buddy: bool) -> MemoryPlan:
    """Plan by the sizes of one slot of each rank, in bytes.

    Of `nproc` ranks of a name, those that have not saved yet count as the largest that has.
    """
    by_name: dict[str, list[int]] = {}
    for (name, _), size in sizes.items():
        by_name.setdefault(name, []).append(size)
    states = sum(sum(known) + max(known) * max(0, nproc - len(known)) for known in by_name.values())
    return MemoryPlan(SLOT_STATES * states, COPY_STATES * states if has_buddy else 0)
