"""Transport of the Kubernetes client's requests over aiohttp.

lightkube uses httpx, whose own transport parses HTTP in Python. That takes 260 us per request and
per chunk of a watch event, against 50 us with aiohttp's C parser (measured over loopback). The
transport also corrects one flaw of lightkube: it reads an error only if its content type is exactly
`application/json`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from random import Random
from weakref import WeakSet

import aiohttp
import httpx2
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from unbroken.foreign_numbers import whole_number

from .clock import entropy, pause

KEEP_ALIVE_SECONDS = 60.0
"""Seconds that idle connections are kept; kube-apiserver keeps its side for 3 minutes and more."""

VANISHED_MILLISECONDS = 30_000
"""Milliseconds within which sent data must be acknowledged."""

CLOSING_ROUNDS = 20
"""Rounds of the loop that a connection may take to notice its end."""

JSON = b"application/json"
TOO_MANY, SERVER_ERRORS, UNAVAILABLE = 429, 500, 503

TRIES = 11
"""Attempts at a request that the server defers (client-go v1.33 rest/request.go, maxRetries 10, and
with_retry.go: 429 or 5xx with Retry-After)."""
WAIT_SECONDS_MAX = 60.0
"""Seconds of the longest such wait, whatever the server asks for."""
STARTING_SECONDS_MAX = 2.0
"""Seconds of the longest such wait after a 503.

