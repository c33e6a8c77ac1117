"""Loaders whose data have a position: of datasets with a length here, of streams in `streams`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from unbroken.errors import SpecError
from unbroken.wire.compat import zip_equal
from unbroken.worker import context

from .orders import Orders
from .positions import Division, Position

SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device",
)  # fmt: skip
"""Settings of a loader that are kept. `in_order` is not: batches in another order have no common
position."""


class Data:
    """Batches of this rank, from the position on; made by `worker.data`.

    A loop over it ends with the epoch. A loop that was left early continues where it was. A later
    attempt in the same process (`worker.restartable`) begins with what it restores, or anew.
    """

    def __init__(self, where: tuple[int, int] | None) -> None:
        self._where = where
        self._begin_attempt()

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch, from 0."""
        raise NotImplementedError

    @property
    def samples(self) -> int:
        """This rank's share of the samples that all ranks have taken, over all epochs and
        restarts: for `worker.progress(samples=)`."""
        self._renew()
        rank, ranks = self._place()
        return self._samples // ranks + (rank < self._samples % ranks)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the rest of the epoch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the newest batch, the same on all ranks."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. If the data are others than then, the next use of them raises
        SpecError, on every rank."""
        self._attempt, self._samples = context().attempt, int(state["samples"])

    def _place(self) -> tuple[int, int]:
        where = context()
        return self._where or (where.rank, where.world_size)

    def _renew(self) -> None:
        """Forget the position of an earlier attempt of this process."""
        if context().attempt != self._attempt:
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._attempt, self._samples = context().attempt, 0


class Table(Data):
    """Batches of a dataset with a length."""

    _kept: Mapping[str, int] | None
    """A position that was loaded and is not compared with the data yet."""

    def __init__(self, loader: Any, orders: Orders, where: tuple[int, int] | None) -> None:
        super().__init__(where)
        self._batch, self._drop_last = loader.batch_size, loader.drop_last
        self._orders = orders
        self._loader = rebuilt(loader, loader.dataset, batch_sampler=_Batches(self))

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch, from 0."""
        return self._start().epoch

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return sum(1 for _ in self._division(self._start().epoch).steps(0))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the rest of the epoch."""
        start = self._position = self._start()
        division = self._division(start.epoch)
        for batch, (first, end) in zip_equal(self._loader, division.steps(start.done)):
            self._samples += end - first
            self._position = replace(start, done=end)
            yield batch
        self._position = self._position.start(division)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the newest batch, the same on all ranks."""
        self._renew()
        epoch = self._position.epoch
        return {
            "epoch": epoch,
            "done": self._position.done,
            "samples": self._samples,
            "size": len(self._orders.order(epoch)),
            "order": self._orders.checksum(epoch),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position."""
        super().load_state_dict(state)
        self._kept, self._position = dict(state), Position(state["epoch"], state["done"])

    def left(self) -> Iterator[list[Any]]:
        """Return the samples of this rank's batches in the rest of the epoch."""
        start, place = self._start(), self._place()
        order = self._orders.order(start.epoch)
        before: Sequence[Any] = self._orders.order(start.epoch - 1) if start.done < 0 else ()
        return _chosen(self._division(start.epoch).steps(start.done), place, order, before)

    def _start(self) -> Position:
        self._renew()
        self._check()
        return self._position.start(self._division(self._position.epoch))

    def _division(self, epoch: int) -> Division:
        size, ranks = len(self._orders.order(epoch)), self._place()[1]
        result = Division(size, ranks, self._batch, self._drop_last)
        if result.step(0) == 0:
            needed = ranks * (self._batch if self._drop_last else 1)
            raise SpecError(
                f"the data have {size} samples, and {ranks} ranks need at least {needed} for a step"
            )
        return result

    def _begin_attempt(self) -> None:
        super()._begin_attempt()
        self._kept, self._position = None, Position()

    def _check(self) -> None:
        kept = self._kept
        if kept is None:
            return
        epoch, size = kept["epoch"], len(self._orders.order(kept["epoch"]))
        if kept["size"] != size:
            raise SpecError(
                f"the data have {size} samples, and had {kept['size']} when their position was "
                "kept: train with the same data, or restore without data="
            )
        if kept["order"] != self._orders.checksum(epoch):
            raise SpecError(
                f"the sampler gives another order of epoch {epoch} than when the position was "
                "kept: it must depend on its seed and the epoch only"
            )
        self._kept = None


def _chosen(
    steps: Iterator[tuple[int, int]],
    place: tuple[int, int],
    order: Sequence[Any],
    before: Sequence[Any],
) -> Iterator[list[Any]]:
    rank, ranks = place
    for first, end in steps:
        yield [order[at] if at >= 0 else before[at] for at in range(first, end)[rank::ranks]]


class _Batches:
    """The batches that are left, as a batch sampler of torch."""

    def __init__(self, owner: Table) -> None:
        # No object that the loader holds refers to its owner: a cycle would be collected in an
        # order in which torch waits 5 s for the end of each loader process.
        self._owner: weakref.ref[Table] = weakref.ref(owner)

    def __iter__(self) -> Iterator[list[Any]]:
        owner = self._owner()
        return iter(()) if owner is None else owner.left()

    def __len__(self) -> int:
        owner = self._owner()
        return 0 if owner is None else len(owner)


def rebuilt(loader: Any, dataset: Any, **changed: Any) -> Any:
    """Return a loader with the same settings, but for those that are changed.

    It is torch's own where torchdata's would only keep a position of its own in addition.
    """
    kind = type(loader)
    if kind.__module__.startswith("torchdata."):
        kind = import_module("torch.utils.data").DataLoader
    settings = {name: getattr(loader, name) for name in SETTINGS if hasattr(loader, name)}
    try:
        return kind(dataset, **{**settings, **changed})
    except TypeError as error:
        raise SpecError(
            f"worker.data cannot make a second {kind.__name__} like this one ({error}): give it a "
            "DataLoader"
        ) from error
