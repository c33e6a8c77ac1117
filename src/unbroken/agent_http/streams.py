"""Paces and ends the stream below a WebSocket, whose peer may send without end.

Fragments without end make no message to be charged. aiohttp reads all messages that have come
before it closes, without giving way, and waits anew after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Literal, cast

import aiohttp

Socket = (
    aiohttp.ClientWebSocketResponse[Literal[True]] | aiohttp.ClientWebSocketResponse[Literal[False]]
)
UNREAD_MAX = 100
"""Messages that an honest peer may have sent, and that are read before its connection is closed."""


@asynccontextmanager
async def closing(socket: Socket, seconds: float) -> AsyncIterator[None]:
    """Close a socket after the block, within these seconds even if its peer continues to send."""
    try:
        yield
    finally:
        if socket._reader is not None and len(socket._reader._buffer) > UNREAD_MAX:
            cut(socket)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await socket.close()


def cut(socket: Socket) -> None:
    """End the connection below a socket at once: nothing is sent or read any more."""
    connection = socket._response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def pace(socket: Socket, charge: Callable[[int, float], float]) -> None:
    """Pause the stream below a socket as `charge` says.

    It gets the bytes of each piece of the stream and the seconds that the piece took to read, and
    returns the seconds until the next piece is read.
    """
    connection = socket._response.connection  # aiohttp has no public way to it
    handler = connection.protocol if connection is not None else None
    if handler is None or handler.transport is None:
        return  # it has ended already
    transport, read = cast(asyncio.ReadTransport, handler.transport), handler.data_received

    def resume() -> None:
        if not handler._reading_paused and not transport.is_closing():
            transport.resume_reading()

    def received(data: bytes) -> None:
        began = perf_counter()
        read(data)
        delay = charge(len(data), perf_counter() - began)
        if delay and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_later(delay, resume)

    handler.data_received = received  # type: ignore[method-assign]
