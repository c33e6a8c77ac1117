"""Assignment of node ranks to pods.

At first assignment, pods are ordered by topology labels, then replica spec, then index. A pod keeps
its rank as long as it trains. A free rank goes to a pod of the same replica spec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from unbroken.spec.job.types import ReplicaSpec

from .events import PodUid
from .roster import Member, Roster


class Ranks:
    """Ranks 0..nnodes-1 of one job."""

    def __init__(self) -> None:
        self.pod_of: dict[int, PodUid] = {}
        self.rank_of: dict[PodUid, int] = {}
        self._spec_of: dict[int, str] = {}
        self._given: Counter[str] = Counter()
        self._specs: dict[str, ReplicaSpec] = {}
        self._order: dict[str, int] = {}
        self.nnodes = 0

    @property
    def is_full(self) -> bool:
        return len(self.pod_of) == self.nnodes

    @property
    def is_unassigned(self) -> bool:
        """True if no rank has ever been given."""
        return not self._spec_of

    def reset(self, shape: Sequence[ReplicaSpec]) -> None:
        """Forget every rank; the job now has this shape."""
        self.pod_of.clear()
        self.rank_of.clear()
        self._spec_of.clear()
        self._given.clear()
        self._specs = {spec.name: spec for spec in shape}
        self._order = {spec.name: i for i, spec in enumerate(shape)}
        self.nnodes = sum(spec.replicas for spec in shape)

    def restore(self, member: Member, rank: int) -> bool:
        """Give the pod the rank that it reports; return False if it cannot have it."""
        spec = member.view.replica_spec
        is_taken = rank in self.pod_of or member.uid in self.rank_of
        if is_taken or not 0 <= rank < self.nnodes or self._room(spec) <= 0:
            return False
        self._give(rank, member)
        return True

    def release(self, uid: PodUid) -> int | None:
        """Free the pod's rank for another one."""
        rank = self.rank_of.pop(uid, None)
        if rank is not None:
            del self.pod_of[rank]
        return rank

    def fill(self, candidates: Iterable[Member], roster: Roster) -> None:
        """Give free ranks to pods that have none."""
        free: dict[str, list[int]] = {name: [] for name in self._specs}
        for rank in sorted(set(range(self.nnodes)) - self.pod_of.keys(), reverse=True):
            free.setdefault(self._spec_of.get(rank, ""), []).append(rank)
        unclaimed = free.get("", [])
        room = {name: self._room(name) for name in self._specs}
        unranked = [member for member in candidates if member.uid not in self.rank_of]
        for member in sorted(unranked, key=lambda member: self._place(member, roster)):
            name = member.view.replica_spec
            if free.get(name):
                self._give(free[name].pop(), member)
            elif unclaimed and room.get(name, 0) > 0:
                room[name] -= 1
                self._give(unclaimed.pop(), member)

    def _give(self, rank: int, member: Member) -> None:
        self.pod_of[rank] = member.uid
        self.rank_of[member.uid] = rank
        if rank not in self._spec_of:
            self._spec_of[rank] = member.view.replica_spec
            self._given[member.view.replica_spec] += 1

    def _room(self, name: str) -> int:
        """Return the number of ranks of the replica spec that no pod has had yet."""
        spec = self._specs.get(name)
        return 0 if spec is None else spec.replicas - self._given[name]

    def _place(self, member: Member, roster: Roster) -> tuple[tuple[str, ...], int, int]:
        node = roster.nodes.get(member.view.node) if member.view.node is not None else None
        order = self._order.get(member.view.replica_spec, len(self._order))
        return (node.topology if node else (), order, member.view.index)
