"""A connection that stops to speak HTTP, for clients that forward ports without a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from aiohttp import web
from aiohttp.http_websocket import WebSocketReader

SPDY = "spdy/3.1"
"""Value of the header Upgrade, in lower case."""
HELD_BYTES = 64 * 1024
"""With more bytes than this that nobody has read, the client must wait."""


class Upgraded:
    """The bytes of a connection after `101 Switching Protocols`."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._held = bytearray()
        self._is_over = False
        self._arrived = asyncio.Event()

    async def accept(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the 101.  What is written to the response goes to the client as it is."""
        upgrade = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}
        response = web.StreamResponse(status=101, headers={**upgrade, **headers})
        response.force_close()
        # aiohttp gives its own WebSockets their bytes in this way; it calls the two methods below.
        self._request.protocol.set_parser(cast("WebSocketReader", self))
        await response.prepare(self._request)
        return response

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take bytes of the client."""
        self._held += data
        if len(self._held) > HELD_BYTES and self._request.transport is not None:
            self._request.transport.pause_reading()
        self._arrived.set()
        return False, b""

    def feed_eof(self) -> None:
        """Take the end of the connection."""
        self._is_over = True
        self._arrived.set()

    async def read(self) -> bytes:
        """Return the client's next bytes, none at the end."""
        while not self._held and not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._held)
        self._held.clear()
        if self._request.transport is not None:
            self._request.transport.resume_reading()
        return data

    def close(self) -> None:
        """End the connection, and with it a `read` that waits."""
        self._request.protocol.force_close()
        self.feed_eof()
