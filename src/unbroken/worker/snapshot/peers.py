"""The ranks that restore together: replicas, and transfers of whole slots."""

from __future__ import annotations

import mmap
import sys
from importlib import import_module
from typing import Any

from unbroken.errors import WorldError
from unbroken.wire.snapshot import COPIED_AT, HEADERS_BYTES, SEALED_AT, Header, chunk, read, write
from unbroken.worker.checkpointing.peers import Peers, bytes_of, device


def replicas(world: Peers, group: Any) -> tuple[int, ...]:
    """Return the ranks of a group; None: all."""
    if world.world_size == 1 or group is None:
        return world.members
    return tuple(import_module("torch.distributed").get_process_group_ranks(group))


def send(header: Header, memory: Any, receiver: int) -> None:
    """Send a whole slot."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    told = bytearray(HEADERS_BYTES)
    data = write(header)
    at = COPIED_AT if header.table_checksum is None else SEALED_AT
    told[at : at + len(data)] = data
    dist.send(torch.frombuffer(told, dtype=torch.uint8).to(device()), dst=receiver)
    body = torch.frombuffer(memory, dtype=torch.uint8)
    for begin, end in _spans(header):
        dist.send(body[begin:end].to(device()), dst=receiver)


def receive(sender: int) -> tuple[Header, mmap.mmap]:
    """Receive a slot as it lies there.

    Raises WorldError if there is no memory for it; it was received all the same, so that the sender
    can continue.
    """
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    told = torch.empty(HEADERS_BYTES, dtype=torch.uint8, device=device())
    dist.recv(told, src=sender)
    header = read(bytes_of(told), sys.maxsize)
    if header is None:
        raise WorldError("its header is malformed")
    memory, failure = None, ""
    try:
        memory = mmap.mmap(-1, header.table_at + 4 * header.chunks)
    except OSError as error:
        failure = f"no memory for a snapshot of {header.body_bytes} bytes: {error.strerror}"
    for begin, end in _spans(header):
        part = torch.empty(end - begin, dtype=torch.uint8, device=device())
        dist.recv(part, src=sender)
        if memory is not None:
            torch.frombuffer(memory, dtype=torch.uint8)[begin:end].copy_(part)
    if memory is None:
        raise WorldError(failure)
    return header, memory


def _spans(header: Header) -> list[tuple[int, int]]:
    """Yield the body in chunks, then the table."""
    body = [chunk(one, header.body_bytes) for one in range(header.chunks)]
    return [*body, (header.table_at, header.table_at + 4 * header.chunks)]
