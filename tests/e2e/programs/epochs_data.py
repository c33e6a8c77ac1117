"""Loaders of every kind whose samples are the numbers from 0 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset

BATCH = 4


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def mapped(size: int, processes: int) -> Any:
    """Return a shuffled loader of torch."""
    return DataLoader(
        Numbers(size), BATCH, shuffle=True, num_workers=processes, persistent_workers=processes > 0
    )


def stateful(size: int, processes: int) -> Any:
    """Return a shuffled loader of torchdata."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(size), BATCH, shuffle=True, num_workers=processes)


def hugging_face(size: int, processes: int) -> Any:
    """Return a shuffled loader of a data set of Hugging Face."""
    from datasets import Dataset as Table

    table = Table.from_dict({"number": range(size)})
    return DataLoader(table, BATCH, shuffle=True, num_workers=processes, collate_fn=numbers_of)


def numbers_of(rows: list[dict[str, int]]) -> Any:
    """Return the numbers of some rows as a tensor."""
    import torch

    return torch.tensor([row["number"] for row in rows])


KINDS: dict[str, Callable[[int, int], Any]] = {
    "map": mapped,
    "stateful": stateful,
    "hugging-face": hugging_face,
}
