"""This node's newest snapshots go to its buddy, others' copies are kept here, and come back.

One transfer at a time and at a bounded rate, so that training does not feel it.  What is sent is
decided by `core/replication.py`.  A slot is sent as it lies there; where training overwrites slots
before they are sent, they are copied first, by the kernel and in a thread.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

from unbroken.agent_http.snapshots import PERIOD_HEADER, Key, Point
from unbroken.agent_http.snapshots import Incoming as TakesBytes
from unbroken.core.replication import KEPT, Item, Rounds
from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.wire.agent import StartCommand
from unbroken.wire.snapshot import HEADERS_BYTES, digest, read

from .memory import File
from .replication_copies import Copies
from .replication_fetch import Fetch, Offer
from .replication_peer import Head, Peer, connected, path
from .snapshots import Slot, Snapshots, row

logger = logging.getLogger(__name__)

VARIABLE = "UNBROKEN_REPLICATE_BYTES_PER_SECOND"
"""0: nothing is sent."""
BYTES_PER_SECOND = 256 * 1024 * 1024
"""A fifth of a link of 10 Gbit/s, a fiftieth of one of 100; receiving it takes about a quarter of a
core of the buddy's agent."""
BURST_SECONDS = 0.25
"""What was not sent in time is made up for so long."""
SLICE_BYTES = 1 << 20
CHECK_SECONDS = 60.0
"""For the buddy to sum what it has received."""
COPY_BYTES = 16 * 1024 * 1024
Run = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class _Overtaken(Exception):
    """Training has begun to overwrite what is being sent."""


@dataclass(eq=False)
class _Part:
    """A snapshot that waits to be sent."""

    item: Item
    file: FileIO
    size: int
    headers: bytes
    """As they were when it was whole."""
    copy: File | None = None
    copying: asyncio.Future[bool] | None = None

    @property
    def is_intact(self) -> bool:
        """Whether it is still that snapshot."""
        return os.pread(self.file.fileno(), HEADERS_BYTES, 0) == self.headers


