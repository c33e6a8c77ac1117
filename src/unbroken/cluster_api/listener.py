"""Accepts connections for an aiohttp server, a bounded number at a time, with TLS where wanted.

A stranger can open connections and say nothing.  When there are too many, the oldest connection
that carries no verified request is closed, so that a new client always gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from aiohttp import web

from unbroken.kube.clock import pause

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
HANDSHAKES_MAX = 64
"""TLS handshakes under way."""
HANDSHAKE_SECONDS = 5.0
BACKLOG = 128
"""Connections that the kernel keeps for us."""
AGAIN_SECONDS = 0.2
"""Until connections are accepted again after the system had no file descriptor for one."""


class InUse:
    """Connections whose verified request is being answered."""

    def __init__(self) -> None:
        self._connections: set[web.RequestHandler] = set()

    def __contains__(self, connection: web.RequestHandler) -> bool:
        return connection in self._connections

    @contextmanager
    def serving(self, request: web.Request) -> Iterator[None]:
        """Keep the connection of a request open during the block."""
        connection = request.protocol
        self._connections.add(connection)
        try:
            yield
        finally:
            self._connections.discard(connection)


class Listener:
    """Hands connections of one listening socket to a server."""

    def __init__(self, server: web.Server, in_use: InUse, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._in_use = in_use
        self._tls = tls
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """In the order of their connections."""

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
        """Accept connections during the block; the address.  OSError."""
        listening = await _bound(host, port)
        with listening:
            accepting = asyncio.ensure_future(self._accept(listening))
            try:
                address = listening.getsockname()
                yield address[0], address[1]
            finally:
                tasks = (accepting, *self._handshakes)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning('accepts=no reason="%s"', error)
                await pause(AGAIN_SECONDS)
                continue
            if not self._make_room():
                connection.close()
                continue
            task = loop.create_task(self._open(connection))
            self._handshakes[task] = None
            task.add_done_callback(partial(self._opened, connection))
            await pause(0)  # else a burst of connections keeps everything else waiting

    def _make_room(self) -> bool:
        """Whether one more connection may be opened."""
        if len(self._handshakes) >= HANDSHAKES_MAX:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        transports = [
            (one, one.transport)
            for one in self._server.connections
            if one.transport is not None and not one.transport.is_closing()
        ]
        if len(transports) + len(self._handshakes) < CONNECTIONS_MAX:
            return True
        for one, transport in transports:
            if one not in self._in_use:
                transport.abort()
                return True
        return False

    async def _open(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        seconds = HANDSHAKE_SECONDS if self._tls is not None else None
        # A handshake that fails or takes too long is an OSError, too.
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                self._server,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )

    def _opened(self, connection: socket.socket, done: asyncio.Task[None]) -> None:
        self._handshakes.pop(done, None)
        if done.cancelled():
            connection.close()


async def _bound(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening
