"""Requests to other agents about snapshots: which to send to buddies, and copies that come back.

All nodes agree on the snapshots to send at the agent of node rank 0, over HTTP. A caller waits
there until there is a decision (`core/snapshots/replication.py`).

`Fetch` gets snapshots from holders of copies, for a rank that has lost its memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated
from urllib.parse import quote

from unbroken.agent.snapshots.memory import File, Memory
from unbroken.agent_http.peer import SILENCE_SECONDS, connected
from unbroken.agent_http.snapshots import PATH, Key, Point, Refused
from unbroken.core.snapshots.replication import Agreement, Arrival, NextRound
from unbroken.errors import PeerError, UnbrokenError
from unbroken.log_lines import Log
from unbroken.wire.agent import StartCommand
from unbroken.wire.codec import Limits, load, read

from .copies import Subject, check


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
class _Row:
    agreement: Agreement
    announced: int = 0
    next: asyncio.Future[NextRound] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Agreements:
    """The agreements on all names of one attempt; call `close` when it is over."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._rows: dict[str, _Row] = {}
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

    def _begin(self, name: str) -> _Row:
        if len(self._rows) >= NAMES_MAX:
            raise Refused(507, f"snapshots of {NAMES_MAX} names are agreed upon already")
        row = self._rows[name] = _Row(Agreement(self._nodes))
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(GATHER_SECONDS, self._gathered, row))
        return row

    def _gathered(self, row: _Row) -> None:
        decision = row.agreement.gathered()
        if decision is not None:
            self._announce(row, decision)

    def _announce(self, row: _Row, decision: NextRound) -> None:
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
    return read(NextRound, load(text), "the answer")


log = Log(__name__)

LIST_SECONDS = 2.0
"""Seconds for a holder to list its copies."""
LISTED_MAX = 64


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot in the list of an agent."""

    attempt: int
    step: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HeldList:
    """The snapshots of a rank that an agent holds."""

    node: int | None
    """Node rank of the agent; None: it has not been started."""
    snapshots: Annotated[tuple[Held, ...], Limits(LISTED_MAX)]


@dataclass(frozen=True)
class Offer:
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
    memory: Memory
    problems: list[str] = field(default_factory=list)
    """Problems, with the holder of each."""

    async def offers(self) -> list[Offer]:
        """Return the offers of all holders, the likeliest first; a holder that does not answer has
        none."""
        answers = await asyncio.gather(*(self._listed(address) for address in self.holders))
        return [offer for offers in answers for offer in offers]

    async def bring(self, offers: Sequence[Offer]) -> tuple[File, Offer] | None:
        """Return the same snapshot from the first holder that sends it; None: none does."""
        for offer in offers:
            try:
                return await self._brought(offer), offer
            except (OSError, TimeoutError, UnbrokenError) as error:
                self._complain(offer.address, error)
        return None

    async def _listed(self, address: str) -> list[Offer]:
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

    async def _brought(self, offer: Offer) -> File:
        file = self.memory.take(f"unbroken-fetched-{self.key[1]}", offer.size)
        try:
            async with connected(offer.address, self.secret) as peer:
                await peer.ask("GET", path(self.key, offer.point))
                head = await peer.head()
                if head.status != 200 or head.length != offer.size:
                    raise PeerError(f"it answers {head.status}, with another size than it said")
                await peer.receive(head, file.fd)
            await check(file, Subject(self.key, offer.point, self.job))
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


def _offers(address: str, body: bytes) -> list[Offer]:
    """Return the offers in an answer. Raises PeerError if it is no list of snapshots."""
    held_list = read(HeldList, load(body), "the answer")
    node = address if held_list.node is None else held_list.node
    return [
        Offer(address, node, (snapshot.attempt, snapshot.step), snapshot.bytes)
        for snapshot in held_list.snapshots
    ]
