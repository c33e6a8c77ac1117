"""The pods that should exist, and the orders that bring this about.

A condemned pod is deleted, again and again until it is gone. If its node cannot be asked, the fence
is requested; once the fence is proven, the deletion is forced. The watch of nodes does not prove a
fence: it may be older than the pod, which was placed when the node was back. The node is read again
for each pod there.

A pod is created under its name when no other pod has the name.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice

from unbroken.spec.job.types import ReplicaSpec

from .deadlines import earliest
from .events import (
    CreatePod,
    DeletePod,
    FenceNode,
    JobEffect,
    NodeName,
    PodName,
    PodUid,
    ProveFence,
)
from .roster import Member, Roster

AVOID_SECONDS = 30.0
"""Seconds that a pod may look for a place away from the nodes that it is to avoid."""
ALIVE_SECONDS = 60.0
"""Seconds after which a node is known to live that was given up and has stayed ready: Kubernetes
says within 55 s that a node is silent (kube-controller-manager, --node-monitor-grace-period of 50
s, 40 s until v1.31, and --node-monitor-period of 5 s)."""
UNKNOWN_NODES = frozenset({NodeName("")})
RETRY_SECONDS = 5.0
"""Seconds after which an order to the API server without visible effect is repeated."""


@dataclass(slots=True)
class GivenUp:
    """A node whose workers have ended with their lease, or that other nodes did not reach."""

    until: float
    """Time until which it is avoided if it stays ready."""
    was_away: bool = False
    """True if it was not ready since."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A pod that should exist."""

    name: PodName
    replica_spec: str
    index: int


def slots(job: str, shape: Sequence[ReplicaSpec]) -> dict[PodName, Slot]:
    """Return every pod of the job by name: for each replica spec the training pods and the
    spares."""
    found = {}
    for spec in shape:
        for index in range(spec.replicas + spec.spares):
            name = PodName(f"{job}-{spec.name}-{index}")
            found[name] = Slot(name, spec.name, index)
    return found


