"""The memory of a process's snapshots: from the agent, or its own without an agent.

A slot is mapped once and filled in place. `Slot.clear` comes before the body is touched,
`Slot.commit` after it; `Slot.seal` may come later, from another thread.

The pages of a slot are taken from the kernel at once. They are populated by several threads, and in
huge pages if the machine allows them for shared memory. That takes half as long as fallocate(2) and
then a fault at each page of the first copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol
from zlib import crc32

from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.compat import zip_equal
from unbroken.wire.ipc import (
    FETCH_SECONDS,
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
from unbroken.worker.channel import Channel, whole

from .choice import Point, Shares

MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
"""linux/mman.h; the second is known since Linux 5.14."""
PART_BYTES = 64 * 1024 * 1024
THREADS_MAX = 4
AGAIN = (errno.EINTR, errno.EAGAIN)


def take(memory: mmap.mmap, fd: int) -> None:
    """Take all pages now: if memory is short, an error is better than SIGBUS in a copy. Raises
    WorldError."""
    # Not mmap.madvise, which holds the interpreter's lock.
    ctypes = import_module("ctypes")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = len(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise(begin, size, MADV_HUGEPAGE)

    def populate(at: int) -> int:
        while madvise(begin + at, min(PART_BYTES, size - at), MADV_POPULATE_WRITE):
            number: int = ctypes.get_errno()
            if number not in AGAIN:
                return number
        return 0

    with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1)) as pool:
        failed = [number for number in pool.map(populate, range(0, size, PART_BYTES)) if number]
    if not failed:
        return
    try:
        if failed[0] != errno.EINVAL:
            raise OSError(failed[0], os.strerror(failed[0]))
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise WorldError(f"no memory for a snapshot of {size} bytes: {error.strerror}") from error


log = Log(__name__, "unbroken.worker: ")
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Identity:
    """Identity of the rank that owns a snapshot."""

    name: str
    rank: int
    attempt: int

    def message(self, kind: str, **keys: int | bool) -> dict[str, Any]:
        """Return the fields for the agent."""
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
        """Layout of the data that were written into it last."""
        self.capacity = 0
        """Bytes for a body; known to the process that has opened it."""

    def header(self) -> Header | None:
        """Header of the snapshot that it holds now."""
        return read(self.memory[:HEADERS_BYTES], len(self.memory))

    def version(self) -> int | None:
        """Return the version of the format of its contents; None: it is empty."""
        return version(self.memory[:HEADERS_BYTES])

    @whole
    def clear(self) -> None:
        """Mark the slot as empty; a seal that is being made is abandoned."""
        with self.changing:
            self._number += 1
            self.memory[:HEADERS_BYTES] = ABSENT

    @whole
    def commit(self, header: Header) -> int:
        """Mark the body as whole; return what `seal` needs."""
        with self.changing:
            data = write(header)
            self.memory[COPIED_AT : COPIED_AT + len(data)] = data
            return self._number

    def seal(self, header: Header, number: int) -> bool:
        """Compute the checksum of the body; False: it was overwritten meanwhile, and holds or will
        hold another."""
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


def table(memory: Any, header: Header) -> bytes:
    """Return the checksums of a body."""
    view = memoryview(memory)

    def one(number: int) -> bytes:
        begin, end = chunk(number, header.body_bytes)
        return crc32(view[begin:end]).to_bytes(4, "little")

    # crc32 releases the interpreter's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return b"".join(pool.map(one, range(header.chunks)))


def faults(memory: mmap.mmap | memoryview, header: Header) -> list[str]:
    """Return the faults of a body, by its checksums.

    A body without checksums has only its order of writing, and the checksum of its structure.
    """
    view = memoryview(memory)
    structure = view[header.structure_at : header.structure_at + header.structure_bytes]
    if crc32(structure) != header.structure_checksum:
        return ["its structure does not fit its checksum"]
    if header.table_checksum is None:
        return []
    told = bytes(view[header.table_at : header.table_at + 4 * header.chunks])
    if crc32(told) != header.table_checksum:
        return ["its table of checksums does not fit its own"]
    result = table(memory, header)
    return [
        f"chunk {number} of {header.chunks} (bytes {begin} to {end}) does not fit its checksum"
        for number in range(header.chunks)
        for begin, end in [chunk(number, header.body_bytes)]
        if result[4 * number : 4 * number + 4] != told[4 * number : 4 * number + 4]
    ]


Offered = tuple[Slot, str]
"""A slot with its source, as in `Restored.source`."""


class Slots(Protocol):
    """The source of slots."""

    def open(self, index: int, capacity: int) -> Slot:
        """Open a new slot, 0 or 1; the old one of this index is dropped. Raises WorldError."""

    def saved(self, index: int, step: int, seconds: float, replicas: str) -> None:
        """Report a complete snapshot. Raises WorldError if the attempt is over.

        `seconds`: for which training waited; `replicas`: ranks that hold the same state, as
        ranges, empty if there are no others.
        """

    def used(self, attempt: int, step: int) -> None:
        """Report that all ranks have restored this one."""

    def find(self) -> list[Offered]:
        """Return the snapshots here that may be restored."""

    def everyone(self) -> dict[Point, Shares]:
        """Return the shares here, of any rank."""

    def other(self, rank: int, point: Point) -> Slot | None:
        """Return one of these."""

    def copies(self) -> list[Point]:
        """Return the points that are elsewhere; none is brought here yet."""

    def fetch(self, attempt: int, step: int) -> list[Offered]:
        """Bring one of these here; return the snapshots that may be restored."""


class OwnSlots:
    """Slots of this process: they end with it."""

    def open(self, index: int, capacity: int) -> Slot:
        """Open a new slot."""
        size = slot_bytes(capacity)
        try:
            return Slot(mmap.mmap(-1, size))
        except OSError as error:
            raise WorldError(f"no memory for a snapshot of {size} bytes: {error}") from error

    def saved(self, index: int, step: int, seconds: float, replicas: str) -> None:
        """Do nothing: no agent needs the report."""

    def used(self, attempt: int, step: int) -> None:
        """Do nothing: no agent needs the report."""

    def find(self) -> list[Offered]:
        """Return none: no snapshot outlives the process."""
        return []

    def everyone(self) -> dict[Point, Shares]:
        """Return none: no snapshot outlives the process."""
        return {}

    def other(self, rank: int, point: Point) -> Slot | None:
        """Return none: no snapshot outlives the process."""
        return None

    def copies(self) -> list[Point]:
        """Return none: there are no copies elsewhere."""
        return []

    def fetch(self, attempt: int, step: int) -> list[Offered]:
        """Return none: there are no copies elsewhere."""
        return []


class _Ahead:
    """A slot that a thread opens, so that the save which needs it waits less."""

    def __init__(self, open_: Callable[[], Slot]) -> None:
        self._slot: Slot | None = None
        self._thread = threading.Thread(
            target=self._run, args=(open_,), name="unbroken-slot", daemon=True
        )
        self._thread.start()

    def found(self) -> Slot | None:
        """Return the slot; None: it could not be opened, and the next request returns the
        reason."""
        self._thread.join()
        return self._slot

    def _run(self, open_: Callable[[], Slot]) -> None:
        try:
            self._slot = open_()
        except UnbrokenError as error:
            log.debug("slot not opened ahead", error=error)


class AgentSlots:
    """Slots of the agent: they outlive the process."""

    def __init__(self, channel: Channel, identity: Identity) -> None:
        self._channel, self._identity = channel, identity
        self._ahead: dict[int, _Ahead | None] = {}
        """Slots opened before they are requested, by index; None: already requested."""

    def open(self, index: int, capacity: int) -> Slot:
        """Open a new slot; its memory is taken now, that of the other slot soon."""
        ahead = self._ahead.get(index)
        self._ahead.setdefault(index, None)
        if ahead is not None:
            self._ahead[index] = None
            slot = ahead.found()
            if slot is not None and len(slot.memory) >= slot_bytes(capacity):
                return slot
        slot = self._open(index, capacity)
        if 1 - index not in self._ahead:
            # Never a second time: the agent drops the old slot, which may be the only whole one.
            self._ahead[1 - index] = _Ahead(lambda: self._open(1 - index, capacity))
        return slot

    def _open(self, index: int, capacity: int) -> Slot:
        size = slot_bytes(capacity)
        _, fds = self._ask(SNAPSHOT_OPEN, SNAPSHOT_SLOT, slot=index, bytes=size)
        copies = [os.dup(fd) for fd in fds]
        try:
            (slot,) = _mapped(fds, 1)
            take(slot.memory, copies[0])
        finally:
            for fd in copies:
                os.close(fd)
        return slot

    def saved(self, index: int, step: int, seconds: float, replicas: str) -> None:
        """Report it to the agent."""
        told = self._identity.message(SNAPSHOT_SAVED, slot=index, step=step)
        self._request(told | {"seconds": seconds, "replicas": replicas}, SNAPSHOT_KEPT)

    def used(self, attempt: int, step: int) -> None:
        """Report it to the agent."""
        self._ask(SNAPSHOT_USED, SNAPSHOT_KEPT, from_attempt=attempt, step=step)

    def find(self) -> list[Offered]:
        """Return the snapshots that the agent offers."""
        return self._offered(*self._ask(SNAPSHOT_FIND, SNAPSHOT_FOUND))

    def everyone(self) -> dict[Point, Shares]:
        """Return the shares of all ranks that the agent has, those of other nodes included."""
        answer, fds = self._ask(SNAPSHOT_FIND, SNAPSHOT_FOUND, everyone=True)
        # An agent of an earlier release reports this rank alone, with descriptors.
        _mapped(fds, len(fds))
        result: dict[Point, dict[int, set[int]]] = {}
        for told in answer.get("steps", []):
            if "world_size" in told:
                ranks = result.setdefault((told["attempt"], told["step"]), {})
                ranks.setdefault(told["world_size"], set()).add(told["rank"])
        return {
            point: Shares(world, tuple(sorted(ranks)))
            for point, worlds in result.items()
            for world, ranks in worlds.items()
        }

    def other(self, rank: int, point: Point) -> Slot | None:
        """Return the slot that the agent has of a rank."""
        whose = replace(self._identity, rank=rank)
        message = whose.message(SNAPSHOT_FIND, from_attempt=point[0], step=point[1])
        result = self._offered(*self._request(message, SNAPSHOT_FOUND))
        return result[0][0] if result else None

    def copies(self) -> list[Point]:
        """Return the points that the agent could get from holders of copies, or holds for others
        itself."""
        answer, fds = self._fetch(list=True)
        _mapped(fds, len(fds))
        return [(told["attempt"], told["step"]) for told in answer.get("steps", [])]

    def fetch(self, attempt: int, step: int) -> list[Offered]:
        """Return the snapshots that the agent offers once it has fetched this one."""
        return self._offered(*self._fetch(from_attempt=attempt, step=step))

    def _fetch(self, **keys: int | bool) -> tuple[Mapping[str, Any], list[int]]:
        seconds = FETCH_SECONDS + ANSWER_SECONDS
        answer, fds = self._ask(SNAPSHOT_FETCH, SNAPSHOT_FOUND, seconds, **keys)
        for problem in answer.get("problems", []):
            log.warning("copies of snapshots", problem=problem)
        return answer, fds

    def _offered(self, answer: Mapping[str, Any], fds: list[int]) -> list[Offered]:
        steps = answer.get("steps", [])
        givers = answer.get("from") or [None] * len(steps)
        result: list[Offered] = []
        for slot, told, giver in zip_equal(_mapped(fds, len(steps)), steps, givers):
            header = slot.header()
            offered = (told.get("attempt"), told.get("step"))
            # Data of a late writer are left out. An unreadable slot is kept, so that it is
            # reported.
            if header is None or (header.attempt, header.step) == offered:
                result.append((slot, "memory" if giver is None else f"buddy {giver}"))
        return result

    def _ask(
        self, kind: str, answer: str, seconds: float = ANSWER_SECONDS, **keys: int | bool
    ) -> tuple[Mapping[str, Any], list[int]]:
        return self._request(self._identity.message(kind, **keys), answer, seconds)

    def _request(
        self, message: Mapping[str, Any], answer: str, seconds: float = ANSWER_SECONDS
    ) -> tuple[Mapping[str, Any], list[int]]:
        result, fds = self._channel.request(message, answer, seconds=seconds)
        if "error" in result:
            for fd in fds:
                os.close(fd)
            raise WorldError(f"the agent refuses {message['type']}: {result['error']}")
        return result, fds


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
