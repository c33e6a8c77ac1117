"""Division of old shards into new ones: torch.distributed.checkpoint plans the boxes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from unbroken.wire.compat import zip_equal
from unbroken.worker.typed_values import exchanged

from .state import Piece

Key = tuple[str, int]
"""A part, and the number of one of its tensors, in the order in which they are read."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole tensor, and lengths."""


@dataclass(frozen=True)
class Saved:
    """A tensor as the old ranks have saved it."""

    piece: Piece
    """The piece of one rank."""
    ranks: range
    """Ranks that have shards, or the rank that provides an unsharded tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""
        return self.piece.sharding[0] if self.piece.sharding else self.piece.shape

    def boxes(self) -> dict[Box, list[int]]:
        """Return all saved boxes and the ranks that have each; several if it was replicated."""
        if not self.piece.sharding:
            return {((0,) * len(self.shape), self.shape): [*self.ranks]}
        result: dict[Box, list[int]] = {}
        for rank in self.ranks:
            result.setdefault(box(self.piece.sharding, rank), []).append(rank)
        return {one: ranks for one, ranks in result.items() if math.prod(one[1])}


@exchanged
@dataclass(frozen=True)
class Want:
    """A box of an old rank's piece."""

    rank: int
    key: Key
    offsets: tuple[int, ...]
    """Offsets in that rank's piece."""
    lengths: tuple[int, ...]

    def of(self, tensor: Any) -> Any:
        """Return the box, without a copy."""
        for dim, (begin, length) in enumerate(zip_equal(self.offsets, self.lengths)):
            tensor = tensor.narrow(dim, begin, length)
        return tensor


@lru_cache(maxsize=65536)
def box(sharding: tuple[Any, ...], rank: int) -> Box:
    """Return the box of a rank in a DTensor, which is divided as torch.chunk divides.

    Raises ValueError if its mesh is not of that rank.
    """
    shape, _, (mesh, ranks, _), placements = sharding
    place, offsets, lengths = ranks.index(rank), [0] * len(shape), list(shape)
    strides = [math.prod(mesh[dim + 1 :]) for dim in range(len(mesh))]
    for count, stride, (kind, dim) in zip_equal(mesh, strides, placements):
        if kind == "Shard":
            full = -(-lengths[dim] // count)
            begin = min(full * (place // stride % count), lengths[dim])
            offsets[dim] += begin
            lengths[dim] = min(full, lengths[dim] - begin)
    return tuple(offsets), tuple(lengths)


def plan(
    tensors: Mapping[Key, Any], saved: Mapping[Key, Saved], rank: int, near: Collection[int]
) -> list[tuple[Want, Any]]:
    """Return the copies to make, with their targets; `near` are old ranks whose shares are at hand.

    Raises ValueError if they do not make up all of the tensors.
    """
    planners = import_module("torch.distributed.checkpoint.default_planner")

    names = {f"{part}.{number}": (part, number) for part, number in tensors}
    boxes = {name: saved[key].boxes() for name, key in names.items()}
    targets = {name: tensors[key] for name, key in names.items()}
    stored = {name: _stored(saved[key], boxes[name]) for name, key in names.items()}
    holders = {(name, at): ranks for name, own in boxes.items() for (at, _), ranks in own.items()}
    planner = planners.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, _metadata().Metadata(stored), False)
    left = {name: local(target).numel() for name, target in targets.items()}
    result = []
    for item in planner.create_local_plan().items:
        index, lengths = item.storage_index, tuple(item.lengths)
        having = holders[index.fqn, tuple(index.offset)]
        source = next((one for one in having if one in near), having[rank % len(having)])
        want = Want(source, names[index.fqn], tuple(item.storage_offsets), lengths)
        result.append((want, planner.resolve_tensor(item).detach()))
        left[index.fqn] -= math.prod(lengths)
    if any(left.values()):
        raise ValueError(f"{next(one for one in left if left[one])} is not there in full")
    return result


def _stored(saved: Saved, boxes: Mapping[Box, list[int]]) -> Any:
    torch, metadata = import_module("torch"), _metadata()

    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        for offsets, lengths in boxes
    ]
    properties = metadata.TensorProperties(dtype=getattr(torch, saved.piece.dtype))
    return metadata.TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)


def _metadata() -> Any:
    return import_module("torch.distributed.checkpoint.metadata")


def local(tensor: Any) -> Any:
    """Return this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
