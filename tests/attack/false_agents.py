"""Programs that listen where an agent is meant to be, and are none, or are another."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests import loopback
from tests.watching import until
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.agent_codec import encode_report
from unbroken.wire.proof import NONCE_HEADER, Seal, greeting, nonce_of

REPORT = encode_report(AgentReport("false", AgentState.READY, nproc=2, pid=1)).encode()


@dataclass
class FalseAgent:
    """Greets with a key and a uid (None: no greeting), and then sends the frames of a test."""

    key: bytes | None
    uid: str = ""
    says: list[str] = field(default_factory=list)
    """`good`, `again`, `forged`, `later`, `plain`: one frame each."""
    heard: list[bytes] = field(default_factory=list)
    """Messages of all clients."""
    links: int = 0
    port: int = 0

    async def link(self, request: web.Request) -> web.StreamResponse:
        """One link."""
        self.links += 1
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        seal = Seal(b"")
        if self.key is not None:
            asked = nonce_of(request.headers.get(NONCE_HEADER)) or b""
            message, session = greeting(self.key, asked, os.urandom(16), self.uid, request.raw_path)
            await channel.send_bytes(message)
            seal = Seal(session.up)
        await self._speak(channel, seal)
        async for one in channel:
            self.heard.append(one.data if isinstance(one.data, bytes) else one.data.encode())
        return channel

    async def _speak(self, channel: web.WebSocketResponse, seal: Seal) -> None:
        last = b""
        for what in self.says:
            if what == "plain":
                await channel.send_str(REPORT.decode())
                continue
            if what == "later":
                seal(REPORT)
            last = last if what == "again" else seal(REPORT)
            await channel.send_bytes(last[:-1] + b" " if what == "forged" else last)


@asynccontextmanager
async def false_agent(agent: FalseAgent) -> AsyncIterator[FalseAgent]:
    """Serve it during the block."""
    application = web.Application()
    application.router.add_get("/v1/link", agent.link)
    async with loopback.serving(application) as agent.port:
        yield agent


async def until_linked(agent: FalseAgent, count: int) -> None:
    """Return once so many links were begun."""
    await until(lambda: agent.links, lambda links: links >= count)
