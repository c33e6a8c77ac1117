"""Copies of other nodes' snapshots, and requests to other agents about snapshots.

As a buddy, this agent keeps for each rank the copies that the sender names, else the newest two,
whole and checked. A torn copy, or one of another job, never counts. Copies of an older attempt go
when all nodes hold a step of a newer attempt, or a newer attempt has two copies. Until then they
may be the only common step of the nodes.

All nodes agree on the snapshots to send at the agent of node rank 0, over HTTP. A caller waits
there until there is a decision (`core/snapshots/replication.py`).

`Fetch` gets snapshots from holders of copies, for a rank that has lost its memory.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated
from urllib.parse import quote
from zlib import crc32

from msgspec import Meta

from unbroken.agent_http.peer import SILENCE_SECONDS, connected
from unbroken.agent_http.snapshots import PATH, Key, Point, RequestRefused
from unbroken.core.snapshots.replication import KEPT, Agreement, Arrival, NextRound
from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.agent import StartCommand
from unbroken.wire.codec import Natural, load
from unbroken.wire.codec import read as read_message
from unbroken.wire.snapshot import CHUNK_BYTES, HEADERS_BYTES, NAME_BYTES_MAX, Header, chunk, read

from .slots import MemoryFile, SnapshotMemory

log = Log(__name__)

RANKS_MAX = 256
"""Ranks for which copies are kept at most: names times ranks."""


@dataclass(frozen=True, slots=True)
class ExpectedSnapshot:
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


async def check(file: MemoryFile, subject: ExpectedSnapshot) -> None:
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


class IncomingCopy:
    """A copy that is being received."""

    def __init__(
        self, copies: BuddyCopies, subject: ExpectedSnapshot, file: MemoryFile, is_named: bool
    ) -> None:
        self._copies, self.subject, self._file = copies, subject, file
        self.is_named = is_named
        """The sender has named the other copies that it needs."""
        self._received = 0
        self.is_over = False

    def write(self, data: bytes) -> None:
        """Write the next piece. Raises Refused."""
        if self.is_over:
            raise RequestRefused(409, "another transfer of this rank has begun")
        if self._received + len(data) > self._file.size:
            raise RequestRefused(413, f"more than {self._file.size} bytes")
        try:
            os.pwrite(self._file.fd, data, self._received)
        except OSError as error:
            raise RequestRefused(507, f"no memory: {error.strerror}") from error
        before, self._received = self._received, self._received + len(data)
        if before < HEADERS_BYTES <= self._received:
            self._check_header()

    async def finish(self) -> None:
        """Check the complete copy, and keep it. Raises Refused."""
        if self._received != self._file.size:
            raise RequestRefused(400, f"{self._received} of {self._file.size} bytes have come")
        try:
            await check(self._file, self.subject)
        except PeerError as error:
            raise RequestRefused(422, str(error)) from error
        if self.is_over:
            raise RequestRefused(409, "another transfer of this rank has begun")
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
            raise RequestRefused(422, str(error)) from error


class BuddyCopies:
    """All copies that one agent keeps for others."""

    def __init__(
        self, memory: SnapshotMemory, job: bytes | None, newest: Callable[[], int]
    ) -> None:
        self._memory, self._job, self._newest = memory, job, newest
        self._kept: dict[Key, dict[Point, MemoryFile]] = {}
        self._incoming: dict[Key, IncomingCopy] = {}
        self.on_change: Callable[[Collection[int]], None] = lambda ranks: None
        """Called with the ranks that have copies, when these change."""

    def receive(
        self, key: Key, point: Point, size: int, needed: Collection[int] | None = None
    ) -> IncomingCopy | None:
        """Begin to receive a copy; None: it is here already. Raises Refused.

        `needed`: the other steps of its attempt that the sender needs; None: not given.
        """
        kept = self._kept.get(key, {})
        newest = max([self._newest(), *(attempt for attempt, _ in kept)])
        if point[0] < newest:
            raise RequestRefused(409, f"attempt {point[0]} is over: attempt {newest} runs")
        if point in kept:
            return None
        if not 0 < len(key[0].encode()) <= NAME_BYTES_MAX or size < HEADERS_BYTES:
            raise RequestRefused(422, f"no snapshot: {size} bytes of {key[0]!r}")
        if len(self._kept.keys() | self._incoming.keys() | {key}) > RANKS_MAX:
            raise RequestRefused(507, f"copies of {RANKS_MAX} ranks are here already")
        if key in self._incoming:
            self._incoming[key].discard()
        if needed is not None:
            is_useless = [one for one in kept if one[1] not in needed and one[0] == point[0]]
            is_useless += [one for one in kept if needed and one[0] < point[0]]
            for one in is_useless:
                self._memory.give_back(kept.pop(one))
        subject, file = ExpectedSnapshot(key, point, self._job), self._room(key, size)
        self._incoming[key] = IncomingCopy(self, subject, file, needed is not None)
        return self._incoming[key]

    def _room(self, key: Key, size: int) -> MemoryFile:
        """Return memory for a copy. If memory is short, a rank's oldest copies are dropped for its
        new one, but not its last two."""
        while True:
            try:
                return self._memory.take_copy(f"unbroken-copy-{key[1]}", size)
            except WorldError as error:
                kept = self._kept.get(key, {})
                if len(kept) <= KEPT:
                    raise RequestRefused(507, str(error)) from error
                self._memory.give_back(kept.pop(min(kept)))

    def keep(self, incoming: IncomingCopy, file: MemoryFile) -> None:
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

    def drop(self, incoming: IncomingCopy, file: MemoryFile) -> None:
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

    def shared(self, key: Key, point: Point) -> MemoryFile | None:
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


def name_path(name: str) -> str:
    """Return the path of everything under a name."""
    return f"{PATH}/{quote(name, safe='')}"


def path(key: Key, point: Point | None = None) -> str:
    """Return the path of a rank's copies, or of one copy."""
    result = f"{name_path(key[0])}/{key[1]}"
    return result if point is None else f"{result}/{point[0]}/{point[1]}"


