"""Batches of a dataset without a length, from its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple
from zlib import crc32

from unbroken.errors import SpecError
from unbroken.log_lines import Log
from unbroken.worker import context
from unbroken.worker.checkpointing.peers import world

from .loaders import Data, rebuilt
from .shards import Sample, begun, chunks, dealt, move, moves, unread

Told = tuple[int, int, bool, dict[int, int], int]
"""Message of a rank before a step: the checksum of its order, its part of the data, whether it has
no batch after this one, the positions after it, and its samples."""
Gather = Callable[[Told], Sequence[Told]]
OTHER_ORDER = "the stream has another order {}: give its shuffle() a seed, the same in every run"
_data: Any = import_module("torch.utils.data")
log = Log(__name__, "unbroken.worker: ")


class Prepared(NamedTuple):
    """A batch from a loader process, with the position after it."""

    moved: dict[int, int]
    samples: int
    """Samples of the step; of this rank's batch if it reads alone."""
    batch: Any


def gathered(told: Told) -> Sequence[Told]:
    """Exchange the messages of all ranks. Raises SpecError before init_process_group."""
    peers = world()
    if peers is not None:
        return peers.gather(told)
    if context().world_size > 1:
        raise SpecError(
            "worker.data: ranks agree on their position in a stream in each step: call "
            "torch.distributed.init_process_group() before the loop"
        )
    return [told]


