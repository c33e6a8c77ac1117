"""Replication: this node's newest snapshots go to its buddy, others' copies are kept here, and come
back.

Transfers run one at a time and at a bounded rate, so that training does not slow down. All nodes
agree which snapshots are sent and kept (`core/snapshots/replication.py`). A slot is sent as it lies
there. If training overwrites slots that are still needed, they are copied first, and the copies
kept.

`UnsentSave` is one snapshot on its way to the buddy: from its slot, or copied first, in a thread.

`OwnCopies` keeps copies of this node's own snapshots, to which all nodes may have to return when
one is lost. It keeps at most two states of a rank per attempt. States of an older attempt stay
until all nodes hold a state of a newer one.
"""

from __future__ import annotations

import asyncio
import collections
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

from unbroken.agent.snapshots.slots import MEDIAN_OF, SlotFile, SnapshotSlots, middle, row
from unbroken.agent_http.peer import AnswerHead, PeerConnection, connected
from unbroken.agent_http.snapshots import KEEP_HEADER, Key, Point, RequestRefused
from unbroken.agent_http.snapshots import CopySink as TakesBytes
from unbroken.core.snapshots.replication import KEPT, Arrival, Item, NextRound, Rounds
from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.foreign_numbers import whole_number
from unbroken.log_lines import Log
from unbroken.wire.agent import StartCommand
from unbroken.wire.proof import DIGEST_HEADER, snapshot_digest
from unbroken.wire.snapshot import HEADERS_BYTES, digest, job_of, read

from .copies import (
    CROWDED_SECONDS,
    Agreements,
    BuddyCopies,
    Fetch,
    HolderOffer,
    StrangerError,
    ask,
    path,
)
from .slots import MemoryFile, SnapshotMemory

BURST_SECONDS = 0.25
"""Seconds over which a late transfer may catch up."""
SLICE_BYTES = 1 << 20
COPY_BYTES = 16 * 1024 * 1024


class OvertakenError(Exception):
    """Training has begun to overwrite the snapshot that is being sent, or it is no longer
    needed."""


@dataclass(eq=False)
class SavedSlot:
    """A save, as long as it lies in its slot; `close` when it is no longer needed."""

    item: Item
    file: FileIO
    size: int
    headers: bytes
    """Its headers when it was whole."""

    @property
    def is_intact(self) -> bool:
        """True if it is still that snapshot."""
        return os.pread(self.file.fileno(), HEADERS_BYTES, 0) == self.headers

    def part(self) -> UnsentSave:
        """Return the part to be sent."""
        return UnsentSave(self.item, FileIO(os.dup(self.file.fileno())), self.size, self.headers)

    def close(self) -> None:
        """Release the slot."""
        self.file.close()


