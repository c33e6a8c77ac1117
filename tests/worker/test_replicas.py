"""Replicas that agree need no broadcast by DDP; those that differ in anything get one."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.worker.forked import ranks
from unbroken import worker

pytestmark = pytest.mark.slow
SEEDS = range(20)


class Model(nn.Module):
    """A random small model with parameters and buffers of many kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chosen = random.Random(seed)
        width = chosen.choice([1, 3, 8])
        kinds = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Tanh()]
        layers = [chosen.choice(kinds) for _ in range(chosen.randint(0, 4))]
        self.first = nn.Linear(4, width)
        self.layers = nn.Sequential(*layers)
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("mask", torch.rand(4).to(torch.bfloat16), persistent=False)
        self.register_buffer("swapped", torch.rand(2, 3).t())
        self.register_buffer("none", torch.empty(0))
        if chosen.random() < 0.5:
            self.first.weight.requires_grad_(False)
        if chosen.random() < 0.3:
            self.tied = self.first

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return something that depends on all of them."""
        inner = self.layers(self.first(batch * self.mask.float()))
        return inner * self.scale + self.shift + self.swapped.sum()


def _bit(tensor: torch.Tensor) -> None:
    """Change the lowest bit of one element."""
    view = tensor.detach().view(torch.uint8)
    view.view(-1)[0] ^= 1


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a parameter": lambda model: _bit(model.first.bias),
    "a frozen or tied parameter": lambda model: _bit(model.first.weight),
    "a buffer": lambda model: _bit(model.get_buffer("scale")),
    "a buffer that no snapshot keeps": lambda model: _bit(model.get_buffer("mask")),
    "the sign of zero": lambda model: model.shift.data.neg_(),
}
"""Changes of one rank that a broadcast would undo."""


def nested() -> torch.Tensor:
    """Return a tensor of the plain type that has no shape: it raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


OTHERS: dict[str, Callable[[Model], Any]] = {
    "training": lambda model: model.shift.requires_grad_(False),
    "dtype": lambda model: model.register_buffer("scale", model.get_buffer("scale").double()),
    "shape": lambda model: model.register_buffer("none", torch.empty(0, 2)),
    "strides": lambda model: model.register_buffer("swapped", model.swapped.contiguous()),
    "name": lambda model: model.register_buffer("another", torch.zeros(1)),
    "kind": lambda model: model.register_buffer("mask", None),
    "device": lambda model: model.register_buffer("none", torch.empty(1, device="meta")),
    "ignored": lambda model: setattr(model, "_ddp_params_and_buffers_to_ignore", ["shift"]),
    "unreadable": lambda model: model.register_buffer("none", nested()),
    "layout": lambda model: model.register_buffer("none", torch.eye(2).to_sparse()),
}
"""Changes of one rank with which DDP has to deal as it always does."""


def trained(model: nn.Module, is_equal: bool) -> list[bytes]:
    """Return all bits of a model after some steps."""
    parallel = DistributedDataParallel(model, init_sync=not is_equal)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        torch.manual_seed(1000 * step + torch.distributed.get_rank())
        optimizer.zero_grad()
        parallel(torch.rand(5, 4)).square().mean().backward()
        optimizer.step()
    values = [*model.parameters(), *model.buffers()]
    return [bytes(one.detach().flatten().view(torch.uint8).tolist()) for one in values]


def compared(rank: int) -> dict[str, list[bool]]:
    """Return the answers for random models, unchanged and changed on one rank."""
    answers: dict[str, list[bool]] = {}
    for seed in SEEDS:
        for name, change in {"nothing": lambda _: None, **CHANGES, **OTHERS}.items():
            model = Model(seed)
            if rank == seed % 2:
                change(model)
            answer = worker.replicas_agree(model)
            answers.setdefault(name, []).append(answer)
            if name in OTHERS:
                continue
            if trained(copy.deepcopy(model), is_equal=False) != trained(model, is_equal=answer):
                answers.setdefault(f"{name}: trained otherwise", []).append(True)
    return answers


def test_replicas_agree_only_if_a_broadcast_would_change_nothing(tmp_path: Path) -> None:
    """By what DDP makes of random models without and with the answer, bit by bit."""
    expected = {"nothing": True} | dict.fromkeys({**CHANGES, **OTHERS}, False)
    for answers in ranks(2, compared, tmp_path / "store"):
        assert answers == {name: [value] * len(SEEDS) for name, value in expected.items()}


def test_a_lone_process_agrees_with_itself() -> None:
    assert worker.replicas_agree(Model(0))


@pytest.mark.parametrize("kept", [0, 4])
def test_freed_memory_is_not_compared(kept: int) -> None:
    model = Model(0)
    model.get_buffer("swapped").untyped_storage().resize_(kept)
    assert not worker.replicas_agree(model)
