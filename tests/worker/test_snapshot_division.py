"""Which box of a tensor a rank has, as torch says it of its own."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from unbroken.worker.snapshot_division import Saved, box
from unbroken.worker.snapshot_state import Piece


def drawn(seed: int) -> tuple[Any, ...]:
    """A tensor, on a mesh of any shape and order of ranks."""
    chance = random.Random(seed)
    mesh = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
    ranks = chance.sample(range(math.prod(mesh)), math.prod(mesh))
    shape = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
    kinds = ["Shard", "Replicate"]
    placements = tuple((chance.choice(kinds), chance.randrange(len(shape))) for _ in mesh)
    return shape, (), (mesh, tuple(ranks), None), placements


@pytest.mark.parametrize("seed", range(200))
def test_boxes_are_those_of_torch(seed: int) -> None:
    shape, _, (mesh, ranks, _), placements = sharding = drawn(seed)
    placed = [Shard(dim) if kind == "Shard" else Replicate() for kind, dim in placements]
    places = itertools.product(*map(range, mesh))
    for rank, place in zip(ranks, places, strict=True):
        found = _compute_local_shape_and_global_offset(shape, mesh, list(place), placed)
        offsets, lengths = box(sharding, rank)
        assert lengths == tuple(found[0])
        assert 0 in lengths or offsets == tuple(found[1])


@pytest.mark.parametrize("seed", range(50))
def test_boxes_make_up_the_whole_once(seed: int) -> None:
    sharding = drawn(seed)
    world = math.prod(sharding[2][0])
    whole = torch.zeros(sharding[0], dtype=torch.int32)
    boxes = Saved(Piece(0, "float32", (), sharding=sharding), range(world)).boxes()
    for offsets, lengths in boxes:
        ends = zip(offsets, lengths, strict=True)
        whole[tuple(slice(begin, begin + length) for begin, length in ends)] += 1
    assert (whole == 1).all()
    assert all(one == sorted(one) for one in boxes.values())
