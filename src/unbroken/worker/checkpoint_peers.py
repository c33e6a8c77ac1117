"""The ranks that train together, as far as checkpoints need them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, cast

from unbroken.worker import context

from .checkpoint_files import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """This rank among the others; those it shares the directory with are `members`."""

    rank: int
    world_size: int
    members: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """One of those that share a directory is."""
        return self.rank == self.members[0]

    def gather(self, value: T) -> list[T]:
        """Of all ranks, in their order; all have to call it."""
        if self.world_size == 1:
            return [value]
        found: list[T | None] = [None] * self.world_size
        import_module("torch.distributed").all_gather_object(found, value)
        return cast("list[T]", found)

    def together(self, act: Callable[[], T]) -> list[T]:
        """Do something on every rank; what fails on one is raised on all."""
        result: Any = None
        error: Exception | None = None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001  (raised below, on every rank)
            error = caught
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        told = self.gather((kind if error else None, str(error) or repr(error), result))
        if error is not None:
            raise error
        for rank, (failed, text, _) in enumerate(told):
            if failed is not None:
                raise failed(f"rank {rank}: {text}")
        return [result for _, _, result in told]


def peers(is_shared: bool) -> Peers:
    """Those of torch.distributed's default group, which is asked anew each time."""
    where = context()
    distributed: Any = import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_initialized()):
        if where.world_size > 1:
            raise CheckpointError(
                f"this is one of {where.world_size} ranks: call"
                " torch.distributed.init_process_group() before checkpoints are used"
            )
        return Peers(0, 1, (0,))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if is_shared:
        return Peers(rank, world, tuple(range(world)))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = rank - where.local_rank
    return Peers(rank, world, tuple(range(first, first + local)))
