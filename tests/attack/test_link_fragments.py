"""A peer whose messages never end costs the operator a bounded part of its time.

In the attacks, empty fragments of a WebSocket message took the operator's whole processor: they
make no message, and so were not charged to the agent. A log of nothing but pings blocked the loop
for a second at a time after nobody read it any more: closing it took each ping that still came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests import loopback
from tests.attack.flooding_agents import report, serve
from tests.watching import Watcher, running, until
from unbroken.agent_http.client import STREAM, AgentLink, LinkResources, chargeable
from unbroken.agent_http.sessions import agent_session, plain_session, small_socket
from unbroken.budget import Bucket, Budget, Flow
from unbroken.core.ray_resume import Head
from unbroken.operator.resume.ray_dashboard import DASHBOARD, ConnectionUse, DashboardAddress
from unbroken.operator.resume.ray_logs import RayLogs
from unbroken.wire.agent import LINK_PATH, AgentReport

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

    def charge(self: AgentLink, size: int, work: float) -> float:
        pieces(size)
        return 3600.0

    monkeypatch.setattr(AgentLink, "_charge", charge)
    async with attacking("fragments", connections) as port, agent_session() as session:
        shared = LinkResources(session=session, heartbeat_seconds=0.05)
        link = AgentLink("127.0.0.1", port, None, lambda _: None, lambda _: None, shared=shared)
        async with running(link.run()):
            await connections.until(lambda seen: len(seen) >= 3)
            read = len(pieces.seen)
    assert 2 <= read <= 3, "one piece of each connection is read, and no more"


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Watcher[bool]:
    """Whether each socket that is closed has been cut before: closing it then reads nothing."""
    made = Watcher[bool]()
    real = aiohttp.ClientWebSocketResponse.close

    async def close(self: Any, **more: Any) -> bool:
        connection = self._response.connection
        made(
            connection is None or connection.transport is None or connection.transport.is_closing()
        )
        return await real(self, **more)

    monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "close", close)
    return made


async def test_the_link_of_a_flooding_agent_is_cut_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, closed: Watcher[bool]
) -> None:
    held, connections = Watcher[int](), Watcher[str]()

    def spend(self: Budget, size: float, work: float, now: float) -> float:
        held(int(size))
        return 3600.0

    monkeypatch.setattr(Budget, "spend", spend)
    async with attacking("pings", connections) as port, agent_session() as session:
        shared = LinkResources(session=session)
        link = AgentLink("127.0.0.1", port, None, lambda _: None, lambda _: None, shared=shared)
        async with running(link.run()):
            await held.until(bool)
    assert closed.seen == [True]


async def test_the_link_of_an_agent_with_little_to_say_is_closed(closed: Watcher[bool]) -> None:
    reports, pieces = Watcher[AgentReport](), Watcher[str]()

    async def quiet(request: web.Request) -> web.WebSocketResponse:
        made = web.WebSocketResponse()
        await made.prepare(request)
        await made.send_json(report())
        pieces((await made.receive()).type.name)
        return made

    app = web.Application()
    app.add_routes([web.get(LINK_PATH, quiet)])
    async with loopback.serving(app) as port, agent_session() as session:
        shared = LinkResources(session=session)
        link = AgentLink("127.0.0.1", port, None, reports, lambda _: None, shared=shared)
        async with running(link.run()):
            await reports.until(bool)
        await pieces.until(bool)
    assert pieces.seen == ["CLOSE"]


async def test_a_flooding_log_is_cut_when_nobody_wants_it(closed: Watcher[bool]) -> None:
    connections, head = Watcher[str](), Head("h", "u")
    budget = Budget("it", replace(DASHBOARD, messages=Flow(0.1, 0.4)), 0.0)
    session = plain_session(make_socket=small_socket)
    async with attacking("pings", connections) as port, session:
        logs: RayLogs[str] = RayLogs(session, lambda _: None)
        async with running(logs.run()):
            logs.want("a", head, DashboardAddress(f"http://127.0.0.1:{port}"), ["one"], (), budget)
            await until(lambda: budget.held(ConnectionUse.LOG))
            await connections.until(bool)
            logs.forget("a")
            await until(lambda: budget.held(ConnectionUse.LOG), lambda held: held == 0)
    assert set(closed.seen) <= {True}


def test_the_time_of_a_stream_is_charged_to_its_agent_alone() -> None:
    bad, good = Bucket(STREAM, 0.0), Bucket(STREAM, 0.0)
    waits = [bad.wait(chargeable(PIECE, PIECE_SECONDS), 0.0) for _ in range(60)]
    assert waits[0] == 0.0
    assert waits[-1] == 5.0
    assert good.wait(chargeable(PIECE, PIECE_SECONDS), 0.0) == 0.0
    # A heartbeat of 100 bytes beside which the process stood still.
    assert [good.wait(chargeable(100, 60.0), 0.0) for _ in range(300)][-1] == 0.0
