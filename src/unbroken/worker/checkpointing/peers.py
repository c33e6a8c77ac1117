"""The ranks that train together, as far as checkpoints and snapshots need them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

from unbroken.errors import WorldError
from unbroken.wire.compat import zip_equal
from unbroken.worker import context
from unbroken.worker.typed_values import EXCHANGED, Form, decode, encode

from .storage import CheckpointError, Superseded

T = TypeVar("T")
MESSAGES_BYTES_MAX = 8 << 30
"""Bytes of the messages of all ranks that one exchange may hold in memory."""
ERROR_CHARACTERS = 2000
"""Characters of an error's text that the other ranks get."""


@dataclass(frozen=True)
class Peers:
    """This rank among the others; those that share its directory are `members`."""

    rank: int
    world_size: int
    members: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """True for one of the ranks that share a directory."""
        return self.rank == self.members[0]

    def gather(self, value: T, forms: Iterable[Form] = ()) -> list[T]:
        """Exchange a value of typed parts; all ranks call it, and get all values in their order.

        Raises WorldError if a rank has sent no such value.
        """
        if self.world_size == 1:
            return [value]
        known = [*EXCHANGED.values(), *forms]
        result: list[T] = []
        for rank, data in enumerate(_all_gathered(encode(value, forms=known), self.world_size)):
            try:
                result.append(decode(data, forms=known))
            except ValueError as error:
                raise WorldError(f"rank {rank} has sent a malformed message: {error}") from None
        return result

    def together(self, act: Callable[[], T]) -> list[T]:
        """Call a function on every rank; an error on one is raised on all."""
        result: Any = None
        error: Exception | None = None
        again: float | None = None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001  (raised below, on every rank)
            error = caught
            again = getattr(caught, "retry_after_seconds", None)
        is_over = isinstance(error, Superseded)
        text = (str(error) or repr(error))[:ERROR_CHARACTERS]
        told = self.gather((error is not None, is_over, again, text, result))
        if error is not None:
            raise error
        for rank, (failed, is_over, again, text, _) in enumerate(told):
            if failed:
                raise (Superseded if is_over else CheckpointError)(f"rank {rank}: {text}", again)
        return [item for *_, item in told]


def _all_gathered(data: bytes, world_size: int) -> list[bytes]:
    """Return the bytes of all ranks. Raises WorldError, on all of them, if they are too many."""
    torch, dist = import_module("torch"), import_module("torch.distributed")
    where = device()
    own = torch.tensor([len(data)], dtype=torch.int64, device=where)
    sizes = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(sizes, own)
    lengths = [int(size.item()) for size in sizes]
    longest = max(lengths)
    if min(lengths) < 0 or longest * world_size > MESSAGES_BYTES_MAX:
        raise WorldError(f"messages of {longest} bytes from {world_size} ranks are too large")
    padded = bytearray(data.ljust(longest, b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(where)
    result = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(result, own)
    return [bytes_of(item)[:length] for item, length in zip_equal(result, lengths)]


def bytes_of(tensor: Any) -> bytes:
    """Return the content of a tensor of dtype uint8, on any device and not empty.

    Without numpy, which torch does not need.
    """
    torch = import_module("torch")
    result = bytearray(tensor.numel())
    torch.frombuffer(result, dtype=torch.uint8).copy_(tensor.flatten())
    return bytes(result)


def device() -> Any:
    """Return the device that tensors must be on for an exchange by the default group."""
    c10d = import_module("torch.distributed.distributed_c10d")
    # Torch's own choice for objects knows the backends of other accelerators.
    choose = getattr(c10d, "_get_object_coll_device", None)
    if choose is not None:
        return choose()
    return "cuda" if c10d.get_backend() == "nccl" else "cpu"


ALONE = Peers(0, 1, (0,))


def peers(is_shared: bool) -> Peers:
    """Return the peers of torch.distributed's default group, which is looked up again each time."""
    where, result = context(), world()
    if result is None:
        if where.world_size > 1:
            raise CheckpointError(
                f"this is one of {where.world_size} ranks: call"
                " torch.distributed.init_process_group() before checkpoints are used"
            )
        return ALONE
    if is_shared:
        return result
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = result.rank - where.local_rank
    return replace(result, members=tuple(range(first, first + local)))


def world() -> Peers | None:
    """Return all ranks of the default group; None: there is no group."""
    distributed: Any = import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    size = distributed.get_world_size()
    return Peers(distributed.get_rank(), size, tuple(range(size)))
