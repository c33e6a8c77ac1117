"""Tensors divided in any layout, kept rank by rank, and put together on any other layout.

One process is each rank in turn, with torch's group that sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from unbroken.errors import SpecError
from unbroken.wire.snapshot import BODY_AT
from unbroken.worker.snapshot.divided import Saved, box, plan
from unbroken.worker.snapshot.state import Kept, collected, mesh_name, parse, sharded, view

RANKS_MAX = 12
KEY = ("model", 0)
Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, int], ...]]
"""Shape of the mesh, its ranks in order, and a placement for each of its dimensions."""
FOUR_ROWS: Layout = ((4,), (0, 1, 2, 3), (("Shard", 0),))
HYBRID: Layout = ((2, 2), (0, 1, 2, 3), (("Replicate", 0), ("Shard", 0)))


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> Layout:
    """Draw a layout of a tensor of `dims` dimensions: any mesh, order of ranks and placements."""
    mesh: tuple[int, ...] = ()
    for _ in range(draw(st.integers(1, 3))):
        mesh += (draw(st.integers(1, RANKS_MAX // math.prod(mesh))),)
    ranks = tuple(draw(st.permutations(range(math.prod(mesh)))))
    kinds = [st.just(("Replicate", 0))]
    kinds += [st.integers(0, dims - 1).map(lambda dim: ("Shard", dim))] if dims else []
    return mesh, ranks, tuple(draw(st.one_of(kinds)) for _ in mesh)


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    """Draw the shape of a tensor, and the layouts before and after."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def sharding(shape: Sequence[int], layout: Layout) -> tuple[Any, ...]:
    """Return the sharding of a tensor as a snapshot has it."""
    mesh, ranks, placements = layout
    strides = tuple(torch.empty(tuple(shape), device="meta").stride())
    return tuple(shape), strides, (mesh, ranks, None), placements


@contextmanager
def being(rank: int, world: int) -> Iterator[None]:
    """Be a rank of a group that sends nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def part(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return a copy of a rank's part."""
    boxed = zip(*box(sharding(whole.shape, layout), rank), strict=True)
    for dim, (begin, length) in enumerate(boxed):
        whole = whole.narrow(dim, begin, length)
    return whole.contiguous().clone()


def divided(local: torch.Tensor, shape: Sequence[int], layout: Layout) -> DTensor:
    """Return a rank's part as torch has it."""
    mesh = DeviceMesh("cpu", torch.tensor(layout[1]).view(layout[0]))
    found: DTensor = sharded(local, sharding(shape, layout), mesh)
    return found


def kept(tensor: DTensor) -> Kept:
    """Keep a tensor in memory as a snapshot does, and read it."""
    state = collected({"model": {"weight": tensor}})
    memory = bytearray(BODY_AT + state.payload_bytes + 64)
    for piece, local in zip(state.pieces, state.tensors, strict=True):
        if local.numel():
            view(memory, piece).copy_(local)
    live = SimpleNamespace(parameters=lambda: [tensor])
    return parse(state.structure, memory, {"model": live})


@given(moves())
@example(((7, 3), FOUR_ROWS, ((3,), (0, 1, 2), (("Shard", 1),))))
@example(((5, 1), HYBRID, ((1,), (0,), (("Shard", 0),))))
@example(((2,), FOUR_ROWS, HYBRID))
@settings(max_examples=50, deadline=None)
def test_what_is_kept_in_one_layout_is_put_together_in_any_other(
    move: tuple[tuple[int, ...], Layout, Layout],
) -> None:
    shape, before, after = move
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1
    shares, pieces = {}, {}
    for rank in sorted(before[1]):
        with being(rank, len(before[1])):
            read = kept(divided(part(whole, before, rank), shape, before))
            again = read.state("model", copies=True)["weight"]
            assert again.to_local().equal(part(whole, before, rank))
            assert mesh_name(again.device_mesh) == (before[0], before[1], None)
            shares[rank], pieces[rank] = again.to_local(), read.pieces[0]
    saved = {KEY: Saved(pieces[0], range(len(before[1])))}
    for rank in sorted(after[1]):
        with being(rank, len(after[1])):
            made = divided(torch.zeros_like(part(whole, after, rank)), shape, after)
            for want, target in plan({KEY: made}, saved, rank, near=()):
                target.copy_(want.of(shares[want.rank]))
            assert made.to_local().equal(part(whole, after, rank))


@pytest.mark.parametrize("placements", [(Partial(),), (Replicate(), Partial("avg"))])
def test_a_sum_that_is_not_made_yet_is_refused_by_its_place(placements: tuple[Any, ...]) -> None:
    with being(0, 1):
        mesh = DeviceMesh("cpu", torch.zeros((1,) * len(placements), dtype=torch.int))
        tensor = DTensor.from_local(torch.ones(3), mesh, placements, run_check=False)
        with pytest.raises(SpecError) as refusal:
            collected({"model": {"weight": tensor}})
    told = (
        "model['weight'] holds a DTensor placed as Partial (only Shard and Replicate can be kept)"
    )
    assert str(refusal.value).startswith(told)