LISTEN_SECONDS = 15.0
"""Seconds that one question waits for its answer; then it is asked again."""
GATHER_SECONDS = 15.0
"""Seconds for all nodes to save a name for the first time; a later node joins them then."""
WAITING_MAX = 128
"""Questions that wait for an answer; others are answered at once, and asked again after
`CROWDED_SECONDS`. Each takes one of the 256 connections of node rank 0's agent, which the operator
and the senders of copies need, too."""
CROWDED_SECONDS = 5.0
NAMES_MAX = 64


class StrangerError(PeerError):
    """The asked agent is not node rank 0's."""


@dataclass(eq=False)
class _CopyRow:
    agreement: Agreement
    announced: int = 0
    next: asyncio.Future[NextRound] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Agreements:
    """The agreements on all names of one attempt; call `close` when it is over."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._rows: dict[str, _CopyRow] = {}
        self._waiting = 0
        self._timers: list[asyncio.TimerHandle] = []

    async def arrive(self, name: str, node: int, arrival: Arrival) -> NextRound | None:
        """Return the decision; None: none yet. Raises Refused."""
        row = self._rows.get(name) or self._begin(name)
        decision = row.agreement.arrive(node, arrival)
        if decision is not None:
            self._announce(row, decision)
            return decision
        if self._waiting >= WAITING_MAX:
            return None
        future = row.next
        self._waiting += 1
        try:
            await asyncio.wait([future], timeout=LISTEN_SECONDS)
        finally:
            self._waiting -= 1
        return future.result() if future.done() and not future.cancelled() else None

    def close(self) -> None:
        """Stop: waiting callers get no answer any more."""
        for timer in self._timers:
            timer.cancel()
        for row in self._rows.values():
            row.next.cancel()

    def _begin(self, name: str) -> _CopyRow:
        if len(self._rows) >= NAMES_MAX:
            raise RequestRefused(507, f"snapshots of {NAMES_MAX} names are agreed upon already")
        row = self._rows[name] = _CopyRow(Agreement(self._nodes))
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(GATHER_SECONDS, self._gathered, row))
        return row

    def _gathered(self, row: _CopyRow) -> None:
        decision = row.agreement.gathered()
        if decision is not None:
            self._announce(row, decision)

    def _announce(self, row: _CopyRow, decision: NextRound) -> None:
        # A node that has missed a decision is sent it again; the others are not.
        if decision.number > row.announced:
            row.announced = decision.number
            row.next.set_result(decision)
            row.next = asyncio.get_running_loop().create_future()


def first(command: StartCommand) -> str:
    """Return the address of node rank 0's agent: its port is that of all agents of a job."""
    host = command.master_addr
    return f"{f'[{host}]' if ':' in host else host}:{command.buddy.rpartition(':')[2]}"