A kube-apiserver that starts asks for 10 s for each request for a custom resource, and serves them
0.2 s later (measured, v1.20.2).
"""

EARLIEST = 0.2
"""Share of a back-off that is waited for even if the server answers again before."""

READS = frozenset({"GET", "HEAD", "OPTIONS"})
MAY_WRITE = "may_write"
"""Extension of a request: asked when its first byte leaves."""
NOT_ALLOWED = "it is not certain that this process leads, so it does nothing"


class Contact:
    """The state of the connection to the API server, shared by all users of one transport.

    The first request that is answered after an outage wakes all waits for a retry. Otherwise each
    informer and each lease would find out alone, up to its longest back-off later.
    """

    def __init__(self) -> None:
        self._is_lost = False
        self._regained = asyncio.Event()

    def lost(self) -> None:
        """Note a request that got no answer."""
        self._is_lost = True
        self._regained.clear()

    def answered(self) -> None:
        """Note a request that got an answer, even if the answer is an error."""
        if self._is_lost:
            self._is_lost = False
            self._regained.set()

    async def pause(self, seconds: float) -> None:
        """Wait for `seconds`; in an outage, until the server answers again, if that is earlier.

        The wait lasts `EARLIEST` of `seconds` in any case: a request that alone fails, while
        others are answered, must not be repeated at their rate.
        """
        if not self._is_lost:
            await pause(seconds)
            return
        await pause(seconds * EARLIEST)
        if self._is_lost:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds * (1.0 - EARLIEST)):
                    await self._regained.wait()


class AiohttpTransport(httpx2.AsyncBaseTransport):
    """One connection pool to one API server; opened by the first request."""

    def __init__(self, verify: ssl.SSLContext | bool, *, is_local: bool) -> None:
        self.contact = Contact()
        self._verify = verify
        self._is_local = is_local
        self._session: aiohttp.ClientSession | None = None
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._random = entropy()
        self._upgrading: httpx2.AsyncHTTPTransport | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                ssl=self._verify,
                keepalive_timeout=KEEP_ALIVE_SECONDS,
                socket_factory=self._socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                # Proxies stand between machines, never on the way to this one.
                trust_env=not self._is_local,
            )
        return self._session

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request; the answer's body is still to be read."""
        if "upgrade" in request.headers:
            return await self._upgrade(request)
        if self._is_local:
            # Compression costs more than it saves if no network is in between.
            request.headers["accept-encoding"] = "identity"
        answer = await self._send(request)
        for _ in range(TRIES - 1):
            seconds = _put_off(answer, self._random)
            if seconds is None:
                break
            # The server has not carried it out, and says so: any request may be repeated, in the
            # same way.
            answer.release()
            await pause(seconds)
            answer = await self._send(request)
        return httpx2.Response(
            answer.status, headers=_headers(answer.raw_headers), stream=_Body(answer)
        )

    async def _send(self, request: httpx2.Request) -> aiohttp.ClientResponse:
        times = request.extensions.get("timeout", {})
        timeout = aiohttp.ClientTimeout(
            total=None,
            connect=times.get("pool"),
            sock_connect=times.get("connect"),
            sock_read=times.get("read"),
        )
        try:
            answer = await self._open().request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=[(key.decode(), value.decode()) for key, value in request.headers.raw],
                data=_payload(request),
                # Without content there is no type to guess.
                skip_auto_headers=() if request.content else ("Content-Type",),
                timeout=timeout,
                allow_redirects=False,
            )
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self.contact.lost()
            raise _translated(error) from error
        self.contact.answered()
        return answer

    async def _upgrade(self, request: httpx2.Request) -> httpx2.Response:
        # exec takes the connection over, which only httpx's own transport lets lightkube do.
        if self._upgrading is None:
            self._upgrading = httpx2.AsyncHTTPTransport(verify=self._verify)
        return await self._upgrading.handle_async_request(request)

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._is_local:
            # The kernel notices a peer that vanished silently.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_MILLISECONDS)
        self._sockets.add(made)
        return made

    async def aclose(self) -> None:
        """Close every connection."""
        if self._upgrading is not None:
            await self._upgrading.aclose()
        if self._session is None:
            return
        await self._session.close()
        # Cancelled requests leave connections that would wait half a minute for the server's part
        # of closing TLS.
        for left in self._sockets:
            if left.fileno() >= 0:
                with suppress(OSError):
                    left.shutdown(socket.SHUT_RDWR)
        for _ in range(CLOSING_ROUNDS):
            if all(left.fileno() < 0 for left in self._sockets):
                return
            await pause(0)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """The same connections, for a user whose writes need permission; the transport's creator closes
    it."""

    def __init__(self, carrier: AiohttpTransport, may_write: Callable[[], bool]) -> None:
        self._carrier = carrier
        self._may_write = may_write

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a read, or a write if that is allowed; WriteError if not."""
        if request.method not in READS:
            if not self._may_write():
                raise httpx2.WriteError(NOT_ALLOWED)
            request.extensions[MAY_WRITE] = self._may_write
        return await self._carrier.handle_async_request(request)


def _put_off(answer: aiohttp.ClientResponse, random: Random) -> float | None:
    """Return the seconds after which the server wants a retry; None: this is its answer."""
    asked = whole_number(answer.headers.get("Retry-After", ""))
    if asked is None or (answer.status != TOO_MANY and answer.status < SERVER_ERRORS):
        return None
    if answer.status == UNAVAILABLE:
        # Jitter, as all clients of a starting server get this answer at the same time.
        return min(asked, random.uniform(STARTING_SECONDS_MAX / 2, STARTING_SECONDS_MAX))
    return min(asked, WAIT_SECONDS_MAX)


class _GuardedPayload(aiohttp.BytesPayload):
    """Content that needs permission when it is written.

    aiohttp sends the headers along with the first of the content. Before that a connection may have
    been made, which takes any time.
    """

    def __init__(self, content: bytes, may_write: Callable[[], bool]) -> None:
        super().__init__(content)
        self._may_write = may_write

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        """Write the content, or end the connection before anything was written."""
        if not self._may_write():
            raise PermissionError(NOT_ALLOWED)
        await super().write_with_length(writer, content_length)


def _payload(request: httpx2.Request) -> bytes | _GuardedPayload | None:
    may_write: Callable[[], bool] | None = request.extensions.get(MAY_WRITE)
    if may_write is None:
        return request.content or None
    return _GuardedPayload(request.content, may_write)


class _Body(httpx2.AsyncByteStream):
    """The answer's bytes as they arrive."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer.content.iter_any():
                yield chunk
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _translated(error) from error

    async def aclose(self) -> None:
        # A body that was read to its end has released its connection. Any other is cut, without
        # waiting for the server's part of closing TLS.
        connection = self._answer.connection
        if connection is not None and isinstance(connection.transport, asyncio.WriteTransport):
            connection.transport.abort()
        self._answer.close()


def _headers(raw: tuple[tuple[bytes, bytes], ...]) -> list[tuple[bytes, bytes]]:
    headers = [(key, value) for key, value in raw if key.lower() != b"content-type"]
    types = [value for key, value in raw if key.lower() == b"content-type"]
    kind = types[0] if types else b"application/octet-stream"
    headers.append((b"Content-Type", JSON if kind.partition(b";")[0].strip() == JSON else kind))
    return headers


def _translated(error: Exception) -> httpx2.TransportError:
    text = str(error) or type(error).__name__
    match error:
        case aiohttp.ConnectionTimeoutError():
            return httpx2.ConnectTimeout(text)
        case asyncio.TimeoutError():
            return httpx2.ReadTimeout(text)
        case aiohttp.ClientConnectorError():
            return httpx2.ConnectError(text)
        case aiohttp.ClientPayloadError():
            return httpx2.RemoteProtocolError("the connection ended in the middle of the answer")
        case aiohttp.ServerDisconnectedError():
            return httpx2.RemoteProtocolError(text)
        case _:
            return httpx2.ReadError(text)
