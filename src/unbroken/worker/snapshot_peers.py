"""The ranks that restore together: what each says, and whole slots from one to another."""

from __future__ import annotations

import mmap
from importlib import import_module
from typing import Any

from unbroken.errors import WorldError
from unbroken.wire.snapshot import Header, chunk


class World:
    """All ranks: the default process group, or this process alone."""

    def __init__(self) -> None:
        dist = import_module("torch.distributed")

        self.is_one = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.is_one else dist.get_rank()
        self.size = 1 if self.is_one else dist.get_world_size()

    def gather(self, own: Any) -> list[Any]:
        """What every rank says, by rank."""
        dist = import_module("torch.distributed")

        if self.is_one:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return found

    def replicas(self, group: Any) -> tuple[int, ...]:
        """Ranks of a group; None: all."""
        dist = import_module("torch.distributed")

        if self.is_one or group is None:
            return tuple(range(self.size))
        return tuple(dist.get_process_group_ranks(group))


def send(header: Header, memory: Any, receiver: int) -> None:
    """A whole slot."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    dist.send_object_list([header], dst=receiver)
    body = torch.frombuffer(memory, dtype=torch.uint8)
    for begin, end in _spans(header):
        dist.send(body[begin:end].to(_device()), dst=receiver)


def receive(sender: int) -> tuple[Header, mmap.mmap]:
    """The same, as it lies there.  WorldError: there is no memory for it; it was taken all the
    same, so that the sender goes on."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    told: list[Any] = [None]
    dist.recv_object_list(told, src=sender)
    header: Header = told[0]
    memory, failure = None, ""
    try:
        memory = mmap.mmap(-1, header.table_at + 4 * header.chunks)
    except OSError as error:
        failure = f"no memory for a snapshot of {header.body_bytes} bytes: {error.strerror}"
    for begin, end in _spans(header):
        part = torch.empty(end - begin, dtype=torch.uint8, device=_device())
        dist.recv(part, src=sender)
        if memory is not None:
            torch.frombuffer(memory, dtype=torch.uint8)[begin:end].copy_(part)
    if memory is None:
        raise WorldError(failure)
    return header, memory


def _spans(header: Header) -> list[tuple[int, int]]:
    """The body in chunks, then the table."""
    body = [chunk(one, header.body_bytes) for one in range(header.chunks)]
    return [*body, (header.table_at, header.table_at + 4 * header.chunks)]


def _device() -> str:
    dist = import_module("torch.distributed")

    return "cuda" if dist.get_backend() == "nccl" else "cpu"
