"""Copies of other nodes' snapshots, which this agent keeps as their buddy.

For each rank it keeps the copies that the sender names, else the newest two, whole and checked. A
torn copy, or one of another job, never counts. Copies of an older attempt go when all nodes hold a
step of a newer attempt, or a newer attempt has two copies. Until then they may be the only common
step of the nodes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from zlib import crc32

from unbroken.agent.snapshots.memory import File, Memory
from unbroken.agent_http.snapshots import Key, Point, Refused
from unbroken.core.snapshots.replication import KEPT
from unbroken.errors import PeerError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.snapshot import CHUNK_BYTES, HEADERS_BYTES, NAME_BYTES_MAX, Header, chunk, read

log = Log(__name__)

RANKS_MAX = 256
"""Ranks for which copies are kept at most: names times ranks."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The snapshot that some bytes should be."""

    key: Key
    point: Point
    job: bytes | None
    """Job of the snapshot; None: the agent does not know its job."""

    def header(self, headers: bytes, size: int) -> Header:
        """Return the header, if it is this snapshot's. Raises PeerError."""
        header = read(headers, size)
        if header is None or header.table_checksum is None:
            raise PeerError("it has no valid header with checksums, or another version's")
        result = (header.name, header.rank), (header.attempt, header.step)
        if result != (self.key, self.point):
            raise PeerError(f"its header says {result}, not {(self.key, self.point)}")
        if self.job is not None and header.job != self.job:
            raise PeerError("it is another job's")
        return header


async def check(file: File, subject: Subject) -> None:
    """Check every byte against the checksum. Raises PeerError."""
    header = subject.header(os.pread(file.fd, HEADERS_BYTES, 0), file.size)
    # The thread has a descriptor of its own: its caller may be cancelled.
    fault = await asyncio.to_thread(_fault, os.dup(file.fd), header)
    if fault:
        raise PeerError(fault)


def _fault(fd: int, header: Header) -> str:
    """Return the fault of a body; empty: none.

    The file is not mapped: releasing a mapping of many pages holds up everything else.
    """
    try:
        structure = os.pread(fd, header.structure_bytes, header.structure_at)
        sums = os.pread(fd, 4 * header.chunks, header.table_at)
        if (crc32(structure), crc32(sums)) != (header.structure_checksum, header.table_checksum):
            return "its structure or its table of checksums does not fit its checksum"
        buffer = memoryview(bytearray(min(CHUNK_BYTES, header.body_bytes)))
        for number in range(header.chunks):
            begin, end = chunk(number, header.body_bytes)
            count = os.preadv(fd, [buffer[: end - begin]], begin)
            result = crc32(buffer[:count])
            if result.to_bytes(4, "little") != sums[4 * number : 4 * number + 4]:
                return f"chunk {number} of {header.chunks} does not fit its checksum"
        return ""
    finally:
        os.close(fd)


class Incoming:
    """A copy that is being received."""

    def __init__(self, copies: Copies, subject: Subject, file: File, is_named: bool) -> None:
        self._copies, self.subject, self._file = copies, subject, file
        self.is_named = is_named
        """The sender has named the other copies that it needs."""
        self._received = 0
        self.is_over = False

    def write(self, data: bytes) -> None:
        """Write the next piece. Raises Refused."""
        if self.is_over:
            raise Refused(409, "another transfer of this rank has begun")
        if self._received + len(data) > self._file.size:
            raise Refused(413, f"more than {self._file.size} bytes")
        try:
            os.pwrite(self._file.fd, data, self._received)
        except OSError as error:
            raise Refused(507, f"no memory: {error.strerror}") from error
        before, self._received = self._received, self._received + len(data)
        if before < HEADERS_BYTES <= self._received:
            self._check_header()

    async def finish(self) -> None:
        """Check the complete copy, and keep it. Raises Refused."""
        if self._received != self._file.size:
            raise Refused(400, f"{self._received} of {self._file.size} bytes have come")
        try:
            await check(self._file, self.subject)
        except PeerError as error:
            raise Refused(422, str(error)) from error
        if self.is_over:
            raise Refused(409, "another transfer of this rank has begun")
        self.is_over = True
        self._copies.keep(self, self._file)

    def discard(self) -> None:
        """Release the copy, unless it is kept."""
        self.is_over = True
        self._copies.drop(self, self._file)

    def _check_header(self) -> None:
        try:
            self.subject.header(os.pread(self._file.fd, HEADERS_BYTES, 0), self._file.size)
        except PeerError as error:
            raise Refused(422, str(error)) from error


