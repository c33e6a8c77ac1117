"""Sessions of port forwarding, and their connections to ports of pods.

Port forwarding over a WebSocket, in both protocols that clients speak.

`SPDY/3.1+portforward.k8s.io` (kubectl 1.31 and later): binary messages carry a SPDY connection, in
which each forwarded connection is a stream for data and a stream for an error text.
`v4.channel.k8s.io` (the Python client): the first byte of each message is its channel, two
channels for each port.  Source: kubelet v1.33, portforward/httpstream.go and websocket.go.

Frames of SPDY/3.1 are read and written as kubectl uses SPDY for port forwarding. The side of a
server: it reads all frames and writes only those that port forwarding needs. There is no flow
control, because kubectl and kubelet have none (moby/spdystream v0.5). Source: SPDY Protocol, Draft
3.1, sections 2.2, 2.6 and 2.6.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from aiohttp import WSCloseCode, WSMsgType, web

from unbroken.errors import PeerError, SpecError, WorldError
from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.local.listeners import strangers

VERSION = 3
CONTROL_BYTES = 16 * 1024
"""Longest control frame.  Those of kubectl have less than 200 bytes."""
HEADERS_BYTES = 16 * 1024
"""Longest header block, decompressed."""
HEADERS_MAX = 64
"""Headers of one block."""
HEAD = struct.Struct(">II")
"""Stream or version and type; flags (8 bits) and length (24 bits)."""
FIN = 1
SYN_STREAM, SYN_REPLY, RST_STREAM, SETTINGS, PING, GOAWAY, HEADERS, WINDOW_UPDATE = (
    *range(1, 5),
    *range(6, 10),
)
PROTOCOL_ERROR, REFUSED_STREAM, CANCEL = 1, 3, 5
"""Status codes of RST_STREAM."""

_NAMES = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language "
    "accept-ranges age allow authorization cache-control connection content-base content-encoding "
    "content-language content-length content-location content-md5 content-range content-type date "
    "etag expect expires from host if-match if-modified-since if-none-match if-range "
    "if-unmodified-since last-modified location max-forwards pragma proxy-authenticate "
    "proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status"
)
_TAIL = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request"
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented"
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, "
    "Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _with_lengths(*texts: str) -> bytes:
    return b"".join(struct.pack(">I", len(text)) + text.encode() for text in texts)


DICTIONARY = (
    _with_lengths(*_NAMES.split(), "200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie")
    + _with_lengths("keep-alive", "origin")
    + _TAIL.encode()
)
"""Initial dictionary for the compression of headers (section 2.6.10.1)."""


class SpdyError(PeerError):
    """The other side broke the protocol: nothing after this can be understood."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A new stream of the client."""

    stream: int
    headers: Mapping[str, str]
    """Names in lower case."""
    is_final: bool
    """The client sends nothing on this stream."""


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a stream; those of a long frame come in parts."""

    stream: int
    data: bytes
    is_final: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The client has given up a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Pinged:
    """The client wants the same number back."""

    number: int


Frame = Opened | Data | Reset | Pinged


class _Unread(NamedTuple):
    """The rest of a data frame, whose bytes still arrive."""

    stream: int
    left: int
    is_final: bool


class Reader:
    """Make frames of bytes.  It holds at most one control frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._unread: _Unread | None = None
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._last = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete now; SpdyError if the bytes are no frames."""
        self._buffer += data
        result: list[Frame] = []
        at = 0
        while (end := self._next(at, result)) > at:
            at = end
        del self._buffer[:at]
        return result

    def _next(self, at: int, found: list[Frame]) -> int:
        """Read one frame or a part of one; the place of the next, `at` if bytes are missing."""
        have = len(self._buffer) - at
        if self._unread is not None:
            return self._data(at, have, self._unread, found) if have else at
        if have < HEAD.size:
            return at
        first: int
        second: int
        first, second = HEAD.unpack_from(self._buffer, at)
        flags, length = second >> 24, second & 0xFFFFFF
        begin = at + HEAD.size
        if not first >> 31:
            self._unread = _Unread(first, length, bool(flags & FIN))
            return self._data(begin, have - HEAD.size, self._unread, found)
        if first >> 16 & 0x7FFF != VERSION:
            raise SpdyError(f"SPDY version {first >> 16 & 0x7FFF} instead of {VERSION}")
        if length > CONTROL_BYTES:
            raise SpdyError(f"control frame of {length} bytes; at most {CONTROL_BYTES} are taken")
        if have - HEAD.size < length:
            return at
        body = bytes(self._buffer[begin : begin + length])
        self._control(first & 0xFFFF, flags, body, found)
        return begin + length

    def _data(self, at: int, have: int, unread: _Unread, found: list[Frame]) -> int:
        size = min(have, unread.left)
        left = unread.left - size
        self._unread = unread._replace(left=left) if left else None
        part = bytes(self._buffer[at : at + size])
        is_final = unread.is_final and not left
        if part or is_final:
            found.append(Data(unread.stream, part, is_final))
        return at + size

    def _control(self, kind: int, flags: int, body: bytes, found: list[Frame]) -> None:
        sizes = {SYN_STREAM: 10, SYN_REPLY: 4, RST_STREAM: 8, PING: 4, HEADERS: 4}
        if len(body) < sizes.get(kind, 0):
            raise SpdyError(f"control frame {kind} of {len(body)} bytes is too short")
        if kind == SYN_STREAM:
            found.append(self._opened(flags, body))
        elif kind == RST_STREAM:
            found.append(Reset(_stream(body)))
        elif kind == PING:
            found.append(Pinged(int.from_bytes(body[:4], "big")))
        elif kind in (SYN_REPLY, HEADERS):
            # Nobody needs them, but the compression of all header blocks is one stream.
            self._headers(body[4:])

    def _opened(self, flags: int, body: bytes) -> Opened:
        stream = _stream(body)
        if stream % 2 == 0 or stream <= self._last:
            raise SpdyError(f"stream {stream} of a client must be odd and above {self._last}")
        self._last = stream
        return Opened(stream, self._headers(body[10:]), bool(flags & FIN))

    def _headers(self, block: bytes) -> Mapping[str, str]:
        try:
            plain = self._inflate.decompress(block, HEADERS_BYTES)
        except zlib.error as error:
            raise SpdyError(f"header block cannot be decompressed: {error}") from error
        if self._inflate.unconsumed_tail or self._inflate.eof:
            raise SpdyError(f"header block of more than {HEADERS_BYTES} bytes, or at its end")
        return _pairs(plain)


def _stream(body: bytes) -> int:
    return int.from_bytes(body[:4], "big") & 0x7FFFFFFF


def _pairs(plain: bytes) -> Mapping[str, str]:
    """Headers of a decompressed block: their number, then a name and a value each."""
    texts: list[str] = []
    if len(plain) < 4:
        raise SpdyError("header block without the number of its headers")
    count, at = int.from_bytes(plain[:4], "big"), 4
    if count > HEADERS_MAX:
        raise SpdyError(f"header block with {count} headers; at most {HEADERS_MAX} are taken")
    for _ in range(2 * count):
        size = int.from_bytes(plain[at : at + 4], "big")
        if at + 4 + size > len(plain):
            raise SpdyError("header block ends within a header")
        texts.append(plain[at + 4 : at + 4 + size].decode("utf-8", "replace"))
        at += 4 + size
    return {name.lower(): value for name, value in zip(texts[::2], texts[1::2], strict=True)}


class Writer:
    """Make bytes of what a server says; they must be sent in the order in which they are made."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def reply(self, stream: int) -> bytes:
        """Accept a stream of the client."""
        block = self._deflate.compress(struct.pack(">I", 0))
        block += self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _control_frame(SYN_REPLY, struct.pack(">I", stream) + block)

    @staticmethod
    def data(stream: int, data: bytes, *, is_final: bool = False) -> bytes:
        """Bytes of a stream (below 16 MiB), with its end from this side if `is_final`."""
        flags = FIN if is_final else 0
        return HEAD.pack(stream, flags << 24 | len(data)) + data

    @staticmethod
    def reset(stream: int, status: int) -> bytes:
        """Refuse or give up a stream."""
        return _control_frame(RST_STREAM, struct.pack(">II", stream, status))

    @staticmethod
    def ping(number: int) -> bytes:
        """Answer a ping."""
        return _control_frame(PING, struct.pack(">I", number))


