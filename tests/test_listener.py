"""Servers with bounded connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from errno import EADDRINUSE

import aiohttp
import pytest
from aiohttp import web

from unbroken.listener import Connections, Limits, admitted, bound


@asynccontextmanager
async def bounded(app: web.Application, limits: Limits) -> AsyncIterator[int]:
    """Serve with bounded connections while the block runs; yield the port."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    connections = Connections(runner.server, limits)
    (listening,) = await bound("127.0.0.1", 0)
    connections.listen(listening)
    try:
        yield listening.getsockname()[1]
    finally:
        connections.close()
        await runner.cleanup()


async def test_an_address_that_is_taken_is_no_part_of_the_reason() -> None:
    (taken,) = await bound("127.0.0.1", 0)
    reason = rf"^\[Errno {EADDRINUSE}\] {os.strerror(EADDRINUSE)}$"
    with taken, pytest.raises(OSError, match=reason):
        await bound("127.0.0.1", taken.getsockname()[1])


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
    async with bounded(app, Limits(8)) as port, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await (await session.get(f"http://127.0.0.1:{port}/")).read()
        await ended.wait()
    assert [record.getMessage() for record in caplog.records] == []


async def test_a_client_that_leaves_within_its_body_is_no_error_and_a_fault_of_ours_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/ours":
            raise ConnectionResetError("a server that this handler has asked")
        try:
            await request.read()
        finally:
            ended.set()
        raise AssertionError("the body is whole")

    app = web.Application()
    app.router.add_post("/{path}", answer)
    head = "POST /{} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
    async with bounded(app, Limits(8)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.format("ours", 0).encode())
        assert b" 500 " in await reader.readline()
        assert len(caplog.records) == 1
        writer.close()
        _, half = await asyncio.open_connection("127.0.0.1", port)
        half.write(head.format("theirs", 10).encode() + b"{")
        await half.drain()
        half.transport.abort()
        await ended.wait()
    assert len(caplog.records) == 1
    caplog.clear()


@asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[int]:
    """Serve with these bounds; yield the port. What is asked without end is never answered."""

    async def answer(request: web.Request) -> web.StreamResponse:
        admitted(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await asyncio.Event().wait()
        return response

    async def refuse(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    app.router.add_route("*", "/stranger", refuse)
    async with bounded(app, limits) as port:
        yield port


OPENINGS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST /stranger HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    b"GET /stranger HTTP/1.1\r\nHost: x\r\n\r\n",
)


@pytest.mark.parametrize("opening", OPENINGS, ids=["nothing", "head", "body", "not-admitted"])
async def test_a_connection_without_an_admitted_request_is_closed(opening: bytes) -> None:
    async with serving(Limits(8, 0.2)) as port:
        admitted_one = await asyncio.open_connection("127.0.0.1", port)
        admitted_one[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"begun" in await admitted_one[0].readuntil(b"begun")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(opening)
        with suppress(ConnectionError):
            while await reader.read(1024):
                pass
        # The one that is being answered is still open.
        assert not admitted_one[0].at_eof()
        writer.close()
        admitted_one[1].close()
