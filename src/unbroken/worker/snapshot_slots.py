"""The memory of a process's snapshots: from the agent, or its own where there is none.

A slot is mapped once and filled in place.  `Slot.clear` comes before the body is touched,
`Slot.commit` after it; `Slot.seal` may come later, from another thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol
from zlib import crc32

from unbroken.errors import PeerError, WorldError
from unbroken.wire.ipc import (
    SNAPSHOT_FETCH,
    SNAPSHOT_FIND,
    SNAPSHOT_FOUND,
    SNAPSHOT_KEPT,
    SNAPSHOT_OPEN,
    SNAPSHOT_SAVED,
    SNAPSHOT_SLOT,
    SNAPSHOT_USED,
)
from unbroken.wire.snapshot import (
    ABSENT,
    COPIED_AT,
    HEADERS_BYTES,
    SEALED_AT,
    Header,
    chunk,
    read,
    slot_bytes,
    version,
    write,
)

from .channel import whole

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 10.0
FETCH_SECONDS = 600.0
"""Whole snapshots come over the network meanwhile; the agent gives up a holder that is silent."""


class Channel(Protocol):
    """Of `worker/channel.py`."""

    def request(
        self, message: Mapping[str, Any], answer_type: str, *, seconds: float = ...
    ) -> tuple[Mapping[str, Any], list[int]]:
        """Ask the agent."""


@dataclass(frozen=True)
class Identity:
    """Whose snapshot it is."""

    name: str
    rank: int
    attempt: int

    def message(self, kind: str, **keys: int) -> dict[str, Any]:
        """For the agent."""
        own = {"name": self.name, "rank": self.rank, "attempt": self.attempt}
        return {"type": kind, **own, **keys}


class Slot:
    """Memory for one snapshot."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.changing = threading.Lock()
        """Held while headers change."""
        self._number = 0
        self.layout = b""
        """Of what was written into it last."""
        self.capacity = 0
        """Room for a body; known to who has opened it."""

    def header(self) -> Header | None:
        """What it holds now."""
        return read(self.memory[:HEADERS_BYTES], len(self.memory))

    def version(self) -> int | None:
        """Of the format in which it holds something; None: nothing."""
        return version(self.memory[:HEADERS_BYTES])

    @whole
    def clear(self) -> None:
        """From here on it holds nothing; a seal that is being made is given up."""
        with self.changing:
            self._number += 1
            self.memory[:HEADERS_BYTES] = ABSENT

    @whole
    def commit(self, header: Header) -> int:
        """The body is whole; returns what `seal` wants."""
        with self.changing:
            data = write(header)
            self.memory[COPIED_AT : COPIED_AT + len(data)] = data
            return self._number

    def seal(self, header: Header, number: int) -> bool:
        """Sum the body; False: it was overwritten meanwhile, and holds or will hold another."""
        sums = bytearray()
        view = memoryview(self.memory)
        for one in range(header.chunks):
            if self._number != number:
                return False
            begin, end = chunk(one, header.body_bytes)
            sums += crc32(view[begin:end]).to_bytes(4, "little")
        with self.changing:
            if self._number != number:
                return False
            self.memory[header.table_at : header.table_at + len(sums)] = bytes(sums)
            data = write(replace(header, table_checksum=crc32(sums)))
            self.memory[SEALED_AT : SEALED_AT + len(data)] = data
        return True


