"""Boxes of a tensor that each rank has, as torch gives them, and boxes in transit."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from tests.worker.forked import ranks
from unbroken.worker.checkpointing.peers import Peers
from unbroken.worker.snapshot import divided
from unbroken.worker.snapshot.divided import Saved, box, exchange, packed, unpacked
from unbroken.worker.snapshot.state import Piece


def drawn(seed: int) -> tuple[Any, ...]:
    """Return a tensor on a mesh of any shape and order of ranks."""
    chance = random.Random(seed)
    mesh = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
    ranks = chance.sample(range(math.prod(mesh)), math.prod(mesh))
    shape = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
    kinds = ["Shard", "Replicate"]
    placements = tuple((chance.choice(kinds), chance.randrange(len(shape))) for _ in mesh)
    return shape, (), (mesh, tuple(ranks), None), placements


def test_boxes_are_those_of_torch() -> None:
    for seed in range(200):
        shape, _, (mesh, ranks, _), placements = sharding = drawn(seed)
        placed = [Shard(dim) if kind == "Shard" else Replicate() for kind, dim in placements]
        places = itertools.product(*map(range, mesh))
        for rank, place in zip(ranks, places, strict=True):
            found = _compute_local_shape_and_global_offset(shape, mesh, list(place), placed)
            offsets, lengths = box(sharding, rank)
            assert lengths == tuple(found[0])
            assert 0 in lengths or offsets == tuple(found[1])


def test_boxes_make_up_the_whole_once() -> None:
    for seed in range(50):
        sharding = drawn(seed)
        world = math.prod(sharding[2][0])
        whole = torch.zeros(sharding[0], dtype=torch.int32)
        boxes = Saved(Piece(0, "float32", (), sharding=sharding), range(world)).boxes()
        for offsets, lengths in boxes:
            ends = zip(offsets, lengths, strict=True)
            whole[tuple(slice(begin, begin + length) for begin, length in ends)] += 1
        assert (whole == 1).all()
        assert all(one == sorted(one) for one in boxes.values())


def pieces(giver: int, taker: int, is_filled: bool) -> list[Any]:
    """Return what one rank gives another: tensors of any dtype and shape, none, or views."""
    chance = random.Random(10 * giver + taker)
    kinds = (torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int8)
    shapes = ((), (3,), (0, 2), (5, 7), (2, 1, 3))
    made = [
        torch.zeros(chance.choice(shapes), dtype=chance.choice(kinds))
        for _ in range(chance.randrange(6))
    ]
    if is_filled:
        for number, one in enumerate(made):
            one.fill_((giver + taker + number) % 3)
    return [one.t() if one.dim() == 2 else one for one in made]


def swap(rank: int) -> bool:
    """Exchange tensors; return whether all of them arrived."""
    world = Peers(rank, 3, (0, 1, 2))
    takes = [pieces(giver, rank, False) for giver in range(3)]
    exchange(world, [pieces(rank, taker, True) for taker in range(3)], takes)
    wanted = [pieces(giver, rank, True) for giver in range(3)]
    pairs = [zip(*both, strict=True) for both in zip(takes, wanted, strict=True)]
    return all(one.equal(other) for both in pairs for one, other in both)


@pytest.mark.slow
def test_pieces_of_tensors_go_from_all_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks(3, swap, tmp_path / "store") == [True] * 3
    monkeypatch.setattr(divided, "BATCH_BYTES", 30)
    assert ranks(3, swap, tmp_path / "store") == [True] * 3


def test_a_message_of_which_a_bit_is_flipped_fills_nothing() -> None:
    sent = [torch.ones(3), torch.ones(2, 2, dtype=torch.int8)]
    message = bytearray(packed(sent).tolist())
    for bit in range(8 * len(message)):
        bad = message.copy()
        bad[bit // 8] ^= 1 << bit % 8
        taken = [torch.zeros_like(one) for one in sent]
        assert not unpacked(bad, taken)
        assert not any(one.any() for one in taken)
    assert unpacked(message, taken)
    assert all(one.equal(other) for one, other in zip(taken, sent, strict=True))
