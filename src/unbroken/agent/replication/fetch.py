"""Fetching of snapshots from holders of copies, for a rank that has lost its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from unbroken.agent.snapshots.memory import File, Memory
from unbroken.agent_http.peer import connected
from unbroken.agent_http.snapshots import Key, Point
from unbroken.errors import PeerError, UnbrokenError
from unbroken.log_lines import Log
from unbroken.wire.codec import Limits, load, read

from .copies import Subject, check
from .peer import path

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
