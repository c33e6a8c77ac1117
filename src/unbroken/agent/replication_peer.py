"""One request to another agent, on a connection of its own, without a copy in this process: bodies
go from memory to the socket and back by the kernel (sendfile, recv into a mapping).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from io import FileIO
from urllib.parse import quote

from unbroken.agent_http.snapshots import PATH, Key, Point
from unbroken.errors import PeerError

CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""Without any progress."""
PROGRESS_SECONDS, PROGRESS_BYTES = 3.0, 16 * 1024 * 1024
"""Who sends less of a body is given up."""
RECEIVE_BYTES = 1024 * 1024
HEAD_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""

    @property
    def length(self) -> int:
        """Of the body."""
        found = self.headers.get("content-length", "")
        if not found.isdecimal() or len(found) > 18:
            raise PeerError("an answer without its length")
        return int(found)


class _Filling:
    """Reads a body into a file, in a thread: several at once need several cores.  The file is not
    mapped: letting go of a mapping of many pages would hold up everybody else."""

    def __init__(self, sock: socket.socket, fd: int, begin: bytes, size: int) -> None:
        self._sock, self._fd, self._size = sock, fd, size
        self.received = os.pwrite(fd, begin[:size], 0)

    def run(self) -> None:
        """Until it is full.  PeerError, OSError."""
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        while self.received < self._size:
            count = self._sock.recv_into(buffer[: self._size - self.received])
            if not count:
                raise PeerError("it has closed the connection")
            os.pwrite(self._fd, buffer[:count], self.received)
            self.received += count


class Peer:
    """A connection; `ask`, then what the request needs."""

    def __init__(self, sock: socket.socket, host: str, token: str | None) -> None:
        self._sock, self._host, self._token = sock, host, token
        self._loop = asyncio.get_running_loop()
        self._unread = b""

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Send a request's head, and a small body."""
        own = {"Host": self._host, "Connection": "close"}
        if self._token is not None:
            own["Authorization"] = f"Bearer {self._token}"
        if body:
            own["Content-Length"] = str(len(body))
        lines = [f"{name}: {value}" for name, value in {**own, **(headers or {})}.items()]
        text = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])
        async with asyncio.timeout(SILENCE_SECONDS):
            await self._loop.sock_sendall(self._sock, text.encode() + body)

    async def head(self, seconds: float = SILENCE_SECONDS) -> Head:
        """The beginning of an answer; PeerError."""
        async with asyncio.timeout(seconds):
            while b"\r\n\r\n" not in self._unread:
                await self._more()
        text, _, self._unread = self._unread.partition(b"\r\n\r\n")
        first, *rows = text.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise PeerError(f"no HTTP: {first[:100]!r}")
        pairs = (row.partition(":") for row in rows)
        return Head(int(parts[1]), {name.lower(): value.strip() for name, _, value in pairs})

    async def text(self, head: Head, limit: int = HEAD_BYTES_MAX) -> bytes:
        """A body of so many bytes at most; PeerError."""
        if head.length > limit:
            raise PeerError(f"an answer of {head.length} bytes")
        async with asyncio.timeout(SILENCE_SECONDS):
            while len(self._unread) < head.length:
                await self._more(limit)
        return self._unread[: head.length]

    async def send(self, file: FileIO, begin: int, count: int) -> None:
        """A piece of a file."""
        async with asyncio.timeout(SILENCE_SECONDS):
            await self._loop.sock_sendfile(self._sock, file, begin, count, fallback=False)

    async def receive(self, fd: int, size: int) -> None:
        """A body of that size, into a file.  PeerError: it ends early, or is slow."""
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

    async def _more(self, limit: int = HEAD_BYTES_MAX) -> None:
        data = await self._loop.sock_recv(self._sock, HEAD_BYTES_MAX)
        if not data:
            raise PeerError("it has closed the connection")
        self._unread += data
        if len(self._unread) > limit + HEAD_BYTES_MAX:
            raise PeerError("an answer without an end")


@contextlib.asynccontextmanager
async def connected(address: str, token: str | None) -> AsyncIterator[Peer]:
    """A connection to `host:port`; OSError, TimeoutError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise PeerError(f"no address: {address[:100]!r}")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_SECONDS):
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
        except BaseException:
            sock.close()
            raise
    with sock:
        yield Peer(sock, address, token)


def name_path(name: str) -> str:
    """Of all that has a name."""
    return f"{PATH}/{quote(name, safe='')}"


def path(key: Key, point: Point | None = None) -> str:
    """Of a rank's copies, or of one."""
    found = f"{name_path(key[0])}/{key[1]}"
    return found if point is None else f"{found}/{point[0]}/{point[1]}"
