"""HTTP client sessions that connect to the given address and to no other, and the pace of streams.

Every client of the project has its session from here, except for the Kubernetes API's
(`kube/transport`), which keeps the same rules. A server may be untrusted: it must not be able to
send this program anywhere else, nor fill its memory with few bytes.

The peer of a WebSocket may send without end. Fragments without end make no message to be charged.
aiohttp reads all messages that have come before it closes, without giving way, and waits anew after
each.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Literal, cast

import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp import hdrs
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError

from unbroken.errors import PeerError

RECEIVE_BYTES = 16 * 1024
"""Bytes of the kernel's receive buffer of a connection to an agent, or to a dashboard of Ray.

No more is read of one peer before the others have had their turn. A report is usually shorter; a
long one comes in pieces.
"""


class FinalResponse(aiohttp.ClientResponse):
    """An answer that rejects interim responses (status 1xx): there could be millions of them."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head of the answer. Raises ClientResponseError."""
        protocol = connection.protocol
        assert protocol is not None
        try:
            message, payload = await protocol.read()
        except HttpProcessingError as error:
            raise self._wrong(error.message) from error
        if message.code < 200 and message.code != 101:
            raise self._wrong(f"status {message.code}")
        # The base class reads it from here.
        protocol.feed_data((message, payload), 0)
        return await super().start(connection)

    def _wrong(self, text: str) -> aiohttp.ClientResponseError:
        return aiohttp.ClientResponseError(self.request_info, self.history, message=text)


def plain_session(
    timeout: aiohttp.ClientTimeout | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    make_socket: Callable[[AddrInfoType], socket.socket] | None = None,
) -> aiohttp.ClientSession:
    """Make a session that refuses redirects and compressed answers (PeerError).

    It keeps no cookies and uses no proxy of the environment. Connections are not limited. `tls`
    holds the trusted certificates; None trusts those of the system.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True, socket_factory=make_socket),
        timeout=timeout or aiohttp.ClientTimeout(total=300.0),
        headers={hdrs.ACCEPT_ENCODING: "identity", **(headers or {})},
        middlewares=(_only_its_own_answer,),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        response_class=FinalResponse,
    )


def agent_session() -> aiohttp.ClientSession:
    """Make the session that an operator uses for all agents, of all jobs."""
    return plain_session(make_socket=small_socket)


def small_socket(address: AddrInfoType) -> socket.socket:
    """Make a socket with a small receive buffer, for a peer that may send without end."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    return made


async def _only_its_own_answer(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    answer = await handler(request)
    refused = ""
    if 300 <= answer.status < 400:
        refused = f"a redirect (HTTP {answer.status}), which is not followed"
    elif answer.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        refused = "compressed content, which was not asked for"
    if refused:
        answer.close()
        raise PeerError(f"{request.url.host} answers {request.url.path} with {refused}")
    return answer


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
