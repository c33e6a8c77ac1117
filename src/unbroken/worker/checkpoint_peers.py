"""The ranks that train together, as far as checkpoints and snapshots need them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
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


ALONE = Peers(0, 1, (0,))


def peers(is_shared: bool) -> Peers:
    """Those of torch.distributed's default group, which is asked anew each time."""
    where, found = context(), world()
    if found is None:
        if where.world_size > 1:
            raise CheckpointError(
                f"this is one of {where.world_size} ranks: call"
                " torch.distributed.init_process_group() before checkpoints are used"
            )
        return ALONE
    if is_shared:
        return found
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = found.rank - where.local_rank
    return replace(found, members=tuple(range(first, first + local)))


def world() -> Peers | None:
    """All ranks of the default group; None: there is no group."""
    distributed: Any = import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    size = distributed.get_world_size()
    return Peers(distributed.get_rank(), size, tuple(range(size)))
