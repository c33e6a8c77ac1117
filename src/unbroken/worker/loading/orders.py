"""The order of all samples in an epoch, from the sampler of a loader."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from zlib import crc32

from unbroken.errors import SpecError
from unbroken.worker.checkpointing.state import generators
from unbroken.worker.checkpointing.state import seed as put_back

LIBRARIES = ("torch", "torchdata")
"""Packages whose samplers are known; a class of another package may divide samples by itself."""


class Orders:
    """The order of each epoch, alike on all ranks: what the sampler gives when all generators are
    seeded with the seed and the epoch."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._sampler = whole(loader)
        own: Any = getattr(self._sampler, "generator", None)
        self._generator = own
        self._seed = own.initial_seed() if _is_given(own, self._sampler, loader) else seed
        self._known: dict[int, tuple[Sequence[Any], int]] = {}

    def order(self, epoch: int) -> Sequence[Any]:
        """Return the samples of an epoch in their order."""
        return self._of(epoch)[0]

    def checksum(self, epoch: int) -> int:
        """Return the checksum of this order."""
        return self._of(epoch)[1]

    def _of(self, epoch: int) -> tuple[Sequence[Any], int]:
        if epoch not in self._known:
            # The epoch before may have samples left.
            self._known = {key: one for key, one in self._known.items() if key == epoch - 1}
            order = self._made(epoch)
            self._known[epoch] = order, _checksum(order)
        return self._known[epoch]

    def _made(self, epoch: int) -> Sequence[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        number = (self._seed + epoch) % 2**63
        if self._generator is None:
            with _seeded(number):
                return list(self._sampler)
        before = self._generator.get_state()
        self._generator.manual_seed(number)
        try:
            return list(self._sampler)
        finally:
            self._generator.set_state(before)


def whole(loader: Any) -> Any:
    """Return a sampler of all samples. Raises SpecError if the loader has none that is known to
    give the same samples on every rank."""
    data = import_module("torch.utils.data")
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None or not (isinstance(batches, data.BatchSampler) and _is_known(batches)):
        raise SpecError(
            "worker.data makes the batches of each rank itself: give the loader batch_size= and a "
            f"sampler, and no batch_sampler ({type(batches).__name__})"
        )
    if isinstance(sampler, data.DistributedSampler) and _is_known(sampler):
        return data.DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
    if hasattr(sampler, "num_replicas"):
        raise SpecError(
            f"worker.data divides the samples among the ranks, and {type(sampler).__name__} does "
            "so, too: give the loader a sampler of all samples, the same on every rank"
        )
    return sampler


def _is_given(generator: Any, sampler: Any, loader: Any) -> bool:
    """Return False for a generator that torchdata's sampler has made itself, since nobody gave it
    one. Its seed is random: another one in each process."""
    is_of_torchdata = type(sampler).__module__.split(".")[0] == "torchdata"
    return generator is not None and (not is_of_torchdata or generator is loader.generator)


def _is_known(found: Any) -> bool:
    return type(found).__module__.split(".")[0] in LIBRARIES


def _checksum(order: Sequence[Any]) -> int:
    try:
        return crc32(array("q", order))
    except (OverflowError, TypeError):
        return crc32(repr(order).encode())


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch; put them back at the end."""
    before = generators()
    random.seed(number)
    # Not torch.manual_seed, which seeds those of all GPUs.
    import_module("torch").default_generator.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)
    try:
        yield
    finally:
        put_back(before)