class Replication:
    """Of one agent; `begin` with each attempt, `close` when it ends."""

    def __init__(self, snapshots: Snapshots, token: str | None, run: Run) -> None:
        job = os.environ.get("UNBROKEN_JOB", "")
        self._snapshots, self._token, self._run = snapshots, token, run
        self._job = digest(job) if job else None
        self.copies = Copies(snapshots.memory, self._job, lambda: snapshots.newest)
        self._rate = _rate(os.environ.get(VARIABLE, ""))
        self._rounds = Rounds()
        self._command: StartCommand | None = None
        self._queue: collections.deque[_Part] = collections.deque()
        self._sending: asyncio.Task[None] | None = None
        self._spare: list[File] = []
        """Memory for copies, to be used again."""
        self._sent: dict[Key, Point] = {}
        """Newest at the buddy."""
        self._why = ""
        """Why the last transfer failed; logged once."""
        snapshots.on_saved = self._saved

    def begin(self, command: StartCommand) -> None:
        """An attempt starts: what is left of older ones is not sent any more."""
        self._stop_sending()
        self._command, self._rounds, self._why = command, Rounds(), ""
        self._sent.clear()

    def close(self) -> None:
        """Give all memory back."""
        self._stop_sending()
        self.copies.close()

    # What others ask for over HTTP.

    def receive(self, key: Key, point: Point, size: int) -> TakesBytes | None:
        """Begin to take a copy; None: it is here already.  Refused."""
        return self.copies.receive(key, point, size)

    def sizes(self, key: Key) -> dict[Point, int]:
        """What there is of a rank."""
        return self.copies.sizes(key)

    def descriptor(self, key: Key, point: Point) -> int | None:
        """Of the memory that holds it; a new one, to be closed."""
        return self.copies.descriptor(key, point)

    def exchange(self, name: str, period: int) -> int:
        """Hear another node's period; this node's."""
        self._rounds.told(name, period)
        return self._rounds.period(name)

    def node(self) -> int | None:
        """This agent's node rank."""
        return None if self._command is None else self._command.rank

    def summary(self) -> dict[str, Any]:
        """How far replication is, for people."""
        return {
            "buddy": "" if self._command is None else self._command.buddy,
            "sent": [_row(key, [point]) for key, point in sorted(self._sent.items())],
            "held": [_row(key, points) for key, points in sorted(self.copies.held().items())],
            "reason": self._why,
        }

    # To the buddy.

    def _saved(self, key: Key, slot: Slot, step: int) -> None:
        """A rank has a whole snapshot."""
        if self._command is None or not self._command.buddy or not self._rate:
            return
        headers = os.pread(slot.file.fd, HEADERS_BYTES, 0)
        header = read(headers, slot.file.size)
        if header is None or header.step != step or header.table_checksum is None:
            return
        item = Item(*key, step)
        if not self._rounds.saved(item):
            return
        file = FileIO(os.dup(slot.file.fd))
        part = _Part(item, file, slot.file.size, headers)
        if self._rounds.copies_first:
            self._copy(part)
        self._queue.append(part)
        if self._sending is None or self._sending.done():
            self._sending = self._run(self._send_all(self._command))

    def _copy(self, part: _Part) -> None:
        """Begin to take a copy; where there is no memory, what training leaves is sent."""
        try:
            part.copy = self._taken(part.size)
        except WorldError as error:
            self._complain(str(error))
            return
        ends = os.dup(part.file.fileno()), os.dup(part.copy.fd)
        loop = asyncio.get_running_loop()
        part.copying = loop.run_in_executor(None, _copied, *ends, part.size, part.headers)

    def _taken(self, size: int) -> File:
        for file in self._spare:
            if file.size == size:
                self._spare.remove(file)
                return file
        return self._snapshots.memory.take("unbroken-outgoing", size)

    async def _send_all(self, command: StartCommand) -> None:
        while self._queue:
            part = self._queue.popleft()
            try:
                if self._rounds.wants(part.item):
                    await self._send(part, command)
            finally:
                self._let_go(part)

    async def _send(self, part: _Part, command: StartCommand) -> None:
        name, rank, step = item = part.item
        try:
            if not await self._is_copied(part):
                raise _Overtaken
            async with connected(command.buddy, self._token) as peer:
                head = await self._put(peer, part, path((name, rank), (command.attempt, step)))
                if head.status == 422 and part.copy is None and not part.is_intact:
                    raise _Overtaken
                if head.status != 200:
                    text = (await peer.text(head)).decode(errors="replace")[:300]
                    raise PeerError(f"it answers {head.status} {text}")
        except _Overtaken:
            logger.debug("snapshot=%s rank=%d step=%d overtaken", *item)
            self._rounds.overtaken(item)
        except (OSError, TimeoutError, UnbrokenError) as error:
            self._complain(f"{command.buddy}: {str(error) or 'does not answer in time'}")
            self._rounds.failed(item)
        else:
            self._arrived(item, command.attempt, head)

    async def _is_copied(self, part: _Part) -> bool:
        """All ranks' of a round, or none is sent: one that moves on alone has no step in common."""
        round_of = [one for one in self._queue if one.item[::2] == part.item[::2]]
        copies = [one.copying for one in (part, *round_of) if one.copying is not None]
        return all([await copying for copying in copies])

    async def _put(self, peer: Peer, part: _Part, where: str) -> Head:
        period = str(self._rounds.period(part.item.name))
        asks = {"Content-Length": str(part.size), "Expect": "100-continue", PERIOD_HEADER: period}
        await peer.ask("PUT", where, asks)
        head = await peer.head()
        if head.status != 100:
            return head
        await self._send_body(peer, part)
        return await peer.head(CHECK_SECONDS)

    async def _send_body(self, peer: Peer, part: _Part) -> None:
        loop = asyncio.get_running_loop()
        slice_bytes = max(64 * 1024, min(SLICE_BYTES, self._rate // 16))
        begin, due = 0, loop.time()
        source = part.file.fileno() if part.copy is None else part.copy.fd
        with FileIO(os.dup(source)) as file:
            while begin < part.size:
                if part.copy is None and not part.is_intact:
                    raise _Overtaken
                count = min(slice_bytes, part.size - begin)
                await peer.send(file, begin, count)
                begin += count
                due = max(due, loop.time() - BURST_SECONDS) + count / self._rate
                await asyncio.sleep(max(0.0, due - loop.time()))  # noqa: TID251  (the bounded rate)

    def _arrived(self, item: Item, attempt: int, head: Head) -> None:
        self._why = ""
        self._sent[item.name, item.rank] = (attempt, item.step)
        self._rounds.sent(item)
        told = head.headers.get(PERIOD_HEADER.lower(), "")
        if told.isdecimal() and len(told) < 10:
            self._rounds.told(item.name, int(told))
        if self._rounds.is_settled([item.name]):
            # Other nodes are at most one round behind, and what they have sent before is not
            # needed any more, by ranks that have another buddy now either.
            name = item.name
            self.copies.forget(lambda key, point: key[0] == name and point[0] < attempt)
        logger.debug("snapshot=%s rank=%d step=%d is at the buddy", *item)

    def _let_go(self, part: _Part) -> None:
        part.file.close()
        if part.copy is None:
            return
        if part.copying is not None and part.copying.done() and not part.copying.cancelled():
            self._spare.append(part.copy)
        else:
            # The thread still writes into it, by a descriptor of its own.
            self._snapshots.memory.give_back(part.copy)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        while self._queue:
            self._let_go(self._queue.popleft())
        while self._spare:
            self._snapshots.memory.give_back(self._spare.pop())

    def _complain(self, why: str) -> None:
        if why != self._why:
            self._why = why
            logger.warning("snapshots are not sent to the buddy reason=%r", why)

    # From who holds copies.

    def used(self, key: Key) -> None:
        """The rank lives here now, and has restored what it needs."""
        self.copies.forget(lambda own, point: own == key and point[0] < self._snapshots.newest)

    async def fetch(self, key: Key, wanted: Point | None, is_list: bool) -> dict[str, Any]:
        """Bring to this agent's memory what a rank may need; for a list, say only what could be.

        What is said goes into the answer."""
        own = [one for one in self.copies.sizes(key) if wanted in (None, one)]
        if not is_list:
            for point in own:
                self._share(key, point)
        here = {*self._snapshots.points(key), *own}
        command, memory = self._command, self._snapshots.memory
        if command is None or (wanted is not None and wanted in here):
            return {}
        work = Fetch(key, command.holders, self._token, self._job, memory)
        offers = _by_point(one for one in await work.offers() if one.point not in here)
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
        """Have a copy that a worker names be among this agent's own; what is no name is refused
        by who answers it."""
        numbers = [message.get(key) for key in ("rank", "from_attempt", "step")]
        rank, *point = [one for one in numbers if isinstance(one, int)] or [0]
        if len(point) == 2:
            self._share((str(message.get("name")), rank), (point[0], point[1]))

    def everyone(self, name: str) -> list[dict[str, int]]:
        """All copies of a name, as they are listed for workers."""
        return [row(header) for header in self.copies.headers(name)]

    def _share(self, key: Key, point: Point) -> None:
        file = self.copies.shared(key, point)
        if file is not None:
            self._snapshots.add(key, point, file, None)


def _by_point(offers: Iterable[Offer]) -> Mapping[Point, list[Offer]]:
    found: dict[Point, list[Offer]] = {}
    for offer in offers:
        found.setdefault(offer.point, []).append(offer)
    return dict(sorted(found.items(), reverse=True))


def _found(work: Fetch) -> dict[str, Any]:
    return {"problems": work.problems} if work.problems else {}


def _row(key: Key, points: Iterable[Point]) -> dict[str, Any]:
    steps = [{"attempt": attempt, "step": step} for attempt, step in points]
    return {"name": key[0], "rank": key[1], "steps": steps}


def _copied(source: int, target: int, size: int, headers: bytes) -> bool:
    """Copy a slot, in a thread, and close both; False: it was overwritten meanwhile."""
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


def _rate(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 18 else BYTES_PER_SECOND
