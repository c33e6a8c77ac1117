"""Mutual proof of two programs that they have their job's key, without sending it.

The connecting side sends a nonce. The agent answers with a greeting: its own nonce, the uid of its
pod, and a proof over both. From these each side derives the keys of the session, which are used on
this connection alone. Every message then carries a tag over its number and its content. So forged,
repeated, missing and reordered messages are detected. (docs/design/agent-authentication.md)
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from hmac import compare_digest
from typing import NamedTuple

from unbroken.errors import PeerError

HELLO_PATH = "/v1/hello"
"""Path that returns a greeting; requests of the same connection are tagged from then on."""
NONCE_HEADER, TAG_HEADER = "Unbroken-Nonce", "Unbroken-Tag"
DIGEST_HEADER = "Unbroken-Digest"
"""SHA-256 of a body; for a snapshot see `snapshot_digest`."""
NONCE_BYTES, PROOF_BYTES, TAG_BYTES = 16, 32, 16
GREETING_BYTES_MAX = NONCE_BYTES + PROOF_BYTES + 256
_LABEL = b"unbroken-agent/v1"
_BLOCK_BYTES = 64
"""Block size of SHA-256."""
_INNER, _OUTER = bytes(i ^ 0x36 for i in range(256)), bytes(i ^ 0x5C for i in range(256))
"""Masks of HMAC for each byte of the key."""


class Stranger(PeerError):
    """A peer did not prove that it has the job's key, or is not the expected pod."""


class Session(NamedTuple):
    """The keys of one connection."""

    up: bytes
    """Key of the agent's messages."""
    down: bytes
    """Key of the operator's messages."""


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of parts, whose boundaries count."""
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, message, "sha256")


def nonce_of(text: str | None) -> bytes | None:
    """Return the nonce in a header; None: it has none."""
    if text is None or len(text) != 2 * NONCE_BYTES:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def greeting(key: bytes, asked: bytes, own: bytes, uid: str, target: str) -> tuple[bytes, Session]:
    """Return the answer of an agent to the nonce `asked`; its own nonce is new for each greeting.

    `target`: the requested path, with its query.
    """
    about = (asked, own, uid.encode(), target.encode())
    return own + mac(key, _LABEL, b"agent", *about) + uid.encode(), _session(key, about)


def greeted(key: bytes, asked: bytes, uid: str | None, target: str, message: bytes) -> Session:
    """Return the session that a greeting begins; `uid` None: of any pod of the job. Raises
    Stranger."""
    begin, end = NONCE_BYTES, NONCE_BYTES + PROOF_BYTES
    if not end <= len(message) <= GREETING_BYTES_MAX:
        raise Stranger("does not prove that it has the job's key")
    own, proof, found = message[:begin], message[begin:end], message[end:]
    about = (asked, own, found, target.encode())
    if not compare_digest(proof, mac(key, _LABEL, b"agent", *about)):
        raise Stranger("does not prove that it has the job's key")
    if uid is not None and found != uid.encode():
        name = found.decode(errors="replace")
        raise Stranger(f"is the agent of the pod with uid {name or 'unknown'}, not of {uid}")
    return _session(key, about)


def _session(key: bytes, about: tuple[bytes, ...]) -> Session:
    secret = mac(key, _LABEL, b"session", *about)
    return Session(mac(secret, b"up"), mac(secret, b"down"))


class _Tags:
    """HMAC-SHA256 (RFC 2104) over the number and content of each message of one direction.

    It equals `hmac.digest`, whose set-up takes longer than a message: an operator checks ten
    thousand of them a second.
    """

    __slots__ = ("_count", "_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK_BYTES:
            raise ValueError(f"a session's key of {len(key)} bytes; {_BLOCK_BYTES} at most")
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = sha256(padded.translate(_INNER))
        self._outer = sha256(padded.translate(_OUTER))
        self._count = 0

    def _tag(self, payload: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(self._count.to_bytes(8, "big") + payload)
        outer.update(inner.digest())
        return outer.digest()[:TAG_BYTES]


class Seal(_Tags):
    """Puts a tag before each message of one direction."""

    __slots__ = ()

    def __call__(self, payload: bytes) -> bytes:
        """Return the message with its tag."""
        tag = self._tag(payload)
        self._count += 1
        return tag + payload


class Unseal(_Tags):
    """Removes the tag of each message of one direction, in their order."""

    __slots__ = ()

    def __call__(self, message: bytes) -> bytes:
        """Return the message without its tag. Raises Stranger if the tag is wrong."""
        payload = message[TAG_BYTES:]
        if not compare_digest(message[:TAG_BYTES], self._tag(payload)):
            raise Stranger(f"sent a message {self._count} that is forged, repeated or out of order")
        self._count += 1
        return payload


class Asked(NamedTuple):
    """A request, as far as its tag covers it."""

    method: str
    target: str
    """Path and query, as they are sent."""
    headers: tuple[str, ...]
    """Values of the headers in `TAGGED`, in its order; empty: not given."""


TAGGED = ("Content-Length", DIGEST_HEADER, "Unbroken-Keep", "Unbroken-Strict")
"""Headers that change the meaning of a request."""


def request_tag(session: Session, number: int, asked: Asked) -> str:
    """Return the tag of the request of this number on its connection."""
    parts = (asked.method, asked.target, *asked.headers)
    found = mac(session.down, b"request", number.to_bytes(8, "big"), *(p.encode() for p in parts))
    return found[:TAG_BYTES].hex()


def answer_tag(session: Session, number: int, status: int, digest: str) -> str:
    """Return the tag of the answer to that request."""
    parts = (str(status), digest)
    found = mac(session.up, b"answer", number.to_bytes(8, "big"), *(p.encode() for p in parts))
    return found[:TAG_BYTES].hex()


def is_tag(given: str | None, wanted: str) -> bool:
    """True if a header has the tag; the comparison takes constant time."""
    return compare_digest((given or "").encode("utf-8", "replace"), wanted.encode())


def digest_of(body: bytes) -> str:
    """Return the value of `DIGEST_HEADER`."""
    return sha256(body).hexdigest()


def snapshot_digest(headers: bytes, size: int) -> str:
    """Return the same for a snapshot, whose body is covered by the checksums in its headers.

    SHA-256 of the whole body would delay a restore (docs/design/agent-authentication.md).
    """
    return sha256(headers + size.to_bytes(8, "big")).hexdigest()