async def ask(
    command: StartCommand, key: bytes | None, name: str, arrival: Arrival
) -> NextRound | None:
    """Ask node rank 0; None: nothing is decided yet. Raises PeerError, OSError, TimeoutError."""
    told = {"attempt": command.attempt, "node": command.rank, **asdict(arrival)}
    async with connected(first(command), key) as peer:
        await peer.ask("POST", name_path(name), body=json.dumps(told).encode())
        head = await peer.head(LISTEN_SECONDS + SILENCE_SECONDS)
        if head.status in (404, 405, 421):
            raise StrangerError(f"{first(command)} is not node rank 0's agent, or an older one")
        if head.status == 204:
            return None
        text = await peer.text(head)
    if head.status != 200:
        raise PeerError(f"it answers {head.status} {text.decode(errors='replace')[:300]}")
    return read_message(NextRound, load(text), "the answer")


LIST_SECONDS = 2.0
"""Seconds for a holder to list its copies."""
LISTED_MAX = 64


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot in the list of an agent."""

    attempt: Natural
    step: Natural
    bytes: Natural


@dataclass(frozen=True, slots=True)
class HeldList:
    """The snapshots of a rank that an agent holds."""

    node: Natural | None
    """Node rank of the agent; None: it has not been started."""
    snapshots: Annotated[tuple[HeldSnapshot, ...], Meta(max_length=LISTED_MAX)]


@dataclass(frozen=True)
class HolderOffer:
    """Copies that a holder offers."""

    address: str
    node: int | str
    """Its node rank, or its address if it has not been started and has no rank."""
    point: Point
    size: int


@dataclass(frozen=True)
class Fetch:
    """Fetching for one rank."""

    key: Key
    holders: Sequence[str]
    secret: bytes | None
    """The job's key."""
    job: bytes | None
    memory: SnapshotMemory
    problems: list[str] = field(default_factory=list)
    """Problems, with the holder of each."""

    async def offers(self) -> list[HolderOffer]:
        """Return the offers of all holders, the likeliest first; a holder that does not answer has
        none."""
        answers = await asyncio.gather(*(self._listed(address) for address in self.holders))
        return [offer for offers in answers for offer in offers]

    async def bring(self, offers: Sequence[HolderOffer]) -> tuple[MemoryFile, HolderOffer] | None:
        """Return the same snapshot from the first holder that sends it; None: none does."""
        for offer in offers:
            try:
                return await self._brought(offer), offer
            except (OSError, TimeoutError, UnbrokenError) as error:
                self._complain(offer.address, error)
        return None

    async def _listed(self, address: str) -> list[HolderOffer]:
        try:
            async with asyncio.timeout(LIST_SECONDS), connected(address, self.secret) as peer:
                await peer.ask("GET", path(self.key))
                head = await peer.head()
                if head.status != 200:
                    raise PeerError(f"it answers {head.status}")
                return _offers(address, await peer.text(head))
        except (OSError, TimeoutError, PeerError) as error:
            self._complain(address, error)
        except Exception as defect:
            # A defect with one answer must not hide the copies of the other holders.
            log.exception("offers not read", agent=address)
            self._complain(address, defect)
        return []

    async def _brought(self, offer: HolderOffer) -> MemoryFile:
        file = self.memory.take(f"unbroken-fetched-{self.key[1]}", offer.size)
        try:
            async with connected(offer.address, self.secret) as peer:
                await peer.ask("GET", path(self.key, offer.point))
                head = await peer.head()
                if head.status != 200 or head.length != offer.size:
                    raise PeerError(f"it answers {head.status}, with another size than it said")
                await peer.receive(head, file.fd)
            await check(file, ExpectedSnapshot(self.key, offer.point, self.job))
        except BaseException:
            self.memory.give_back(file)
            raise
        return file

    def _complain(self, address: str, error: BaseException) -> None:
        why = str(error) or "does not answer in time"
        self.problems.append(f"{address}: {why}"[:300])
        log.warning(
            "copy not fetched", snapshot=self.key[0], rank=self.key[1], agent=address, error=why
        )


def _offers(address: str, body: bytes) -> list[HolderOffer]:
    """Return the offers in an answer. Raises PeerError if it is no list of snapshots."""
    held_list = read_message(HeldList, load(body), "the answer")
    node = address if held_list.node is None else held_list.node
    return [
        HolderOffer(address, node, (snapshot.attempt, snapshot.step), snapshot.bytes)
        for snapshot in held_list.snapshots
    ]
