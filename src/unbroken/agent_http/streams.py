"""Paces the stream below a WebSocket: fragments without end make no message to be charged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Literal, cast

import aiohttp


def pace(
    socket: aiohttp.ClientWebSocketResponse[Literal[True]]
    | aiohttp.ClientWebSocketResponse[Literal[False]],
    charge: Callable[[int, float], float],
) -> None:
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