def _control_frame(kind: int, body: bytes) -> bytes:
    return HEAD.pack(1 << 31 | VERSION << 16 | kind, len(body)) + body


TUNNEL = "SPDY/3.1+portforward.k8s.io"
CHANNELS = "v4.channel.k8s.io"
PROTOCOLS = (TUNNEL, CHANNELS)
MESSAGE_BYTES = 2 << 20
"""Longest message of a client.  The Python client sends up to 1 MiB at once, kubectl 32 KiB."""
CONNECTIONS_MAX = 128
"""Forwarded connections at once in one session; more are refused."""
PORTS_MAX = 64
"""Ports of one session of channels, whose number is one byte for two channels each."""
ERROR, DATA = "error", "data"


@dataclass(slots=True)
class _Pair:
    """The two streams of one forwarded connection."""

    request: str
    port: int
    streams: dict[str, int]
    """Streams by type: `error` and `data`."""
    connection: PodConnection | None = None
    task: asyncio.Task[None] | None = None


class SpdySession:
    """Connections that one client forwards over one tunnel."""

    def __init__(self, pod: ForwardedPod, socket: web.WebSocketResponse) -> None:
        self._pod = pod
        self._socket = socket
        self._reader = Reader()
        self._writer = Writer()
        self._pairs: dict[str, _Pair] = {}
        self._streams: dict[int, _Pair] = {}

    async def run(self) -> None:
        """Forward until the client leaves or breaks the protocol."""
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._receive(tasks)
            finally:
                for pair in list(self._pairs.values()):
                    self._forget(pair)
        await self._socket.close()

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY:
                    raise SpdyError(f"a message of type {message.type.name}")
                for frame in self._reader.feed(message.data):
                    await self._take(frame, tasks)
        except SpdyError as error:
            text = str(error).encode()[:120]
            await self._socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=text)
        except ConnectionError:
            return  # the client has left

    async def _take(self, frame: Frame, tasks: asyncio.TaskGroup) -> None:
        match frame:
            case Opened():
                await self._open(frame, tasks)
            case Data(stream=stream, data=data, is_final=is_final):
                pair = self._streams.get(stream)
                if pair is not None and pair.connection and stream == pair.streams[DATA]:
                    await pair.connection.deliver(data, is_final=is_final)
            case Reset(stream=stream):
                await self._reset(stream)
            case Pinged(number=number):
                await self._socket.send_bytes(self._writer.ping(number))

    async def _open(self, frame: Opened, tasks: asyncio.TaskGroup) -> None:
        pair, kind = self._pair_of(frame)
        if pair is None:
            await self._socket.send_bytes(self._writer.reset(frame.stream, REFUSED_STREAM))
            return
        pair.streams[kind] = frame.stream
        self._pairs[pair.request] = pair
        self._streams[frame.stream] = pair
        await self._socket.send_bytes(self._writer.reply(frame.stream))
        if len(pair.streams) == 2:
            pair.connection = PodConnection(self._pod, pair.port)
            pair.task = tasks.create_task(self._forward(pair, pair.connection))

    def _pair_of(self, frame: Opened) -> tuple[_Pair | None, str]:
        """The connection that a new stream belongs to, None if it is refused, and its type."""
        kind = frame.headers.get("streamtype", "")
        try:
            port = port_of(frame.headers.get("port", ""))
        except SpecError:
            return None, kind
        # A client without request IDs opens the stream for errors first, then the one for data.
        first = frame.stream - (2 if kind == DATA else 0)
        request = frame.headers.get("requestid", "") or f"stream {first}"
        pair = self._pairs.get(request)
        if kind not in (ERROR, DATA) or len(request) > 100:
            return None, kind
        if pair is None:
            is_full = len(self._pairs) >= CONNECTIONS_MAX
            return (None if is_full else _Pair(request, port, {})), kind
        return (None if kind in pair.streams or pair.port != port else pair), kind

    async def _reset(self, stream: int) -> None:
        """The client has given up one of the streams: end the connection and the other stream."""
        pair = self._streams.get(stream)
        if pair is None:
            return
        error = pair.streams.get(ERROR)
        self._forget(pair)
        if error is not None and error != stream:
            await self._socket.send_bytes(self._writer.data(error, b"", is_final=True))

    async def _forward(self, pair: _Pair, connection: PodConnection) -> None:
        text = b""
        error, data = pair.streams[ERROR], pair.streams[DATA]
        end = self._writer.data(data, b"", is_final=True)
        with contextlib.suppress(ConnectionError):  # the client has left
            try:
                await connection.run(partial(self._send, data))
            except BrokenError:
                # kubectl ends all its connections if there is a text.
                end = self._writer.reset(data, CANCEL)
            except WorldError as failure:
                text = str(failure).encode()
            self._forget(pair)
            await self._socket.send_bytes(self._writer.data(error, text, is_final=True))
            await self._socket.send_bytes(end)

    async def _send(self, stream: int, data: bytes) -> None:
        await self._socket.send_bytes(self._writer.data(stream, data))

    def _forget(self, pair: _Pair) -> None:
        self._pairs.pop(pair.request, None)
        for stream in pair.streams.values():
            self._streams.pop(stream, None)
        if pair.task is not None and pair.task is not asyncio.current_task():
            pair.task.cancel()