class Copies:
    """All copies that one agent keeps for others."""

    def __init__(self, memory: Memory, job: bytes | None, newest: Callable[[], int]) -> None:
        self._memory, self._job, self._newest = memory, job, newest
        self._kept: dict[Key, dict[Point, File]] = {}
        self._incoming: dict[Key, Incoming] = {}
        self.on_change: Callable[[Collection[int]], None] = lambda ranks: None
        """Called with the ranks that have copies, when these change."""

    def receive(
        self, key: Key, point: Point, size: int, needed: Collection[int] | None = None
    ) -> Incoming | None:
        """Begin to receive a copy; None: it is here already. Raises Refused.

        `needed`: the other steps of its attempt that the sender needs; None: not given.
        """
        kept = self._kept.get(key, {})
        newest = max([self._newest(), *(attempt for attempt, _ in kept)])
        if point[0] < newest:
            raise Refused(409, f"attempt {point[0]} is over: attempt {newest} runs")
        if point in kept:
            return None
        if not 0 < len(key[0].encode()) <= NAME_BYTES_MAX or size < HEADERS_BYTES:
            raise Refused(422, f"no snapshot: {size} bytes of {key[0]!r}")
        if len(self._kept.keys() | self._incoming.keys() | {key}) > RANKS_MAX:
            raise Refused(507, f"copies of {RANKS_MAX} ranks are here already")
        if key in self._incoming:
            self._incoming[key].discard()
        if needed is not None:
            is_useless = [one for one in kept if one[1] not in needed and one[0] == point[0]]
            is_useless += [one for one in kept if needed and one[0] < point[0]]
            for one in is_useless:
                self._memory.give_back(kept.pop(one))
        subject, file = Subject(key, point, self._job), self._room(key, size)
        self._incoming[key] = Incoming(self, subject, file, needed is not None)
        return self._incoming[key]

    def _room(self, key: Key, size: int) -> File:
        """Return memory for a copy. If memory is short, a rank's oldest copies are dropped for its
        new one, but not its last two."""
        while True:
            try:
                return self._memory.take(f"unbroken-copy-{key[1]}", size)
            except WorldError as error:
                kept = self._kept.get(key, {})
                if len(kept) <= KEPT:
                    raise Refused(507, str(error)) from error
                self._memory.give_back(kept.pop(min(kept)))

    def keep(self, incoming: Incoming, file: File) -> None:
        """Keep the copy: it is whole."""
        key, point = incoming.subject.key, incoming.subject.point
        self._incoming.pop(key, None)
        kept = self._kept.setdefault(key, {})
        kept[point] = file
        if not incoming.is_named:
            in_attempt = sorted(one for one in kept if one[0] == point[0])
            useless = set(in_attempt[:-KEPT])
            if len(in_attempt) >= KEPT:
                useless |= {one for one in kept if one[0] < point[0]}
            for one in useless:
                self._memory.give_back(kept.pop(one))
        log.debug("copy stored", snapshot=key[0], rank=key[1], attempt=point[0], step=point[1])
        self._report_kept()

    def drop(self, incoming: Incoming, file: File) -> None:
        """Drop the copy: it will not be whole."""
        key = incoming.subject.key
        if self._incoming.get(key) is incoming:
            del self._incoming[key]
        if file not in self._kept.get(key, {}).values():
            self._memory.give_back(file)
        if not self._kept.get(key, True):
            del self._kept[key]
            self._report_kept()

    def sizes(self, key: Key) -> dict[Point, int]:
        """Return the sizes of the copies of a rank."""
        return {point: file.size for point, file in self._kept.get(key, {}).items()}

    def descriptor(self, key: Key, point: Point) -> int | None:
        """Return a descriptor of the memory that holds it; a new one, to be closed by the
        caller."""
        file = self._kept.get(key, {}).get(point)
        return None if file is None else os.dup(file.fd)

    def shared(self, key: Key, point: Point) -> File | None:
        """Return the same memory once more, for a user that needs it longer."""
        file = self._kept.get(key, {}).get(point)
        return None if file is None else self._memory.share(file)

    def held(self) -> dict[Key, list[Point]]:
        """Return all copies."""
        return {key: sorted(kept) for key, kept in self._kept.items()}

    def headers(self, name: str) -> list[Header]:
        """Return the headers of all copies under a name."""
        files = [file for key, kept in self._kept.items() if key[0] == name
                 for file in kept.values()]  # fmt: skip
        result = [read(os.pread(file.fd, HEADERS_BYTES, 0), file.size) for file in files]
        return [header for header in result if header is not None]

    def forget(self, is_useless: Callable[[Key, Point], bool]) -> None:
        """Release copies that are no longer needed."""
        for key, kept in list(self._kept.items()):
            for point in [one for one in kept if is_useless(key, one)]:
                self._memory.give_back(kept.pop(point))
            if not kept:
                del self._kept[key]
        self._report_kept()

    def _report_kept(self) -> None:
        self.on_change([rank for _, rank in self._kept])

    def close(self) -> None:
        """Release all memory."""
        for incoming in list(self._incoming.values()):
            incoming.discard()
        self.forget(lambda key, point: True)
