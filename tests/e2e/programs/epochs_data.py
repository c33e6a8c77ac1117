"""Loaders of every kind whose samples are the numbers from 0 on."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

BATCH = 4
GUIDE = Path(__file__).parents[3] / "docs/guide/data.md"


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


def tars(size: int) -> list[str]:
    """Return six tar files with the numbers, which one of the ranks writes."""
    folder = Path(f"tars-{size}")
    if not folder.exists():
        draft = Path(mkdtemp(dir=Path.cwd()))
        for shard in range(6):
            with tarfile.open(draft / f"{shard}.tar", "w") as tar:
                for number in range(shard, size, 6):
                    member = tarfile.TarInfo(f"{number:06}.cls")
                    member.size = len(str(number))
                    tar.addfile(member, BytesIO(str(number).encode()))
        with suppress(OSError):  # another rank was sooner
            draft.rename(folder)
    return [str(file) for file in sorted(folder.glob("*.tar"))]


def webdataset(size: int, processes: int) -> Any:
    """Return a loader of tar files by the class that the guide shows."""
    import webdataset as library

    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "class Tars" in block)
    names: dict[str, Any] = {"webdataset": library, "IterableDataset": IterableDataset}
    exec(code, names)
    return DataLoader(
        names["Tars"](tars(size)), BATCH, num_workers=processes, collate_fn=numbers_of
    )


def numbers_of(rows: list[dict[str, int]]) -> Any:
    """Return the numbers of some rows as a tensor."""
    import torch

    return torch.tensor([row["number"] if "number" in row else row["cls"] for row in rows])


KINDS: dict[str, Callable[[int, int], Any]] = {
    "map": mapped,
    "stateful": stateful,
    "hugging-face": hugging_face,
    "stream": stream,
    "stateful-stream": stateful_stream,
    "hugging-face-stream": hugging_face_stream,
    "webdataset": webdataset,
}
