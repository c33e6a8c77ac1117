"""Agreement of all nodes on the snapshots to send to buddies: at the agent of node rank 0, over
HTTP.

A caller waits there until there is a decision (`core/snapshots/replication.py`).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field

from unbroken.agent_http.peer import SILENCE_SECONDS, connected
from unbroken.agent_http.snapshots import Refused
from unbroken.core.snapshots.replication import Agreement, Arrival, NextRound
from unbroken.errors import PeerError
from unbroken.wire.agent import StartCommand
from unbroken.wire.codec import load, read

from .peer import name_path

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
