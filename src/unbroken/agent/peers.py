"""Questions to other agents: for the lease while no operator answers, and for modules that their
workers import.

From the start on it also checks whether the parent can be connected to at all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from unbroken.agent_http.peer import PeerConnection, connected
from unbroken.core.agent.machine import Workers
from unbroken.core.agent.peers import Vouching
from unbroken.errors import PeerError
from unbroken.log_lines import Log
from unbroken.wire.agent import (
    ANSWER_BYTES_MAX,
    IMPORTS_PATH,
    LEASE_PATH,
    PeerAnswer,
    PeerQuestion,
    StartCommand,
)
from unbroken.wire.agent_codec import decode_imports
from unbroken.wire.codec import FRAME_BYTES_MAX, dump, load, read, write

log = Log(__name__)

ASK_SECONDS = 0.5
ALONE_SECONDS = 2.0
"""Seconds without a message of an operator after which peers are asked; also while children ask."""
ALONE_SHARE = 1.5
"""The same as a share of the time between two messages: an operator of more than 8000 agents takes
longer than 2 s for each."""
ANSWER_SECONDS = 2.0
CHECK_SECONDS, DOUBT_SECONDS = 2.0, 1.0
"""Seconds between connections that only show that the parent can be reached. After one that failed:
seconds from its beginning to the next one, at least."""


async def _is_unreached(address: str) -> bool:
    """Return whether the agent cannot be connected to, within 2 s."""
    try:
        async with connected(address, None):
            return False
    except (OSError, TimeoutError, PeerError):
        return True


class PeerQuestions:
    """Asks for one attempt after the other."""

    def __init__(
        self,
        machine: Workers,
        key: bytes | None,
        now: Callable[[], float],
        vouched: Callable[[int, float], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        restate: Callable[[], None],
    ) -> None:
        self._machine, self._key = machine, key
        self._now, self._vouched = now, vouched
        self._start, self._restate = start, restate
        self._tree: Vouching | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.unreached = ""
        """The parent's address, after two connections to it in a row have failed."""
        self._renewed_at = self._asked_at = -math.inf
        """Times of the last message of an operator, and of a child."""
        self._usual_seconds = 0.0
        """Time between the last two messages of an operator."""
        self._lease_seconds = 0.0

    def begin(self, command: StartCommand) -> None:
        """Begin with the attempt of a start, if its workers hold a lease."""
        self.close()
        self._lease_seconds = command.lease_seconds
        if command.lease_seconds and (command.parent or command.rank == 0):
            self._tree = Vouching(
                self._machine.settings.agent_id, command.attempt, command.rank, command.nnodes
            )
            self._tasks = [self._start(self._run(self._tree, command.parent))]
            if command.parent:
                self._tasks.append(self._start(self._check(command.parent)))

    def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        self._tree, self._tasks, self.unreached = None, [], ""

    def renewed(self, now: float) -> None:
        """Note that an operator answered."""
        self._usual_seconds = now - self._renewed_at if self._renewed_at > -math.inf else 0.0
        self._renewed_at = now

    def answer_child(self, question: PeerQuestion) -> PeerAnswer | None:
        """Return the answer to a child; None: it is of another attempt."""
        tree, now = self._tree, self._now()
        self._asked_at = now
        if tree is None or not tree.asked(question, now):
            return None
        return tree.answer_child(question, vouches=self._vouch(tree), now=now)

    async def _run(self, tree: Vouching, parent: str) -> None:
        while True:
            await asyncio.sleep(ASK_SECONDS)  # noqa: TID251  (the rate of the questions)
            if not self._asks():
                continue
            try:
                if parent:
                    async with connected(parent, self._key) as peer:
                        await self._ask(tree, peer)
                else:
                    self._report(tree)
            except (OSError, TimeoutError, PeerError) as error:
                log.info("peer does not answer", agent=parent, error=error)
            except Exception:
                # A defect with one answer must not end the questions.
                log.exception("peer not asked", agent=parent)

    async def _check(self, parent: str) -> None:
        """Check at intervals whether the parent can be connected to."""
        failed = 0
        while True:
            begun_at = self._now()
            failed = failed + 1 if await _is_unreached(parent) else 0
            away = parent if failed > 1 else ""
            if away != self.unreached:
                self.unreached = away
                log.info("peer is unreachable" if away else "peer is reachable", agent=parent)
                self._restate()
            # A connection without an answer has taken longer; one that is refused takes no time.
            doubt = begun_at + DOUBT_SECONDS - self._now()
            seconds = max(doubt, 0.0) if failed else CHECK_SECONDS
            await asyncio.sleep(seconds)  # noqa: TID251  (the rate of the checks)

    async def _ask(self, tree: Vouching, peer: PeerConnection) -> None:
        """Ask over one connection for as long as that is useful."""
        while self._asks():
            asked_at = self._now()
            question = tree.question(
                vouches=self._vouch(tree),
                is_urgent=self._machine.lease.is_urgent(asked_at),
                now=asked_at,
            )
            body = dump(write(question)).encode()
            async with asyncio.timeout(ANSWER_SECONDS):
                status, text = await peer.post(LEASE_PATH, body, ANSWER_BYTES_MAX)
            if status != 200:
                raise PeerError(f"HTTP {status}")
            tree.answered(read(PeerAnswer, load(text), "answer"), asked_at)
            self._report(tree)
            await asyncio.sleep(ASK_SECONDS)  # noqa: TID251  (the rate of the questions)

    def _report(self, tree: Vouching) -> None:
        at = tree.all_at(vouches=self._vouch(tree), now=self._now())
        if at > -math.inf:
            self._vouched(tree.attempt, at)

    def _vouch(self, tree: Vouching) -> bool:
        """Return whether this agent vouches for the attempt now."""
        is_needed = tree.is_needed(is_alone=self._is_alone(), now=self._now())
        return is_needed and self._machine.vouch(tree.attempt)

    def _asks(self) -> bool:
        return self._is_alone() or self._now() < self._asked_at + ALONE_SECONDS

    def _is_alone(self) -> bool:
        usual = min(ALONE_SHARE * self._usual_seconds, self._lease_seconds / 2)
        return self._now() > self._renewed_at + max(ALONE_SECONDS, usual)


FETCH_SECONDS = 5.0
"""Timeout of the request to one agent."""


async def fetch(addresses: Sequence[str], key: bytes | None) -> tuple[str, ...]:
    """Return the list of the first agent that has one; empty: none has."""
    for address in addresses:
        try:
            names = await _ask(address, key)
        except (OSError, TimeoutError, ValueError, PeerError) as error:
            reason = str(error) or f"no answer in {FETCH_SECONDS:g} s"
            log.info("imports of a peer are unknown", agent=address, error=reason)
            continue
        if names:
            return names
    return ()


async def _ask(address: str, key: bytes | None) -> tuple[str, ...]:
    async with asyncio.timeout(FETCH_SECONDS), connected(address, key) as peer:
        await peer.ask("GET", IMPORTS_PATH)
        head = await peer.head()
        if head.status != 200:
            raise PeerError(f"HTTP {head.status}")
        return decode_imports(await peer.text(head, FRAME_BYTES_MAX))
