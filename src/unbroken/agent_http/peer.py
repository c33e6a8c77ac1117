"""Requests to an agent on a connection of their own, without a copy in this process.

Bodies go from memory to the socket and back by the kernel (sendfile, recv into a mapping). With a
job's key the agent first proves that it has the key too. Then each request has a tag, and each
answer is checked before it is used (`wire/proof`). No redirect is followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

from unbroken.errors import PeerError
from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.wire.proof import (
    DIGEST_HEADER,
    GREETING_BYTES_MAX,
    HELLO_PATH,
    NONCE_BYTES,
    NONCE_HEADER,
    TAG_HEADER,
    TAGGED,
    Asked,
    Session,
    Stranger,
    answer_tag,
    digest_of,
    greeted,
    is_tag,
    request_tag,
    snapshot_digest,
)
from unbroken.wire.snapshot import HEADERS_BYTES

CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""Seconds without any progress after which a peer is given up."""
PROGRESS_SECONDS, PROGRESS_BYTES = 3.0, 16 * 1024 * 1024
"""Seconds, and the bytes of a body that a peer must send in this time; with fewer it is given
up."""
RECEIVE_BYTES = 1024 * 1024
HEAD_BYTES_MAX = 64 * 1024
_STATUS_LINE = re.compile(r"HTTP/1\.[01] ([0-9]{3})(?: |$)")
"""The first line of an answer (RFC 9112, 4): exactly three ASCII digits."""


