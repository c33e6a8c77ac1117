"""Cost of a loss that would happen now: the steps to make again, and the source of the state.

It follows the order of `Snapshot.restore`: the memory of the ranks that live, then replicas, then
copies at buddies, then checkpoints. If several pods or nodes can be lost, the dearest one counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from unbroken.foreign_numbers import whole_number
from unbroken.wire.agent import SnapshotState


class LossKind(Enum):
    """The part of the job that is lost."""

    WORKER = "worker"
    RANK_0 = "rank 0"
    NODE = "node"
    NODE_AND_BUDDY = "node and its buddy"


class Source(Enum):
    """Source of the state of the lost ranks."""

    MEMORY = "memory"
    REPLICA = "replica"
    BUDDY = "buddy"
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"
    """No checkpoint is reported: training begins anew, unless the script has one of its own."""


@dataclass(frozen=True, slots=True)
class PodSnapshots:
    """Snapshots of the ranks of one pod, under one name."""

    node: str
    """Name of the pod's node."""
    buddy: int | None
    """Index of the pod that gets copies; None: none does, or it is not known."""
    ranks: tuple[SnapshotState, ...]


@dataclass(frozen=True, slots=True)
class LossCost:
    """Cost of one kind of loss."""

    loss: LossKind
    source: Source
    step: int | None
    """Step after which training would continue; None: from its beginning."""
    steps: int
    """Steps to make again."""


def loss_costs(
    pods: Sequence[PodSnapshots], newest: int, checkpoint: int | None
) -> tuple[LossCost, ...]:
    """Return the cost of each kind of loss; empty if no rank has saved.

    `newest`: newest step of training; `checkpoint`: step of the newest checkpoint that is reported,
    None: there is none.
    """
    ranks = [rank for pod in pods for rank in pod.ranks]
    if not ranks:
        return ()
    places = _Places(pods, newest, checkpoint)
    in_memory = places.cost(LossKind.WORKER, Source.MEMORY, min(rank.step for rank in ranks))
    found = [in_memory]
    if any(rank.rank == 0 for rank in ranks):
        found.append(LossCost(LossKind.RANK_0, Source.MEMORY, in_memory.step, in_memory.steps))
    nodes = {node: set(held) for node, held in places.on_node.items()}
    found.append(_dearest(places.after(LossKind.NODE, lost) for lost in nodes.values()))
    with_buddies = [(lost, places.with_buddies(lost)) for lost in nodes.values()]
    pairs = [both for lost, both in with_buddies if both != lost]
    if pairs:
        found.append(_dearest(places.after(LossKind.NODE_AND_BUDDY, both) for both in pairs))
    return tuple(found)


class _Places:
    """Pods with their ranks, nodes, buddies and replicas."""

    def __init__(self, pods: Sequence[PodSnapshots], newest: int, checkpoint: int | None) -> None:
        self._pods, self._newest, self._checkpoint = pods, newest, checkpoint
        self.on_node: dict[str, list[int]] = {}
        """Pods on each node."""
        for index, pod in enumerate(pods):
            self.on_node.setdefault(pod.node, []).append(index)
        pod_of = {rank.rank: index for index, pod in enumerate(pods) for rank in pod.ranks}
        self._replica_pods = cache(lambda text: frozenset(_pods_in(text, pod_of)))
        self._in_memory = min(rank.step for pod in pods for rank in pod.ranks)

    def with_buddies(self, lost: Collection[int]) -> set[int]:
        """Return these pods, and all pods on the nodes of their buddies."""
        buddies = {self._pods[index].buddy for index in lost} - {None}
        nodes = {self._pods[index].node for index in buddies if index is not None}
        return {*lost, *(index for node in nodes for index in self.on_node[node])}

    def after(self, loss: LossKind, lost: Collection[int]) -> LossCost:
        """Return the cost of the loss of these pods."""
        step, source = self._in_memory, Source.REPLICA
        for index in lost:
            pod = self._pods[index]
            has_buddy = pod.buddy is not None and pod.buddy not in lost
            for rank in pod.ranks:
                if any(one not in lost for one in self._replica_pods(rank.replicas)):
                    continue
                held = _held_by_buddy(rank, self._in_memory) if has_buddy else None
                if held is None:
                    return self._from_checkpoint(loss)
                step, source = min(step, held), Source.BUDDY
        return self.cost(loss, source, step)

    def _from_checkpoint(self, loss: LossKind) -> LossCost:
        if self._checkpoint is None:
            return LossCost(loss, Source.NOTHING, None, self._newest + 1)
        return self.cost(loss, Source.CHECKPOINT, self._checkpoint)

    def cost(self, loss: LossKind, source: Source, step: int) -> LossCost:
        """Return the cost of going back to a step."""
        return LossCost(loss, source, step, max(0, self._newest - step))


def _held_by_buddy(rank: SnapshotState, in_memory: int) -> int | None:
    """Return the step to which all ranks can go back with the buddy's copies; None: none.

    `in_memory`: newest step in the memory of all ranks.
    """
    return in_memory if rank.buddy_step == in_memory else rank.common_step


def _dearest(costs: Iterable[LossCost]) -> LossCost:
    return max(costs, key=lambda one: one.steps)


def _pods_in(text: str, pod_of: Mapping[int, int]) -> Iterator[int]:
    """Yield the pods of the ranks in ranges such as `0-2,5`; other texts name no rank."""
    known = sorted(pod_of)
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = whole_number(first), whole_number(last or first)
        if begin is not None and end is not None:
            for rank in known[bisect_left(known, begin) : bisect_right(known, end)]:
                yield pod_of[rank]
