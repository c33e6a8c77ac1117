"""Pieces of tensors from many ranks to many, each message with its checksum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import Any
from zlib import crc32

from unbroken.errors import WorldError
from unbroken.wire.compat import zip_equal
from unbroken.worker.checkpointing.peers import Peers, device

BATCH_BYTES = 64 * 1024 * 1024
"""Bytes of one message, unless a single tensor is larger."""
_SUM_BYTES = 4


def exchange(world: Peers, gives: Sequence[Sequence[Any]], takes: Sequence[Sequence[Any]]) -> None:
    """Send tensors to each rank, and receive into tensors from each; both sides know all of them,
    in this order.

    Raises WorldError if some were changed on their way; the others have come all the same.
    """
    rank, size, is_whole = world.rank, world.world_size, True
    with import_module("torch").no_grad():
        for source, target in zip_equal(gives[rank], takes[rank]):
            target.copy_(source)
        for shift in range(1, size):
            to, sender = (rank + shift) % size, (rank - shift) % size
            for giving, taking in zip_longest(_batches(gives[to]), _batches(takes[sender])):
                is_whole &= _swapped(giving, to, taking, sender)
    if not is_whole:
        raise WorldError("what another rank has sent does not fit its checksum")


def _swapped(giving: list[Any] | None, to: int, taking: list[Any] | None, sender: int) -> bool:
    """Exchange a message each way, of which one may be None; return whether it arrived as sent."""
    torch, dist = import_module("torch"), import_module("torch.distributed")

    operations, came = [], bytearray(_size(taking or []))
    arriving = torch.frombuffer(came, dtype=torch.uint8).to(device())
    if giving is not None:
        operations.append(dist.P2POp(dist.isend, packed(giving).to(device()), to))
    if taking is not None:
        operations.append(dist.P2POp(dist.irecv, arriving, sender))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if arriving.is_cuda:
        torch.frombuffer(came, dtype=torch.uint8).copy_(arriving)
    if taking is None:
        return True
    return unpacked(came, taking)


def _size(tensors: Sequence[Any]) -> int:
    return _SUM_BYTES + sum(int(item.nbytes) for item in tensors)


def packed(tensors: Sequence[Any]) -> Any:
    """Return a message: the bytes of the tensors, and their checksum."""
    torch = import_module("torch")

    message = bytearray(_size(tensors))
    body, begin = torch.frombuffer(message, dtype=torch.uint8), 0
    for item in tensors:
        body[begin : begin + item.nbytes] = _bytes(item)
        begin += item.nbytes
    message[begin:] = crc32(memoryview(message)[:begin]).to_bytes(_SUM_BYTES, "little")
    return body


def unpacked(message: bytearray, tensors: Sequence[Any]) -> bool:
    """Fill the tensors from a message; return False, with nothing filled, if it is not what was
    sent."""
    torch = import_module("torch")

    body, begin = torch.frombuffer(message, dtype=torch.uint8), 0
    end = len(message) - _SUM_BYTES
    if crc32(memoryview(message)[:end]).to_bytes(_SUM_BYTES, "little") != bytes(message[end:]):
        return False
    for item in tensors:
        # A copy of its own begins at an address that suits any dtype.
        part = body[begin : begin + item.nbytes].clone()
        item.copy_(part.view(item.dtype).view(item.shape))
        begin += item.nbytes
    return True


def summed(tensor: Any, before: int) -> int:
    """Return the CRC-32 of earlier data and a tensor."""
    torch = import_module("torch")

    for part in torch.split(_bytes(tensor), BATCH_BYTES) if tensor.numel() else ():
        data = bytearray(len(part))
        torch.frombuffer(data, dtype=torch.uint8).copy_(part)
        before = crc32(data, before)
    return before


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(import_module("torch").uint8)


def _batches(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for item in tensors:
        batch.append(item)
        size += item.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
