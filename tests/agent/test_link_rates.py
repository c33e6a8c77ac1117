"""Rates at which one agent is read, in virtual time: its messages, bytes and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from tests import loopback
from tests.agent.running import linked
from tests.virtual_time import in_virtual_time
from unbroken.agent_http.client import AGENT, CONNECTION_MESSAGES
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.agent_codec import encode_report

SECONDS = 60
MESSAGES = AGENT.messages.at_once + SECONDS * AGENT.messages.a_second
"""Messages that may be read of an agent in that time."""
LONG = 100_000
SOME = 2
"""Messages more that may be read: the first, and the one that is late."""


@dataclass
class Flood:
    """An agent that sends `count` different reports at once, of so many bytes or a few more."""

    count: int
    size: int = 0
    is_short: bool = False
    """The link ends after each report."""
    links: int = 0

    async def link(self, request: web.Request) -> web.WebSocketResponse:
        """GET /v1/link."""
        self.links += 1
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        for number in range(self.count):
            message = f"{self.links} {number} " + "x" * self.size
            report = AgentReport("flood", AgentState.READY, nproc=1, pid=1, message=message)
            await channel.send_str(encode_report(report))
            if self.is_short and self.links < self.count:
                return channel
        await channel.receive()
        return channel


@asynccontextmanager
async def serving(flood: Flood) -> AsyncIterator[int]:
    """Serve the flood; yield its port."""
    application = web.Application()
    application.router.add_get("/v1/link", flood.link)
    async with loopback.serving(application) as port:
        yield port


@pytest.mark.parametrize(
    ("size", "most"),
    [(0, MESSAGES), (LONG, (AGENT.bytes.at_once + SECONDS * AGENT.bytes.a_second) / LONG)],
)
@in_virtual_time
async def test_an_agent_that_reports_without_end_is_read_at_its_rate(
    size: int, most: float
) -> None:
    flood = Flood(2 * int(most), size)
    async with serving(flood) as port, linked(port, key=None) as operator:
        await asyncio.sleep(SECONDS)
        assert SOME < len(operator.reports) <= most + SOME
        assert operator.losses == [], "an agent whose messages are read late is not silent"


@in_virtual_time
async def test_an_agent_that_ends_each_link_is_connected_to_at_its_rate() -> None:
    most = MESSAGES / CONNECTION_MESSAGES
    flood = Flood(2 * int(most), is_short=True)
    async with serving(flood) as port, linked(port, key=None):
        await asyncio.sleep(SECONDS)
        assert SOME < flood.links <= most + SOME
