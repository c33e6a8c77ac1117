"""A client of SPDY that makes frames, and what kubectl has sent."""

from __future__ import annotations

import struct
import zlib

from unbroken.local.node.port_forwarding import DICTIONARY, Data, Opened, Pinged, Reset

# Sent by kubectl 1.32.4 for the first connection of `kubectl port-forward pod/web 18080:8000`.
RECORDED = bytes.fromhex(
    "800300010000003e0000000100000000000078f9e3c6a7c202253a060606ce2248fc6482d22da30138e59514a5"
    "26e6420b17d65450d0430aea22709eb030303000000000ffff0000000101000000800300010000001c00000003"
    "000000000000826a46550a2a8712b1a844b302000000ffff000000030000000568656c6c6f"
)


class Client:
    """Makes the frames of a client."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(9, zdict=DICTIONARY)

    def control(self, kind: int, body: bytes, *, version: int = 3, flags: int = 0) -> bytes:
        """Return a control frame of any kind."""
        head = struct.pack(">II", 1 << 31 | version << 16 | kind, flags << 24 | len(body))
        return head + body

    def block(self, plain: bytes) -> bytes:
        """A header block of these bytes."""
        return self._deflate.compress(plain) + self._deflate.flush(zlib.Z_SYNC_FLUSH)

    def opened(self, stream: int, headers: dict[str, str], *, is_final: bool = False) -> bytes:
        """SYN_STREAM."""
        plain = struct.pack(">I", len(headers))
        for text in (one for pair in headers.items() for one in pair):
            plain += struct.pack(">I", len(text)) + text.encode()
        body = struct.pack(">IIH", stream, 0, 0) + self.block(plain)
        return self.control(1, body, flags=1 if is_final else 0)


def script() -> tuple[bytes, list[object]]:
    """Frames of each kind, and what they are."""
    client = Client()
    sent = (
        client.opened(1, {"port": "80", "streamtype": "error"}, is_final=True)
        + client.opened(3, {"port": "80"})
        + client.control(4, b"\0\0\0\0")  # SETTINGS
        + client.control(8, struct.pack(">I", 3) + client.block(struct.pack(">I", 0)))  # HEADERS
        + struct.pack(">II", 3, 5)
        + b"hello"
        + client.control(6, struct.pack(">I", 7))
        + client.opened(5, {"after": "headers"})
        + struct.pack(">II", 3, 1 << 24)
        + client.control(3, struct.pack(">II", 3, 5))
    )
    frames: list[object] = [
        Opened(1, {"port": "80", "streamtype": "error"}, is_final=True),
        Opened(3, {"port": "80"}, is_final=False),
        Data(3, b"hello", is_final=False),
        Pinged(7),
        Opened(5, {"after": "headers"}, is_final=False),
        Data(3, b"", is_final=True),
        Reset(3),
    ]
    return sent, frames
