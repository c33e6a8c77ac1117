"""Listening sockets for HTTP, with or without TLS, and bounds on the connections of a server.

aiohttp alone keeps a half-sent request for ever, so that an untrusted client can use up a program's
file descriptors. Here a connection is untrusted until one of its requests is admitted, which must
happen within some seconds. When there are too many connections, the oldest untrusted one makes room
for a new one, then the oldest that waits for its next request. A connection whose admitted request
is being answered (a watch, a link, a transfer) is never closed for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import ClientConnectionResetError, web
from aiohttp.http import HttpProcessingError

from unbroken.log_lines import Log

if TYPE_CHECKING:
    import ssl  # an agent does without it at run time

log = Log(__name__)

BACKLOG = 128
"""Connections that the kernel queues."""
HANDSHAKE_SECONDS = 5.0
AGAIN_SECONDS = 0.2
"""Seconds until connections are accepted again after the system had no file descriptor for one."""
FAULTS_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ClientConnectionResetError)
"""A client sent bad bytes, or left before all of its answer was written."""


class Limits(NamedTuple):
    """Bounds of one server."""

    connections: int
    """Open connections, with those whose TLS handshake is under way."""
    seconds: float = 10.0
    """Seconds from the start of a connection until one of its requests is admitted."""


class Connections:
    """The connections of a server, from all its listening sockets."""

    def __init__(self, server: web.Server, limits: Limits, **options: Any) -> None:
        """`options` are those of aiohttp's RequestHandler."""
        server.request_handler = partial(_readable, server.request_handler)
        self._server = server
        self._limits = limits
        self._options = {"access_log": None, **options}
        self._listening: list[socket.socket] = []
        self._strangers: dict[_Connection, asyncio.TimerHandle] = {}
        """Untrusted connections, the oldest first, as in `_idle`."""
        self._idle: dict[_Connection, None] = {}
        self._in_use: set[_Connection] = set()

    def listen(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections of a listening socket, and close it at the end."""
        listening.setblocking(False)
        self._listening.append(listening)
        self._resume(listening, tls)

    def stop_listening(self) -> None:
        """Close the listening sockets; existing connections stay."""
        loop = asyncio.get_running_loop()
        for one in self._listening:
            loop.remove_reader(one)
            one.close()
        self._listening.clear()

    def close(self) -> None:
        """Stop listening, and end handshakes.  The server's runner ends the other connections."""
        self.stop_listening()
        for stranger in [stranger for stranger in self._strangers if stranger.transport is None]:
            self._drop(stranger)

    def use(self, connection: _Connection) -> None:
        """Keep the connection open until its request is answered."""
        self.forget(connection)
        self._in_use.add(connection)

    def answered(self, connection: _Connection) -> None:
        """Let a connection make room again, if it was in use."""
        if connection in self._in_use:
            self._in_use.discard(connection)
            self._idle[connection] = None

    def forget(self, connection: _Connection) -> None:
        """Count the connection no more."""
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self._idle.pop(connection, None)
        self._in_use.discard(connection)

    def _resume(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        if listening in self._listening:
            loop = asyncio.get_running_loop()
            loop.add_reader(listening, self._accept, listening, tls)

    def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept one connection: a burst of them must not delay all else."""
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("connections not accepted", retry_seconds=AGAIN_SECONDS, error=error)
            loop.remove_reader(listening)
            loop.call_later(AGAIN_SECONDS, self._resume, listening, tls)
            return
        if not self._make_room():
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(self, self._server, self._options)
        timer = loop.call_later(self._limits.seconds, self._drop, connection)
        self._strangers[connection] = timer
        connection.opening = loop.create_task(_open(connection, accepted, tls))
        connection.opening.add_done_callback(partial(self._opened, connection, accepted))

    def _make_room(self) -> bool:
        """True if one more connection may be opened."""
        count = len(self._strangers) + len(self._idle) + len(self._in_use)
        if count < self._limits.connections:
            return True
        oldest = next(itertools.chain(self._strangers, self._idle), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, connection: _Connection) -> None:
        self.forget(connection)
        if connection.transport is not None:
            connection.transport.abort()
        elif connection.opening is not None:
            connection.opening.cancel()

    def _opened(
        self, connection: _Connection, accepted: socket.socket, done: asyncio.Task[None]
    ) -> None:
        if done.cancelled():
            accepted.close()
        if done.cancelled() or connection.transport is None:
            self.forget(connection)


class _Connection(web.RequestHandler):
    """A connection that reports when it is answered and when it ends."""

    __slots__ = ("connections", "opening")

    def __init__(
        self, connections: Connections, server: web.Server, options: dict[str, Any]
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.connections = connections
        self.opening: asyncio.Task[None] | None = None
        """Connects it, with the handshake."""

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self.connections.forget(self)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a defect of this project, and not what a client did: that could fill the log."""
        error = kw.get("exc_info")
        # aiohttp's own reset is the end of a client that has sent half a body.
        has_left = isinstance(error, ConnectionResetError) and self.transport is None
        if not has_left and not isinstance(error, FAULTS_OF_CLIENTS):
            super().log_exception(*args, **kw)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of an answer; then it may make room."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.connections.answered(self)


def admitted(request: web.BaseRequest) -> None:
    """Keep the connection of a request open until it is answered: its client is trusted."""
    connection = request.protocol
    if isinstance(connection, _Connection) and connection.transport is not None:
        connection.connections.use(connection)


async def _readable(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], request: web.BaseRequest
) -> web.StreamResponse:
    """Refuse a request with a header that is not UTF-8: no answer could repeat its text.

    This comes before the application, as aiohttp itself repeats an `Expect` that it does not know.
    """
    for name, value in request.headers.items():
        try:
            value.encode()
        except UnicodeEncodeError:
            detail = {"detail": f"header {name} is not valid UTF-8"}
            refusal = web.json_response(detail, status=400)
            refusal.force_close()
            return refusal
    return await handler(request)


@contextlib.asynccontextmanager
async def serving(
    application: web.Application,
    sockets: Sequence[socket.socket],
    limits: Limits,
    tls: ssl.SSLContext | None = None,
    *,
    shutdown_seconds: float = 60.0,
    handler_cancellation: bool = False,
    **options: Any,
) -> AsyncIterator[None]:
    """Serve an application at listening sockets during the block, and close them.

    `shutdown_seconds`: for requests that are being answered at the end.  `handler_cancellation`: an
    answer whose client has left is cancelled.  `options` as those of `Connections`.
    """
    runner = web.AppRunner(
        application, shutdown_timeout=shutdown_seconds, handler_cancellation=handler_cancellation
    )
    await runner.setup()
    assert runner.server is not None
    connections = Connections(runner.server, limits, **options)
    try:
        for one in sockets:
            connections.listen(one, tls)
        yield
    finally:
        connections.close()
        await runner.cleanup()


async def bound(host: str, port: int, backlog: int = BACKLOG) -> list[socket.socket]:
    """Make a listening socket for each address of the host; empty: all addresses.

    `backlog`: connections that the kernel queues. Raises OSError.
    """
    loop = asyncio.get_running_loop()
    result = await loop.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(_bound(family, address, backlog))
            for family, address in dict.fromkeys((one[0], one[4]) for one in result)
        ]
        stack.pop_all()
    return made


def _bound(family: int, address: Any, backlog: int) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        if error.errno is None:
            raise
        # Python adds the address to the text, and so does the caller.
        raise OSError(error.errno, os.strerror(error.errno)) from error


async def _open(
    connection: _Connection, accepted: socket.socket, tls: ssl.SSLContext | None
) -> None:
    seconds = HANDSHAKE_SECONDS if tls is not None else None
    # A handshake that fails or takes too long is an OSError, too.
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=tls,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=seconds,
        )
