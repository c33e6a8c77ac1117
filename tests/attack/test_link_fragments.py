"""An agent whose messages never end costs the operator a bounded part of its time.

In the attack, empty fragments of a WebSocket message took the operator's whole processor: they make
no message, and so were not charged to the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.attack.flooding_agents import serve
from tests.watching import Watcher, running
from unbroken.agent_http.client import AgentLink, LinkResources
from unbroken.agent_http.rates import Rate
from unbroken.agent_http.sessions import agent_session

PIECE = 64 * 1024
"""Bytes of a piece of a stream, of two bytes for each empty fragment."""
PIECE_SECONDS = 0.05
"""Seconds that such a piece takes to read."""


@asynccontextmanager
async def attacking(kind: str, connections: Watcher[str]) -> AsyncIterator[int]:
    """Serve an agent that attacks in this way; its port."""

    async def connected(source: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        connections(kind)
        await serve(kind, source, out)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_fragments_without_end_are_read_once_and_then_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces, connections = Watcher[int](), Watcher[str]()

    def piece(self: Rate, size: int, work: float, now: float) -> float:
        pieces(size)
        return 3600.0

    monkeypatch.setattr(Rate, "piece", piece)
    async with attacking("fragments", connections) as port, agent_session() as session:
        shared = LinkResources(session=session, heartbeat_seconds=0.05)
        link = AgentLink("127.0.0.1", port, None, lambda _: None, lambda _: None, shared=shared)
        async with running(link.run()):
            await connections.until(lambda seen: len(seen) >= 3)
            read = len(pieces.seen)
    assert 2 <= read <= 3, "one piece of each connection is read, and no more"


def test_the_time_of_a_stream_is_charged_to_its_agent_alone() -> None:
    bad, good = Rate(0.0), Rate(0.0)
    waits = [bad.piece(PIECE, PIECE_SECONDS, 0.0) for _ in range(60)]
    assert waits[0] == 0.0
    assert waits[-1] == 5.0
    assert good.piece(PIECE, PIECE_SECONDS, 0.0) == 0.0
    # A heartbeat of 100 bytes beside which the process stood still.
    assert [good.piece(100, 60.0, 0.0) for _ in range(300)][-1] == 0.0
    assert bad.message(100, 0.0, 0.0) == 0.0, "what was sent in time is still read"