@dataclass(eq=False)
class UnsentSave(SavedSlot):
    """A save that waits to be sent."""

    copy: MemoryFile | None = None
    copying: asyncio.Future[bool] | None = None
    is_held: bool = False
    """The copy is kept by another owner."""

    def begin_copy(self, copy: MemoryFile) -> None:
        """Start a copy, made by the kernel."""
        self.copy = copy
        ends = os.dup(self.file.fileno()), os.dup(copy.fd)
        loop = asyncio.get_running_loop()
        self.copying = loop.run_in_executor(None, _copied, *ends, self.size, self.headers)

    async def send(self, peer: PeerConnection, rate: int, is_wanted: Callable[[], bool]) -> None:
        """Send all of it, at this number of bytes a second. Raises OvertakenError."""
        loop = asyncio.get_running_loop()
        slice_bytes = max(64 * 1024, min(SLICE_BYTES, rate // 16))
        begin, due = 0, loop.time()
        source = self.file.fileno() if self.copy is None else self.copy.fd
        with FileIO(os.dup(source)) as file:
            while begin < self.size:
                if not is_wanted() or (self.copy is None and not self.is_intact):
                    raise OvertakenError
                count = min(slice_bytes, self.size - begin)
                await peer.send(file, begin, count)
                begin += count
                due = max(due, loop.time() - BURST_SECONDS) + count / rate
                await asyncio.sleep(max(0.0, due - loop.time()))  # noqa: TID251  (the bounded rate)


def _copied(source: int, target: int, size: int, headers: bytes) -> bool:
    """Copy a slot, in a thread, and close both; return False if it was overwritten meanwhile."""
    try:
        os.lseek(target, 0, os.SEEK_SET)
        begin = 0
        while begin < size:
            if os.pread(source, HEADERS_BYTES, 0) != headers:
                return False
            begin += os.sendfile(target, source, begin, min(COPY_BYTES, size - begin))
        return os.pread(source, HEADERS_BYTES, 0) == headers
    finally:
        os.close(source)
        os.close(target)


OLDER_MAX = 3
"""Number of older attempts whose copies are kept for each rank."""
SPARE_MAX = 16


class OwnCopies:
    """Copies that one agent holds; `close` when it ends."""

    def __init__(self, snapshots: SnapshotSlots) -> None:
        self._snapshots = snapshots
        self._kept: dict[Key, dict[Point, MemoryFile]] = {}
        self._spare: list[MemoryFile] = []
        """Memory to be used again."""

    @property
    def _memory(self) -> SnapshotMemory:
        return self._snapshots.memory

    def take(self, size: int) -> MemoryFile:
        """Return memory for a copy. Raises WorldError if there is none."""
        for file in self._spare:
            if file.size == size:
                self._spare.remove(file)
                return file
        return self._memory.take_copy("unbroken-held", size)

    def release(self, file: MemoryFile) -> None:
        """Release memory that is not needed now, and that nothing writes into."""
        if len(self._spare) < SPARE_MAX:
            self._spare.append(file)
        else:
            self._memory.give_back(file)

    def discard(self, file: MemoryFile) -> None:
        """Release memory that is not needed, and that may still be written into."""
        self._memory.give_back(file)

    def keep(self, key: Key, point: Point, file: MemoryFile) -> None:
        """Keep a copy: it is a whole state."""
        self._kept.setdefault(key, {})[point] = file

    def keep_slot(self, key: Key, point: Point, fd: int, size: int) -> None:
        """Keep a slot of an ended attempt as a copy: the same memory for longer."""
        if point not in self._kept.get(key, {}):
            self.keep(key, point, self._memory.share(MemoryFile(fd, size)))

    def trim(self, name: str, attempt: int, needed: Collection[int], *, is_agreed: bool) -> None:
        """Release all but these copies of this attempt; `is_agreed`: of older ones too."""
        for key, kept in self._kept.items():
            useless = [point for point in kept if key[0] == name and (
                point[1] not in needed if point[0] == attempt else is_agreed
            )]  # fmt: skip
            for point in useless:
                file = kept.pop(point)
                # A slot of an older attempt may have a writer that woke up late.
                (self.release if point[0] == attempt else self.discard)(file)

    def begin(self) -> None:
        """Begin a newer attempt: all present copies may be restored."""
        while self._spare:
            self._memory.give_back(self._spare.pop())
        for key, kept in self._kept.items():
            for point in sorted(kept)[:-OLDER_MAX]:
                self._memory.give_back(kept.pop(point))
            for point, file in kept.items():
                self._snapshots.add(key, point, self._memory.share(file), None)

    def close(self) -> None:
        """Release all memory."""
        for file in [*self._spare, *(one for kept in self._kept.values() for one in kept.values())]:
            self._memory.give_back(file)
        self._spare.clear()
        self._kept.clear()


log = Log(__name__)

VARIABLE = "UNBROKEN_REPLICATE_BYTES_PER_SECOND"
"""Environment variable for the rate in bytes per second; 0: nothing is sent."""
BYTES_PER_SECOND = 256 * 1024 * 1024
"""Default rate: a fifth of a link of 10 Gbit/s, a fiftieth of one of 100.

Receiving at this rate takes about a quarter of a core of the buddy's agent.
"""
CHECK_SECONDS = 60.0
"""Seconds for the buddy to compute the checksum of what it has received."""
PAUSE_SECONDS = 3.0
"""Seconds without a save after which training is not waited for."""
RETRY_SECONDS = 1.0
"""Seconds until node rank 0's agent is asked again after a failure."""
Run = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Replication:
    """Replication of one agent; `begin` with each attempt, `close` when it ends."""

    def __init__(self, snapshots: SnapshotSlots, key: bytes | None, run: Run) -> None:
        job = job_of(os.environ)
        self._snapshots, self._key, self._run = snapshots, key, run
        self._job = digest(job) if job else None
        self.copies = BuddyCopies(snapshots.memory, self._job, lambda: snapshots.newest)
        self._held = OwnCopies(snapshots)
        self._rate = _rate(os.environ.get(VARIABLE, ""))
        self._rounds = Rounds()
        self._agreements = Agreements(1)
        self._is_alone = False
        """Nodes cannot agree: each decides on its own."""
        self._asking: dict[str, tuple[Arrival, asyncio.Task[None]]] = {}
        self._pauses: dict[str, asyncio.TimerHandle] = {}
        self._command: StartCommand | None = None
        self._saves: dict[Key, list[SavedSlot]] = {}
        """The newest two saves of each rank, which lie in its slots."""
        self._queue: collections.deque[UnsentSave] = collections.deque()
        self._sending: asyncio.Task[None] | None = None
        self._sent: dict[Key, Point] = {}
        """Newest point of each rank at the buddy."""
        self._rates: collections.deque[float] = collections.deque(maxlen=MEDIAN_OF)
        """Bytes per second of the last transfers."""
        self._why = ""
        """Why the last transfer failed; logged once."""
        snapshots.on_saved = self._saved

    def begin(self, command: StartCommand) -> None:
        """Begin an attempt: snapshots of older ones are not sent any more."""
        self._stop_sending()
        self._held.begin()
        self._command, self._rounds, self._why = command, Rounds(), ""
        self._agreements, self._is_alone = Agreements(command.nnodes), False
        self._sent.clear()

    def close(self) -> None:
        """Release all memory."""
        self._stop_sending()
        self._held.close()
        self.copies.close()

    # Requests of others over HTTP.

    def receive(
        self, key: Key, point: Point, size: int, needed: Collection[int] | None
    ) -> TakesBytes | None:
        """Begin to receive a copy; None: it is here already. Raises Refused."""
        return self.copies.receive(key, point, size, needed)

    def sizes(self, key: Key) -> dict[Point, int]:
        """Return the sizes of the copies of a rank."""
        return self.copies.sizes(key)

    def descriptor(self, key: Key, point: Point) -> int | None:
        """Return a descriptor of the memory that holds it; a new one, to be closed by the
        caller."""
        return self.copies.descriptor(key, point)

    async def agree(self, name: str, attempt: int, node: int, told: Arrival) -> NextRound | None:
        """Take what a node holds; return the next round of all nodes, None: not known yet. Raises
        Refused."""
        command = self._command
        if command is not None and command.rank != 0:
            raise RequestRefused(421, f"this is node rank {command.rank}, not 0")
        if command is None or command.attempt != attempt:
            raise RequestRefused(409, f"attempt {attempt} does not run here")
        return await self._agreements.arrive(name, node, told)

    def node(self) -> int | None:
        """Return this agent's node rank."""
        return None if self._command is None else self._command.rank

    def bytes_per_second(self) -> float | None:
        """Return the rate at which snapshots reach the buddy; None: none did."""
        return middle(self._rates)

    def buddy_step(self, key: Key) -> int | None:
        """Return the newest step of the running attempt that the buddy has; None: none."""
        point = self._sent.get(key)
        return None if point is None else point[1]

    def common_step(self, name: str) -> int | None:
        """Return the newest step that all nodes hold; None: there is none."""
        return self._rounds.common(name)

    def summary(self) -> dict[str, Any]:
        """Return the progress of replication, for people."""
        return {
            "buddy": "" if self._command is None else self._command.buddy,
            "sent": [_row(key, [point]) for key, point in sorted(self._sent.items())],
            "held": [_row(key, points) for key, points in sorted(self.copies.held().items())],
            "common": {name: self._rounds.common(name) for name, _ in sorted(self._saves)},
            "reason": self._why,
        }

    # Sending to the buddy.

    def _saved(self, key: Key, slot: SlotFile, step: int) -> None:
        """Note that a rank has a whole snapshot."""
        command = self._command
        if command is None or not command.buddy or not self._rate:
            return
        headers = os.pread(slot.file.fd, HEADERS_BYTES, 0)
        header = read(headers, slot.file.size)
        if header is None or header.step != step or header.table_checksum is None:
            return
        item = Item(*key, step)
        saves = self._saves.setdefault(key, [])
        saves.append(SavedSlot(item, FileIO(os.dup(slot.file.fd)), slot.file.size, headers))
        while len(saves) > KEPT:
            saves.pop(0).close()
        self._rounds.nproc = max(1, header.world_size // command.nnodes)
        if self._rounds.saved(item):
            self._enqueue(item)
        self._go_on(item.name)

    def _go_on(self, name: str) -> None:
        """Send a new report after a change, if there is any."""
        loop = asyncio.get_running_loop()
        if name in self._pauses:
            self._pauses.pop(name).cancel()
        if self._rounds.is_expecting(name):
            self._pauses[name] = loop.call_later(PAUSE_SECONDS, self._pause, name)
        command, arrival = self._command, self._rounds.arrival(name)
        if command is None or arrival is None:
            return
        if name in self._asking:
            told, task = self._asking[name]
            if not self._rounds.is_stale(name, told):
                return
            task.cancel()
        self._asking[name] = arrival, self._run(self._ask(name, arrival, command))

    def _pause(self, name: str) -> None:
        self._rounds.paused(name)
        self._go_on(name)

    async def _ask(self, name: str, arrival: Arrival, command: StartCommand) -> None:
        decision, clock = None, asyncio.get_running_loop().time
        while decision is None:
            asked_at = clock()
            try:
                decision = await self._arrival(name, arrival, command)
                if decision is None and clock() < asked_at + RETRY_SECONDS:
                    await asyncio.sleep(CROWDED_SECONDS)  # noqa: TID251  (others wait there)
            except StrangerError as error:
                self._complain(str(error))
                self._agreements, self._is_alone = Agreements(1), True
            except (OSError, TimeoutError, PeerError) as error:
                self._complain(f"node rank 0: {str(error) or 'does not answer in time'}")
                await asyncio.sleep(RETRY_SECONDS)  # noqa: TID251  (who cannot be asked now)
            except Exception:
                # A defect with one answer must not end the questions.
                log.exception("node rank 0 not asked", snapshot=name)
                await asyncio.sleep(RETRY_SECONDS)  # noqa: TID251  (who cannot be asked now)
        del self._asking[name]
        begun = self._rounds.decided(name, decision)
        self._let_go(name, command.attempt, is_agreed=decision.common is not None)
        for item in begun:
            self._enqueue(item)
        self._go_on(name)

    async def _arrival(
        self, name: str, arrival: Arrival, command: StartCommand
    ) -> NextRound | None:
        if command.rank == 0 or self._is_alone:
            return await self._agreements.arrive(name, command.rank, arrival)
        return await ask(command, self._key, name, arrival)

    def _let_go(self, name: str, attempt: int, *, is_agreed: bool) -> None:
        """Release the memory of snapshots that are not needed any more."""
        self._held.trim(name, attempt, self._rounds.needs(name), is_agreed=is_agreed)
        if is_agreed:
            # Including those of ranks that have another buddy now.
            self.copies.forget(lambda key, point: key[0] == name and point[0] < attempt)

    def _enqueue(self, item: Item) -> None:
        """Send it next."""
        saves = [save for save in self._saves[item[:2]] if save.item == item]
        if not saves or not saves[0].is_intact or self._command is None:
            self._rounds.overtaken(item)
            return
        part = saves[0].part()
        # Without memory for a copy, the parts that training leaves intact are sent.
        try:
            part.begin_copy(self._held.take(part.size))
        except WorldError as error:
            self._complain(str(error))
        self._queue.append(part)
        if self._sending is None or self._sending.done():
            self._sending = self._run(self._send_all(self._command))

    async def _send_all(self, command: StartCommand) -> None:
        while self._queue:
            part = self._queue[0]
            try:
                if self._rounds.wants(part.item):
                    await self._send(part, command)
            finally:
                # After a cancellation, the whole queue has been released already.
                if self._queue and self._queue[0] is part:
                    self._end(self._queue.popleft())
            self._go_on(part.item.name)

    async def _send(self, part: UnsentSave, command: StartCommand) -> None:
        name, rank, step = item = part.item
        try:
            await self._copied(part, command.attempt)
            if not self._rounds.tries(name):
                self._rounds.failed(item)
                return
            async with connected(command.buddy, self._key) as peer:
                head = await self._put(peer, part, path((name, rank), (command.attempt, step)))
                if head.status == 422 and part.copy is None and not part.is_intact:
                    raise OvertakenError
                if head.status != 200:
                    text = (await peer.text(head)).decode(errors="replace")[:300]
                    raise PeerError(f"it answers {head.status} {text}")
        except OvertakenError:
            log.debug(
                "snapshot superseded before it was copied", snapshot=name, rank=rank, step=step
            )
            self._rounds.overtaken(item)
        except (OSError, TimeoutError, UnbrokenError) as error:
            self._complain(f"{command.buddy}: {str(error) or 'does not answer in time'}")
            self._rounds.failed(item)
        except Exception:
            # A defect with one answer must not stop the sending of later snapshots.
            log.exception("snapshot not copied", agent=command.buddy, snapshot=name, rank=rank)
            self._rounds.failed(item)
        else:
            self._why = ""
            self._sent[name, rank] = (command.attempt, step)
            self._rounds.sent(item)
            log.debug("snapshot copied", snapshot=name, rank=rank, step=step, agent=command.buddy)

    async def _copied(self, part: UnsentSave, attempt: int) -> None:
        """Copy all ranks' snapshots of a round, or send none: a round needs all. Raises
        OvertakenError."""
        for one in [one for one in self._queue if one.item[::2] == part.item[::2]]:
            if one.copying is None or one.copy is None or one.is_held:
                continue
            if not await one.copying:
                raise OvertakenError
            if self._rounds.wants(one.item):
                one.is_held = True
                self._held.keep(one.item[:2], (attempt, one.item.step), one.copy)

    async def _put(self, peer: PeerConnection, part: UnsentSave, where: str) -> AnswerHead:
        common = self._rounds.common(part.item.name)
        keep = "none" if common is None else str(common)
        asks = {"Content-Length": str(part.size), "Expect": "100-continue", KEEP_HEADER: keep}
        asks[DIGEST_HEADER] = snapshot_digest(part.headers, part.size)
        await peer.ask("PUT", where, asks)
        head = await peer.head()
        if head.status != 100:
            return head
        clock = asyncio.get_running_loop().time
        began = clock()
        await part.send(peer, self._rate, lambda: self._rounds.wants(part.item))
        answer = await peer.head(CHECK_SECONDS)
        self._rates.append(part.size / max(clock() - began, 1e-6))
        return answer

    def _end(self, part: UnsentSave) -> None:
        part.close()
        if part.copy is None or part.is_held:
            return
        if part.copying is not None and part.copying.done() and not part.copying.cancelled():
            self._held.release(part.copy)
        else:
            # The thread still writes into it, by a descriptor of its own.
            self._held.discard(part.copy)

    def _stop_sending(self) -> None:
        """Stop sending, and keep the states to which all nodes may return."""
        for task in (self._sending, *(task for _, task in self._asking.values())):
            if task is not None:
                task.cancel()
        for timer in self._pauses.values():
            timer.cancel()
        self._agreements.close()
        self._sending = None
        self._asking.clear()
        self._pauses.clear()
        while self._queue:
            self._end(self._queue.popleft())
        for key, saves in self._saves.items():
            for save in saves:
                if (
                    self._command
                    and save.item.step in self._rounds.needs(key[0])
                    and save.is_intact
                ):
                    point = self._command.attempt, save.item.step
                    self._held.keep_slot(key, point, save.file.fileno(), save.size)
                save.close()
        self._saves.clear()

    def _complain(self, why: str) -> None:
        if why != self._why:
            self._why = why
            log.warning("snapshots not copied", error=why)

    # Fetching from holders of copies.

    def used(self, key: Key) -> None:
        """Note that the rank lives here now, and has restored what it needs."""
        self.copies.forget(lambda own, point: own == key and point[0] < self._snapshots.newest)

    async def fetch(self, key: Key, wanted: Point | None, is_list: bool) -> dict[str, Any]:
        """Bring a rank's snapshots to this agent's memory; for a list, only name those available.

        The result goes into the answer.
        """
        own = [size for size in self.copies.sizes(key) if wanted in (None, size)]
        if not is_list:
            for point in own:
                self._share(key, point)
        here = {*self._snapshots.points(key), *own}
        command, memory = self._command, self._snapshots.memory
        if command is None or (wanted is not None and wanted in here):
            return {}
        work = Fetch(key, command.holders, self._key, self._job, memory)
        offers = _by_point(offer for offer in await work.offers() if offer.point not in here)
        if is_list:
            told = [(point, self._snapshots.node(key, point)) for point in sorted(here)]
            told += [(point, rows[0].node) for point, rows in offers.items()]
            steps = [{"attempt": attempt, "step": step} for (attempt, step), _ in told]
            return _found(work) | {"steps": steps, "from": [node for _, node in told]}
        asked = [point for point in offers if wanted in (None, point)]
        for point in asked[:KEPT]:
            brought = await work.bring(offers[point])
            if brought is not None:
                self._snapshots.add(key, point, brought[0], brought[1].node)
        return _found(work)

    def offer(self, message: Mapping[str, Any]) -> None:
        """Add a copy that a worker names to this agent's own; the answering code refuses invalid
        names."""
        numbers = [message.get(key) for key in ("rank", "from_attempt", "step")]
        rank, *point = [number for number in numbers if isinstance(number, int)] or [0]
        if len(point) == 2:
            self._share((str(message.get("name")), rank), (point[0], point[1]))

    def everyone(self, name: str) -> list[dict[str, int]]:
        """Return all copies of a name, as they are listed for workers."""
        return [row(header) for header in self.copies.headers(name)]

    def _share(self, key: Key, point: Point) -> None:
        file = self.copies.shared(key, point)
        if file is not None:
            self._snapshots.add(key, point, file, None)


def _by_point(offers: Iterable[HolderOffer]) -> Mapping[Point, list[HolderOffer]]:
    result: dict[Point, list[HolderOffer]] = {}
    for offer in offers:
        result.setdefault(offer.point, []).append(offer)
    return dict(sorted(result.items(), reverse=True))


def _found(work: Fetch) -> dict[str, Any]:
    return {"problems": work.problems} if work.problems else {}


def _row(key: Key, points: Iterable[Point]) -> dict[str, Any]:
    steps = [{"attempt": attempt, "step": step} for attempt, step in points]
    return {"name": key[0], "rank": key[1], "steps": steps}


def _rate(text: str) -> int:
    rate = whole_number(text)
    return BYTES_PER_SECOND if rate is None else rate