class ChannelSession:
    """One connection to each of the ports, all opened at once."""

    def __init__(
        self, pod: ForwardedPod, socket: web.WebSocketResponse, ports: Sequence[int]
    ) -> None:
        self._pod = pod
        self._socket = socket
        self._ports = ports

    async def run(self) -> None:
        """Forward until the client leaves or all connections have ended."""
        with contextlib.suppress(ConnectionError):  # the client has left
            for number, port in enumerate(self._ports):
                for channel in (2 * number, 2 * number + 1):
                    await self._socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
            connections = [PodConnection(self._pod, port) for port in self._ports]
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(self._receive(connections))
                forwarding = [
                    tasks.create_task(self._forward(2 * number, connection))
                    for number, connection in enumerate(connections)
                ]
                ended = tasks.create_task(_all_ended(forwarding))
                await asyncio.wait([receiving, ended], return_when=asyncio.FIRST_COMPLETED)
                for task in (receiving, ended, *forwarding):
                    task.cancel()
        await self._socket.close()

    async def _receive(self, connections: Sequence[PodConnection]) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            number, is_error = divmod(message.data[0], 2)
            if not is_error and number < len(connections):
                await connections[number].deliver(message.data[1:])

    async def _forward(self, channel: int, connection: PodConnection) -> None:
        with contextlib.suppress(ConnectionError):  # the client has left
            try:
                await connection.run(partial(self._send, channel))
            except WorldError as failure:
                await self._send(channel + 1, str(failure).encode())

    async def _send(self, channel: int, data: bytes) -> None:
        await self._socket.send_bytes(bytes([channel]) + data)


