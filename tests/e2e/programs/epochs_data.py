"""Loaders of every kind whose samples are the numbers from 0 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

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


def hugging_face_stream(size: int, processes: int) -> Any:
    """Return a loader of a stream of Hugging Face in six shards, shuffled by a buffer."""
    from datasets import Dataset as Table

    table = Table.from_dict({"number": range(size)}).to_iterable_dataset(num_shards=6)
    rows = table.shuffle(seed=3, buffer_size=20)
    return DataLoader(rows, BATCH, num_workers=processes, collate_fn=numbers_of)


class Shards(IterableDataset[int]):
    """Numbers in shards of different lengths."""

    def __init__(self, shards: Sequence[range]) -> None:
        self._shards = shards

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        """Return some of the shards."""
        return Shards(self._shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for shard in self._shards:
            yield from shard


def stream(size: int, processes: int) -> Any:
    """Return a loader of a stream in nine shards."""
    ends = [size * at * at // 81 for at in range(10)]
    return DataLoader(Shards([*map(range, ends, ends[1:])]), BATCH, num_workers=processes)


def stateful_stream(size: int, processes: int) -> Any:
    """Return a loader of torchdata for the same stream."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream(size, 0).dataset, BATCH, num_workers=processes)


def numbers_of(rows: list[dict[str, int]]) -> Any:
    """Return the numbers of some rows as a tensor."""
    import torch

    return torch.tensor([row["number"] for row in rows])


KINDS: dict[str, Callable[[int, int], Any]] = {
    "map": mapped,
    "stateful": stateful,
    "hugging-face": hugging_face,
    "stream": stream,
    "stateful-stream": stateful_stream,
    "hugging-face-stream": hugging_face_stream,
}
