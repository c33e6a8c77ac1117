"""Plain requests to an agent, by a client of the tests' own, with the tags that a key asks for."""

from __future__ import annotations

import http.client
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tests.watching import PATIENCE_SECONDS
from unbroken.wire.proof import (
    DIGEST_HEADER,
    HELLO_PATH,
    NONCE_BYTES,
    NONCE_HEADER,
    TAG_HEADER,
    TAGGED,
    Asked,
    Seal,
    Session,
    Unseal,
    answer_tag,
    digest_of,
    greeted,
    request_tag,
    snapshot_digest,
)
from unbroken.wire.snapshot import HEADERS_BYTES


class AgentRequests:
    """A connection to an agent; `key` None: the agent has none."""

    def __init__(self, host: str, port: int, key: bytes | None, uid: str | None = None) -> None:
        self.connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
        self._session: Session | None = None
        self._count = 0
        if key is not None:
            nonce = os.urandom(NONCE_BYTES)
            self.connection.request("GET", HELLO_PATH, headers={NONCE_HEADER: nonce.hex()})
            answer = self.connection.getresponse()
            assert answer.status == 200, answer.read()
            self._session = greeted(key, nonce, uid, HELLO_PATH, answer.read())

    def close(self) -> None:
        """Close it."""
        self.connection.close()

    def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """One request; its answer must be the agent's."""
        sent = self.tagged(method, path, body, headers)
        self.connection.request(method, path, body, sent)
        answer = self.connection.getresponse()
        content = answer.read()
        is_large = method == "GET" and path.count("/") > 5
        if self._session is not None:
            digest = answer.headers.get(DIGEST_HEADER, "")
            assert is_large or digest == digest_of(content)
            wanted = answer_tag(self._session, self._count - 1, answer.status, digest)
            assert answer.headers.get(TAG_HEADER) == wanted, (answer.status, content)
        return answer.status, content, answer.headers

    def tagged(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> dict[str, str]:
        """The headers of the next request."""
        sent = dict(headers)
        if body is not None or method in ("POST", "PUT"):
            sent.setdefault("Content-Length", str(len(body or b"")))
        if self._session is not None:
            is_copy = method == "PUT"
            size = int(sent.get("Content-Length", "0"))
            head = (body or b"")[:HEADERS_BYTES]
            digest = snapshot_digest(head, size) if is_copy else digest_of(body or b"")
            sent.setdefault(DIGEST_HEADER, digest)
            asked = Asked(method, path, tuple(sent.get(name, "") for name in TAGGED))
            sent[TAG_HEADER] = request_tag(self._session, self._count, asked)
            self._count += 1
        return sent


@dataclass
class RawLink:
    """A link, frame by frame."""

    socket: aiohttp.ClientWebSocketResponse
    seal: Seal
    unseal: Unseal

    async def send(self, text: str | bytes) -> None:
        """A frame with its tag."""
        await self.socket.send_bytes(self.seal(text if isinstance(text, bytes) else text.encode()))

    async def receive(self) -> str:
        """The next frame, whose tag must be right."""
        return self.unseal(await self.socket.receive_bytes()).decode()


@asynccontextmanager
async def raw_link(port: int, key: bytes, query: str = "") -> AsyncIterator[RawLink]:
    """A link to the agent at a port, which is taken for who has the key."""
    nonce, target = os.urandom(NONCE_BYTES), f"/v1/link{query}"
    address, headers = f"http://127.0.0.1:{port}{target}", {NONCE_HEADER: nonce.hex()}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, headers=headers) as socket,
    ):
        found = greeted(key, nonce, None, target, await socket.receive_bytes())
        link = RawLink(socket, Seal(found.down), Unseal(found.up))
        await link.send(b"")
        yield link
