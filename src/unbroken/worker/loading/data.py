"""Data of training that is neither repeated nor skipped after a restart.

    data = worker.data(DataLoader(dataset, batch_size=8, shuffle=True))
    snapshot = worker.Snapshot(model=model, optimizer=optimizer, data=data)
    found = snapshot.restore()
    step = found.step + 1 if found else 0
    for epoch in range(data.epoch, epochs):
        for batch in data:
            ...
            snapshot.save(step)
            step += 1

All ranks have the same position, the samples that were taken by all of them together. So a rank
that lost its memory gets it from any other, and another number of ranks divides the samples that
are left. The position moves when a batch is handed out: what loader processes have prepared and
training has not seen is not counted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unbroken.errors import SpecError

from .loaders import Data, Table
from .orders import Orders
from .streams import Stream


def data(
    loader: Any, *, seed: int = 0, rank: int | None = None, world_size: int | None = None
) -> Data:
    """Return the loader's data with a position that snapshots and checkpoints keep.

    `loader` is a DataLoader of torch or a StatefulDataLoader of torchdata, with `batch_size` of one
    rank. Its samples are divided among the ranks here. A dataset with a length needs a sampler of
    all samples, or a DistributedSampler; `seed` is that of a sampler without a generator. An
    IterableDataset yields all samples, alike on every rank. If it has `num_shards` and
    `shard(num_shards, index)`, as those of Hugging Face have, each rank reads its own shards.

    `rank` and `world_size` say which of how many parts of the data this rank trains on, where
    several ranks train on the same samples (tensor parallel). By default each rank has its own.
    """
    torch_data = import_module("torch.utils.data")
    if not isinstance(loader, torch_data.DataLoader):
        raise SpecError(f"worker.data takes a DataLoader, not a {type(loader).__name__}")
    if (rank is None) != (world_size is None):
        raise SpecError("worker.data: give rank= and world_size= together")
    where = None if rank is None or world_size is None else (rank, world_size)
    if isinstance(loader.dataset, torch_data.IterableDataset):
        return Stream(loader, where)
    return Table(loader, Orders(loader, seed), where)
