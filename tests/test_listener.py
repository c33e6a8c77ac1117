"""Servers with bounded connections."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from unbroken.listener import Connections, Limits, bound


async def test_a_client_that_leaves_during_its_answer_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        assert request.transport is not None
        request.transport.abort()
        ended.set()
        # The write fails as it does after the client has closed the connection.
        await response.write(b"second")
        raise AssertionError("nothing could be written")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    assert runner.server is not None
    connections = Connections(runner.server, Limits(8))
    (listening,) = await bound("127.0.0.1", 0)
    port = listening.getsockname()[1]
    connections.listen(listening)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await (await session.get(f"http://127.0.0.1:{port}/")).read()
    await ended.wait()
    connections.close()
    await runner.cleanup()
    assert [record.getMessage() for record in caplog.records] == []