def allocate(fd: int, size: int) -> None:
    """Take the pages now: where there are none an error is better than SIGBUS in a copy."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise WorldError(f"no memory for a snapshot of {size} bytes: {error.strerror}") from error


def table(memory: Any, header: Header) -> bytes:
    """The checksums of a body."""
    view = memoryview(memory)

    def one(number: int) -> bytes:
        begin, end = chunk(number, header.body_bytes)
        return crc32(view[begin:end]).to_bytes(4, "little")

    # crc32 gives up the interpreter's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return b"".join(pool.map(one, range(header.chunks)))


def faults(memory: mmap.mmap | memoryview, header: Header) -> list[str]:
    """What is wrong with a body, by its checksums; a body that was not summed has its order of
    writing alone, and the checksum of its structure."""
    view = memoryview(memory)
    structure = view[header.structure_at : header.structure_at + header.structure_bytes]
    if crc32(structure) != header.structure_checksum:
        return ["its structure does not fit its checksum"]
    if header.table_checksum is None:
        return []
    told = bytes(view[header.table_at : header.table_at + 4 * header.chunks])
    if crc32(told) != header.table_checksum:
        return ["its table of checksums does not fit its own"]
    found = table(memory, header)
    return [
        f"chunk {number} of {header.chunks} (bytes {begin} to {end}) does not fit its checksum"
        for number in range(header.chunks)
        for begin, end in [chunk(number, header.body_bytes)]
        if found[4 * number : 4 * number + 4] != told[4 * number : 4 * number + 4]
    ]


Offered = tuple[Slot, str]
"""With where it comes from, as `Restored.source` has it."""


class Slots(Protocol):
    """Where slots come from."""

    def open(self, index: int, capacity: int) -> Slot:
        """A new one, 0 or 1; the old one of this index is given up.  WorldError."""

    def saved(self, index: int, step: int) -> None:
        """A snapshot is complete.  WorldError: the attempt is over."""

    def used(self, attempt: int, step: int) -> None:
        """All ranks have restored this one."""

    def find(self) -> list[Offered]:
        """What there is to restore from here."""

    def fetch(self) -> list[Offered]:
        """What there is elsewhere, brought here."""


class OwnSlots:
    """Of this process: they end with it."""

    def open(self, index: int, capacity: int) -> Slot:
        """A new one."""
        size = slot_bytes(capacity)
        try:
            return Slot(mmap.mmap(-1, size))
        except OSError as error:
            raise WorldError(f"no memory for a snapshot of {size} bytes: {error}") from error

    def saved(self, index: int, step: int) -> None:
        """Nobody wants to know."""

    def used(self, attempt: int, step: int) -> None:
        """Nobody wants to know."""

    def find(self) -> list[Offered]:
        """Nothing outlives the process."""
        return []

    def fetch(self) -> list[Offered]:
        """Nobody else has it."""
        return []


class AgentSlots:
    """Of the agent: they outlive the process."""

    def __init__(self, channel: Channel, identity: Identity) -> None:
        self._channel, self._identity = channel, identity

    def open(self, index: int, capacity: int) -> Slot:
        """A new one; its memory is taken here and now."""
        size = slot_bytes(capacity)
        _, fds = self._ask(SNAPSHOT_OPEN, SNAPSHOT_SLOT, slot=index, bytes=size)
        try:
            for fd in fds:
                allocate(fd, size)
        except WorldError:
            _mapped(fds, len(fds))
            raise
        (slot,) = _mapped(fds, 1)
        return slot

    def saved(self, index: int, step: int) -> None:
        """Tell the agent."""
        self._ask(SNAPSHOT_SAVED, SNAPSHOT_KEPT, slot=index, step=step)

    def used(self, attempt: int, step: int) -> None:
        """Tell the agent."""
        self._ask(SNAPSHOT_USED, SNAPSHOT_KEPT, from_attempt=attempt, step=step)

    def find(self) -> list[Offered]:
        """What the agent offers."""
        return self._offered(SNAPSHOT_FIND, ANSWER_SECONDS)

    def fetch(self) -> list[Offered]:
        """What the agent gets from those who have copies, and holds for others itself."""
        return self._offered(SNAPSHOT_FETCH, FETCH_SECONDS)

    def _offered(self, kind: str, seconds: float) -> list[Offered]:
        answer, fds = self._ask(kind, SNAPSHOT_FOUND, seconds)
        steps = answer.get("steps", [])
        givers = answer.get("from") or [None] * len(steps)
        found: list[Offered] = []
        for slot, told, giver in zip(_mapped(fds, len(steps)), steps, givers, strict=True):
            header = slot.header()
            offered = (told.get("attempt"), told.get("step"))
            # What a late writer has written since is left out; what nobody can read is kept, so
            # that it is told.
            if header is None or (header.attempt, header.step) == offered:
                found.append((slot, "memory" if giver is None else f"buddy {giver}"))
        return found

    def _ask(
        self, kind: str, answer: str, seconds: float = ANSWER_SECONDS, **keys: int
    ) -> tuple[Mapping[str, Any], list[int]]:
        message = self._identity.message(kind, **keys)
        found, fds = self._channel.request(message, answer, seconds=seconds)
        if "error" in found:
            for fd in fds:
                os.close(fd)
            raise WorldError(f"the agent refuses {kind}: {found['error']}")
        return found, fds


def _mapped(fds: list[int], expected: int) -> list[Slot]:
    try:
        if len(fds) != expected:
            raise PeerError(f"the agent sends {len(fds)} descriptors, not {expected}")
        return [_map(fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int) -> Slot:
    return Slot(mmap.mmap(fd, os.fstat(fd).st_size))