class Stream(Data):
    """Batches of an IterableDataset."""

    _epoch: int
    _done: list[int]
    """Position in each shard."""
    _kept_order: int | None
    """Order of a position that was loaded."""

    def __init__(
        self, loader: Any, where: tuple[int, int] | None, gather: Gather = gathered
    ) -> None:
        dataset = loader.dataset
        if loader.batch_size is None or loader.drop_last:
            raise SpecError(
                "worker.data makes the batches of a stream and leaves out no sample: give the "
                "loader batch_size=, and no drop_last=True"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise SpecError(
                "worker.data divides the samples among the ranks: give the loader the dataset "
                "without split_dataset_by_node"
            )
        self._loader, self._gather, self._order = loader, gather, _order(dataset)
        self._has_shards = hasattr(dataset, "num_shards") and hasattr(dataset, "shard")
        self._count = int(dataset.num_shards) if self._has_shards else 1
        super().__init__(where)

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch, from 0."""
        self._renew()
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the rest of the epoch."""
        self._renew()
        if len(self._done) != self._count:
            raise SpecError(
                f"the data have {self._count} shards, and had {len(self._done)} when their "
                "position was kept: train with the same data, or restore without data="
            )
        if self._kept_order not in (None, self._order):
            raise SpecError(OTHER_ORDER.format("than when its position was kept"))
        part, ranks = self._place()
        if any(
            order != self._order for order, *_ in self._gather((self._order, part, False, {}, 0))
        ):
            raise SpecError(OTHER_ORDER.format("on each rank"))
        is_apart = len(unread(self._done)) + len(begun(self._done)) >= ranks
        while is_apart:
            before = self._samples
            yield from self._apart()
            is_apart = self._samples > before and len(unread(self._done)) >= ranks
        yield from self._together()
        self._epoch, self._done = self._epoch + 1, [0] * self._count

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the newest batch, the same on all ranks."""
        self._renew()
        return {
            "epoch": self._epoch,
            "shards": list(self._done),
            "samples": self._samples,
            "order": self._order,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        super().load_state_dict(state)
        self._epoch, self._done = int(state["epoch"]), list(state["shards"])
        self._kept_order = int(state["order"])

    def _begin_attempt(self) -> None:
        super()._begin_attempt()
        self._epoch, self._done, self._kept_order = 0, [0] * self._count, None

    def _apart(self) -> Iterator[Any]:
        """Yield batches of this rank's own shards while every rank has one more after it.

        So each rank has a batch at least when all of them read the rest.
        """
        part, ranks = self._place()
        items = self._items(dealt(self._done, part, ranks), None)
        held = next(items, None)
        while True:
            following = None if held is None else next(items, None)
            moved, samples, batch = held or Prepared({}, 0, None)
            told = self._gather((self._order, part, following is None, moved, samples))
            if any(is_last for _, _, is_last, _, _ in told):
                return
            # Ranks that train on the same part say the same.
            for _, _, _, positions, count in {one[1]: one for one in told}.values():
                move(self._done, positions)
                self._samples += count
            yield batch
            held = following

    def _together(self) -> Iterator[Any]:
        """Yield this rank's share of what is left, which every rank reads."""
        shards = [*begun(self._done), *unread(self._done)]
        for moved, samples, batch in self._items(shards, self._place()):
            if batch is None:
                ranks = self._place()[1]
                log.warning(
                    "samples are left out",
                    reason=f"{samples} samples of epoch {self._epoch} are fewer than {ranks} ranks",
                )
                return
            move(self._done, moved)
            self._samples += samples
            yield batch

    def _items(self, shards: Sequence[int], share: tuple[int, int] | None) -> Iterator[Prepared]:
        loader = self._loader
        reader = Reader(
            loader.dataset, self._has_shards, self._epoch, loader.batch_size, loader.collate_fn,
            tuple((shard, self._done[shard]) for shard in shards), share,
        )  # fmt: skip
        changed: dict[str, Any] = {"persistent_workers": False}
        if share is not None and loader.num_workers:
            # Each process would read everything.
            changed["num_workers"] = 1
        return iter(rebuilt(loader, reader, batch_size=None, collate_fn=unchanged, **changed))


@dataclass(frozen=True)
class Reader(_data.IterableDataset):  # type: ignore[misc]
    """Reads shards in a loader process, and makes the batches of a rank."""

    dataset: Any
    has_shards: bool
    epoch: int
    batch: int
    collate: Callable[[list[Any]], Any]
    parts: tuple[tuple[int, int], ...]
    """Shards in the order in which they are read, each with the samples taken before."""
    share: tuple[int, int] | None
    """Rank and number of ranks that read the same shards; None: this rank reads them alone."""

    def __iter__(self) -> Iterator[Prepared]:
        number, processes = _loader_process()
        parts = self.parts[number::processes]
        rank, ranks = self.share or (0, 1)
        shards, at = [shard for shard, _ in parts], 0
        for chunk in chunks(self._samples(parts), ranks, self.batch):
            moved, at = moves(chunk, shards, at)
            own = [one.value for one in chunk[rank::ranks]]
            is_enough = len(chunk) >= ranks
            yield Prepared(moved, len(chunk), self.collate(own) if is_enough else None)

    def _samples(self, parts: Sequence[tuple[int, int]]) -> Iterator[Sample]:
        for shard, taken in parts:
            # Read again up to the position: a state of the dataset would lack what a buffer for
            # shuffling holds.
            for done, value in enumerate(self._shard(shard), 1):
                if done > taken:
                    yield Sample(shard, done, value)

    def _shard(self, shard: int) -> Any:
        part = self.dataset
        if self.has_shards:
            part = part.shard(num_shards=part.num_shards, index=shard)
        if hasattr(part, "set_epoch"):
            part.set_epoch(self.epoch)
        return part


def unchanged(item: Any) -> Any:
    """Return a batch that its loader process has made already."""
    return item


def _order(dataset: Any) -> int:
    """Return a checksum of the generators that shuffle a stream of Hugging Face."""
    texts, rest = [], [getattr(dataset, "_ex_iterable", None)]
    while rest:
        one = rest.pop()
        generator = getattr(one, "generator", None)
        if generator is not None:
            texts.append(repr(generator.bit_generator.state))
        rest += [inner for inner in (getattr(one, "ex_iterable", None),) if inner is not None]
        rest += getattr(one, "ex_iterables", ())
    return crc32("".join(texts).encode())


def _loader_process() -> tuple[int, int]:
    """Return the number of this loader process, and how many there are.

    It is hidden from the dataset, which would divide its samples by it.
    """
    info = _data.get_worker_info()
    if info is None:
        return 0, 1
    inner: Any = import_module("torch.utils.data._utils.worker")
    inner._worker_info = None
    if _data.get_worker_info() is not None:
        raise SpecError("worker.data cannot read a stream in loader processes of this torch")
    return info.id, info.num_workers
