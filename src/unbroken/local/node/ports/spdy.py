"""Read and write frames of SPDY/3.1, as kubectl uses SPDY for port forwarding.

The side of a server: it reads all frames and writes only those that port forwarding needs.  There
is no flow control, because kubectl and kubelet have none (moby/spdystream v0.5).  Source: SPDY
Protocol, Draft 3.1, sections 2.2, 2.6 and 2.6.10.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unbroken.errors import PeerError

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