class PodPlan:
    """Pods wanted and pods condemned."""

    def __init__(self, job: str, roster: Roster, orders: list[JobEffect]) -> None:
        """Append the orders of each step to `orders`."""
        self._job = job
        self._roster = roster
        self._orders = orders
        self.slots: dict[PodName, Slot] = {}
        self.condemned: dict[PodUid, Member] = {}
        self._empty: dict[PodName, float] = {}
        """Missing pods, with the time when each was last ordered; negative: not yet."""
        self._proofs: dict[PodUid, float] = {}
        """Pods on nodes that are reported as fenced, with the time when proof was last
        requested."""
        self._retry_at: float | None = None
        self._kept_off: dict[PodName, tuple[float, frozenset[NodeName]]] = {}
        """Pods not yet on a node: when they were made, and the nodes that they avoid."""
        self.avoid: frozenset[NodeName] = frozenset()
        """Nodes to be avoided in addition to those that are unusable now."""
        self.given_up: dict[NodeName, GivenUp] = {}
        """Nodes that are avoided, too, until they have been not ready and are ready again, or have
        stayed ready for long enough."""

    def deadline(self) -> float | None:
        """Return when pods are created again, or a node is no longer avoided."""
        first = next(iter(self._kept_off.values()), None)
        return earliest(self._retry_at, None if first is None else first[0] + AVOID_SECONDS)

    def reshape(self, shape: Sequence[ReplicaSpec]) -> None:
        """These pods are wanted from now on; none: an empty shape."""
        self.slots = slots(self._job, shape)
        self._empty = dict.fromkeys((n for n in self.slots if not self._roster.named(n)), -1.0)

    def adopt_extra(self, ranked: Iterable[Member]) -> None:
        """Adopt the pods that a planned move has added to the shape, each in place of another pod
        of its replica spec."""
        ranked = list(ranked)
        keep = {member.view.name for member in ranked}
        for view in (member.view for member in ranked if member.view.name not in self.slots):
            own = [slot for slot in self._of(view.replica_spec) if slot.name not in keep]
            if own:
                self._drop(min(own, key=lambda slot: self._use(self._roster.named(slot.name))))
                self.slots[view.name] = Slot(view.name, view.replica_spec, view.index)

    def resize(self, replica_spec: str, pods: int, ranked: Container[PodUid]) -> list[Member]:
        """Set the number of pods of a replica spec; `ranked` pods are kept first.

        Return the pods that are no longer wanted. The order is: pods on nodes with a notice, then
        pods without a node, then pods with the highest index.
        """
        own = self._of(replica_spec)
        numbers = (n for n in count() if self._is_free(self._name(replica_spec, n)))
        for index in islice(numbers, max(pods - len(own), 0)):
            name = self._name(replica_spec, index)
            self.slots[name], self._empty[name] = Slot(name, replica_spec, index), -1.0
        found = {slot.name: self._roster.named(slot.name) for slot in own}
        surplus = [s for s in own if (m := found[s.name]) is None or m.uid not in ranked]
        surplus.sort(key=lambda slot: (self._use(found[slot.name]), -slot.index))
        dropped = surplus[: max(len(own) - pods, 0)]
        for slot in dropped:
            self._drop(slot)
        return [member for slot in dropped if (member := found[slot.name]) is not None]

    def unwant(self, member: Member) -> None:
        """Do not recreate this pod's name."""
        slot = self.slots.get(member.view.name)
        if slot is not None:
            self._drop(slot)

    def _use(self, member: Member | None) -> int:
        if member is None or member.view.node is None:
            return 1
        return 0 if self._roster.notice_of(member) else 2

    def _of(self, replica_spec: str) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.replica_spec == replica_spec]

    def _name(self, replica_spec: str, index: int) -> PodName:
        return PodName(f"{self._job}-{replica_spec}-{index}")

    def _is_free(self, name: PodName) -> bool:
        return name not in self.slots and self._roster.named(name) is None

    def _drop(self, slot: Slot) -> None:
        del self.slots[slot.name]
        self._empty.pop(slot.name, None)
        self._kept_off.pop(slot.name, None)

    def occupied(self, member: Member) -> None:
        """Note that a pod has the name."""
        self._empty.pop(member.view.name, None)
        if member.view.node is not None:
            self._kept_off.pop(member.view.name, None)
        self._settle()

    def vacated(self, member: Member) -> None:
        """Note that the pod is gone."""
        self.condemned.pop(member.uid, None)
        self._proofs.pop(member.uid, None)
        name = member.view.name
        if name in self.slots and self._roster.named(name) is None:
            self._empty[name] = -1.0
        self._settle()

    def create(self, now: float, names: Iterable[PodName] | None = None) -> None:
        """Order the missing pods, or only those that are named."""
        chosen = [name for name in names or self._empty if self._is_missing(name, now)]
        if self._empty:
            self._retry_later(now)
        if not chosen:
            return
        self._take_back(now)
        avoid = self.avoid.union(self.given_up, self._roster.unusable_nodes())
        for name in chosen:
            self._empty[name] = now
            if avoid:
                self._kept_off.pop(name, None)
                self._kept_off[name] = (now, avoid)
        nodes = tuple(sorted(avoid))
        for slot in (self.slots[name] for name in chosen):
            self._orders.append(CreatePod(slot.name, slot.replica_spec, slot.index, nodes))

    def condemn(self, member: Member, reason: str, now: float) -> None:
        """Condemn the pod: it is deleted until it is gone."""
        if member.condemned:
            return
        member.condemned, member.condemned_at = reason, now
        self.condemned[member.uid] = member
        self._end(member, now)

    def pardon(self, uids: Container[PodUid]) -> None:
        """Keep those of these pods whose deletion was ordered in this step, and withdraw the
        order."""
        deletions = [order for order in self._orders if isinstance(order, DeletePod)]
        for order in (order for order in deletions if order.uid in uids):
            self._orders.remove(order)
            member = self.condemned.pop(order.uid, None)
            if member is not None:
                member.condemned = ""

    def prove(self, members: Iterable[Member], now: float) -> None:
        """Request the proof that nothing runs on nodes that are reported as fenced or removed."""
        for member in members:
            self._prove(member, now)

    def retry_deletions(self, members: Iterable[Member], now: float) -> None:
        """A node has changed: fence it or force what was waiting for the fence."""
        self._take_back(now)
        fenced = set[NodeName]()
        for member in members:
            if member.uid in self.condemned:
                self._end(member, now, fenced)

    def ended(self, member: Member) -> None:
        """Free the name of a pod whose containers have ended, if another pod is to have it.

        The kubelet frees it, too; that of Kubernetes 1.20 took up to 9 s more (`benchmarks/`).
        """
        if self._is_over(member):
            self._force(member, member.condemned or "its containers have ended")

    def give_up(self, node: NodeName, now: float, seconds: float = ALIVE_SECONDS) -> None:
        """Avoid a node for so long, unless it gets ready anew before."""
        self.given_up[node] = GivenUp(now + seconds)

    def _take_back(self, now: float) -> None:
        """Stop avoiding the given-up nodes that are ready again, or were ready all the time."""
        for name, known in list(self.given_up.items()):
            node = self._roster.nodes.get(name)
            is_away = node is None or not node.is_ready
            is_alive = known.was_away or now >= known.until
            if is_away:
                known.was_away = True
            elif is_alive:
                del self.given_up[name]

    def tick(self, now: float) -> None:
        """Repeat every order that has shown no effect."""
        if self._retry_at is None or now < self._retry_at:
            return
        self._retry_at = None
        self.prove([self._roster.members[uid] for uid in self._proofs], now)
        self.retry_deletions(list(self.condemned.values()), now)
        self.create(now)

    def adopt(self, now: float) -> None:
        """Treat pods without a node that an earlier operator made as suspect: the nodes they avoid
        are unknown."""
        for name in self.slots:
            member = self._roster.named(name)
            if member is not None and member.view.node is None:
                self._kept_off[name] = (now, UNKNOWN_NODES)

    def free(self, now: float) -> None:
        """Recreate the pods that found no place while they avoid usable nodes.

        Usable are nodes that have recovered, and repeat offenders, which are better than no node.
        """
        while self._kept_off:
            name, (since, avoided) = next(iter(self._kept_off.items()))
            if now < since + AVOID_SECONDS:
                break
            del self._kept_off[name]
            member = self._roster.named(name)
            if name not in self.slots or member is None or member.view.node is not None:
                continue
            if avoided <= frozenset(self._roster.unusable_nodes()):
                self._kept_off[name] = (now, avoided)
                continue
            self.avoid = frozenset()
            self.given_up.clear()
            self.condemn(member, "it found no place away from nodes to avoid", now)

    def _end(self, member: Member, now: float, fenced: set[NodeName] | None = None) -> None:
        self._retry_later(now)
        view, node = member.view, member.view.node
        if member.is_fenced or member.is_lease_over or self._is_over(member):
            self._force(member, member.condemned)
            return
        if not view.is_deleting:
            self._orders.append(DeletePod(view.name, view.uid, member.condemned))
        asked = fenced if fenced is not None else set[NodeName]()
        self._prove(member, now)
        if self._roster.is_on_fenced(member):
            return
        if member.has_ended or node is None or node in asked:
            return
        if self._roster.is_cut_off(member):
            asked.add(node)
            self._orders.append(FenceNode(node, view.uid, f"pod {view.name}: {member.condemned}"))

    def _is_over(self, member: Member) -> bool:
        return member.has_ended and member.view.name in self.slots

    def _force(self, member: Member, why: str) -> None:
        self._orders.append(DeletePod(member.view.name, member.uid, why, force=True))

    def _prove(self, member: Member, now: float) -> None:
        uid, node = member.uid, member.view.node
        if node is None or member.is_fenced or not self._roster.is_on_fenced(member):
            self._proofs.pop(uid, None)
            return
        self._retry_later(now)
        asked = self._proofs.get(uid)
        if asked is not None and now < asked + RETRY_SECONDS:
            return
        self._proofs[uid] = now
        self._orders.append(ProveFence(node, uid))

    def _is_missing(self, name: PodName, now: float) -> bool:
        asked = self._empty.get(name)
        return asked is not None and (asked < 0 or now >= asked + RETRY_SECONDS)

    def _settle(self) -> None:
        if not self._empty and not self.condemned and not self._proofs:
            self._retry_at = None

    def _retry_later(self, now: float) -> None:
        if self._retry_at is None:
            self._retry_at = now + RETRY_SECONDS