async def _all_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


def port_of(text: str) -> int:
    """The number of a port; SpecError if the text is none."""
    port = whole_number(text, 1, PORT_MAX)
    if port is None:
        raise SpecError(f"port must be a number from 1 to {PORT_MAX}, not {text[:100]!r}")
    return port


def ports_of(values: Sequence[str]) -> list[int]:
    """The ports that a client of channels asks for; SpecError if they are none or too many.

    They stand in one value with commas, in several values, or both.
    """
    result = [port_of(text) for value in values for text in value.split(",")]
    if not 0 < len(result) <= PORTS_MAX:
        raise SpecError(f"port forwarding takes 1 to {PORTS_MAX} ports, not {len(result)}")
    return result


CHUNK = 32 * 1024
CONNECT_SECONDS = 5.0
STALL_SECONDS = 30.0
"""A program that takes none of the client's data for this long loses the connection.  While the
data waits, the client's other connections in the same session wait as well."""
HELD_BYTES = 256 * 1024
"""Data of a client that is held for a program that does not read yet."""


class BrokenError(WorldError):
    """The program broke a connection that it had accepted; others may work."""


@dataclass(frozen=True, slots=True)
class ForwardedPod:
    """The pod whose ports are forwarded."""

    name: str
    address: Callable[[], str]
    """Return the pod's address, or an empty text if the pod is gone: another may have it then."""
    spec: Mapping[str, Any]


class PodConnection:
    """A connection to a program of a pod."""

    def __init__(self, pod: ForwardedPod, port: int) -> None:
        self._pod = pod
        self._port = port
        self._opened: asyncio.Future[asyncio.StreamWriter | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._is_stalled = False

    async def run(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Connect, and send the client what the program says, until the program closes.

        WorldError, with a text for the client, if there is no connection; BrokenError if the
        program breaks it.  ConnectionError is that of `send`.
        """
        try:
            reader, writer = await self._open()
        finally:
            if not self._opened.done():
                self._opened.set_result(None)
        try:
            while data := await self._read(reader):
                await send(data)
            writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def deliver(self, data: bytes, *, is_final: bool = False) -> None:
        """Give the program the client's data; a program that has closed gets none."""
        writer = await self._opened
        if writer is None or writer.is_closing():
            return
        try:
            writer.write(data)
            async with asyncio.timeout(STALL_SECONDS):
                await writer.drain()
            if is_final:
                writer.write_eof()
        except TimeoutError:
            self._is_stalled = True
            writer.transport.abort()
        except OSError:
            return  # `run` tells the client

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._pod.address()
        if not address:
            raise self._error("the pod is gone")
        if others := strangers(address, self._port, self._pod.spec):
            # They would get what the client sends to the pod, such as a token.
            raise self._error(f"user {others[0]} of this machine listens there")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(address, self._port, limit=CHUNK)
        except TimeoutError as error:
            raise self._error(f"no answer within {CONNECT_SECONDS:g} s") from error
        except OSError as error:
            why = f"no connection to {address}: {os.strerror(error.errno or 0)}"
            raise self._error(why) from error
        writer.transport.set_write_buffer_limits(high=HELD_BYTES)
        self._opened.set_result(writer)
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            data = await reader.read(CHUNK)
        except OSError as error:
            raise BrokenError(self._text("the program broke the connection")) from error
        if self._is_stalled:
            raise BrokenError(self._text(f"the program took no data for {STALL_SECONDS:g} s"))
        return data

    def _error(self, why: str) -> WorldError:
        return WorldError(self._text(why))

    def _text(self, why: str) -> str:
        return f"error forwarding port {self._port} to pod {self._pod.name}: {why}"