@dataclass(frozen=True)
class AnswerHead:
    """Status and headers of an answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""

    @property
    def digest(self) -> str:
        """Digest of the body according to the agent; empty: none."""
        return self.headers.get(DIGEST_HEADER.lower(), "")

    @property
    def length(self) -> int:
        """Length of the body."""
        result = whole_number(self.headers.get("content-length", ""))
        if result is None:
            raise PeerError("an answer without its length")
        return result


class _Filling:
    """Reads a body into a file, in a thread: several at once need several cores.

    The file is not mapped: releasing a mapping of many pages would hold up everything else.
    """

    def __init__(self, sock: socket.socket, fd: int, begin: bytes, size: int) -> None:
        self._sock, self._fd, self._size = sock, fd, size
        self.received = os.pwrite(fd, begin[:size], 0)

    def run(self) -> None:
        """Read until the file is full. Raises PeerError, OSError."""
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        while self.received < self._size:
            count = self._sock.recv_into(buffer[: self._size - self.received])
            if not count:
                raise PeerError("it has closed the connection")
            os.pwrite(self._fd, buffer[:count], self.received)
            self.received += count


class PeerConnection:
    """A connection; call `ask`, then what the request needs."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self._sock, self._host = sock, host
        self._loop = asyncio.get_running_loop()
        self._unread = b""
        self._session: Session | None = None
        self._asked = 0
        """Requests of the session so far."""

    async def greet(self, key: bytes, uid: str | None) -> None:
        """Have the agent prove that it has the key, in the expected pod. Raises Stranger."""
        nonce = os.urandom(NONCE_BYTES)
        await self.ask("GET", HELLO_PATH, {NONCE_HEADER: nonce.hex()})
        head = await self.head()
        if head.status != 200:
            raise Stranger(f"does not prove that it has the job's key (HTTP {head.status})")
        message = await self.text(head, GREETING_BYTES_MAX)
        self._unread = self._unread[len(message) :]
        self._session = greeted(key, nonce, uid, HELLO_PATH, message)

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Send a request's head, and a small body."""
        sent = {"Host": self._host, **(headers or {})}
        if body:
            sent["Content-Length"] = str(len(body))
        if self._session is not None:
            sent.setdefault(DIGEST_HEADER, digest_of(body))
            tagged = Asked(method, path, tuple(sent.get(name, "") for name in TAGGED))
            sent[TAG_HEADER] = request_tag(self._session, self._asked, tagged)
            self._asked += 1
        lines = [f"{name}: {value}" for name, value in sent.items()]
        text = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])
        async with asyncio.timeout(SILENCE_SECONDS):
            await self._loop.sock_sendall(self._sock, text.encode() + body)

    async def head(self, seconds: float = SILENCE_SECONDS) -> AnswerHead:
        """Return the head of an answer, verified as the agent's. Raises PeerError."""
        async with asyncio.timeout(seconds):
            while b"\r\n\r\n" not in self._unread:
                await self._more()
        text, _, self._unread = self._unread.partition(b"\r\n\r\n")
        first, *rows = text.decode("latin-1").split("\r\n")
        found = _STATUS_LINE.match(first)
        if found is None:
            raise PeerError(f"no HTTP: {first[:100]!r}")
        pairs = (row.partition(":") for row in rows)
        head = AnswerHead(int(found[1]), {name.lower(): value.strip() for name, _, value in pairs})
        if self._session is not None and head.status != 100:
            self._check(self._session, head)
        return head

    def _check(self, session: Session, head: AnswerHead) -> None:
        wanted = answer_tag(session, self._asked - 1, head.status, head.digest)
        if not is_tag(head.headers.get(TAG_HEADER.lower()), wanted):
            raise Stranger(f"its answer has no tag of this session (HTTP {head.status})")

    async def text(self, head: AnswerHead, limit: int = HEAD_BYTES_MAX) -> bytes:
        """Return a body of at most this many bytes. Raises PeerError."""
        if head.length > limit:
            raise PeerError(f"an answer of {head.length} bytes")
        async with asyncio.timeout(SILENCE_SECONDS):
            while len(self._unread) < head.length:
                await self._more(limit)
        body = self._unread[: head.length]
        if self._session is not None and digest_of(body) != head.digest:
            raise Stranger("its answer is not the one that it has put a tag on")
        return body

    async def post(self, path: str, body: bytes, limit: int) -> tuple[int, bytes]:
        """Send a small body; return the status and body of the answer.

        The connection can be used again after that. Raises PeerError.
        """
        await self.ask("POST", path, {"Content-Type": "application/json"}, body)
        head = await self.head()
        text = await self.text(head, limit)
        self._unread = self._unread[len(text) :]
        return head.status, text

    async def send(self, file: FileIO, begin: int, count: int) -> None:
        """Send a piece of a file."""
        async with asyncio.timeout(SILENCE_SECONDS):
            await self._loop.sock_sendfile(self._sock, file, begin, count, fallback=False)

    async def receive(self, head: AnswerHead, fd: int) -> None:
        """Receive a snapshot into a file of its size. Raises PeerError if it ends early, or is
        slow."""
        size = head.length
        filling = _Filling(self._sock, fd, self._unread, size)
        self._sock.settimeout(PROGRESS_SECONDS)
        work = self._loop.run_in_executor(None, filling.run)
        try:
            while not work.done():
                before = filling.received
                await asyncio.wait([work], timeout=PROGRESS_SECONDS)
                if not work.done() and filling.received - before < PROGRESS_BYTES:
                    raise PeerError(f"it sends less than {PROGRESS_BYTES} bytes in 3 s")
        finally:
            if not work.done():
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                await asyncio.wait([work])
            error = work.exception()
        if error is not None:
            raise error
        headers = os.pread(fd, HEADERS_BYTES, 0)
        if self._session is not None and snapshot_digest(headers, size) != head.digest:
            raise Stranger("the snapshot is not the one that it has put a tag on")

    async def _more(self, limit: int = HEAD_BYTES_MAX) -> None:
        data = await self._loop.sock_recv(self._sock, HEAD_BYTES_MAX)
        if not data:
            raise PeerError("it has closed the connection")
        self._unread += data
        if len(self._unread) > limit + HEAD_BYTES_MAX:
            raise PeerError("an answer without an end")


@contextlib.asynccontextmanager
async def connected(
    address: str, key: bytes | None, uid: str | None = None
) -> AsyncIterator[PeerConnection]:
    """Connect to `host:port`, to a peer that has the key. Raises OSError, TimeoutError, PeerError.

    `uid`: of the expected pod; None: any pod of the job.
    """
    host, _, text = address.rpartition(":")
    port = whole_number(text, 1, PORT_MAX)
    if not host or port is None:
        raise PeerError(f"no address: {address[:100]!r}")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_SECONDS):
        family, where = await _place(host.strip("[]"), port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
        except BaseException:
            sock.close()
            raise
    with sock:
        peer = PeerConnection(sock, address)
        if key is not None:
            await peer.greet(key, uid)
        yield peer


async def _place(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Family and address of a host.  Raises OSError.

    An address is not looked up: that takes a thread, and there are thousands of agents.
    """
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        loop = asyncio.get_running_loop()
        family, _, _, _, where = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        return family, where
    return socket.AF_INET, (host, port)
