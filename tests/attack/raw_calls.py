"""Signed calls of the cluster API as bytes, so that a test can send what no client would."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.cluster_api.api_program import JSON, KEY
from unbroken.cluster_api.signatures import Credential, Message, sign
from unbroken.kube.clock import wall

SECONDS = 30.0
Headers = list[tuple[bytes, bytes]]


@dataclass
class Captured:
    """A request as somebody has seen it on the wire."""

    headers: Headers
    body: bytes
    line: bytes = b"POST / HTTP/1.1"
    first: Headers = field(default_factory=list)
    """Headers that are put before the others."""

    def header(self, name: bytes) -> bytes:
        """A header's value."""
        return dict(self.headers)[name]

    def with_header(self, name: bytes, value: bytes) -> Captured:
        """The request with one header changed, or added."""
        others = [one for one in self.headers if one[0] != name]
        return Captured([*others, (name, value)], self.body, self.line, self.first)

    @property
    def data(self) -> bytes:
        """The bytes of the request."""
        lines = (b"%s: %s" % one for one in (*self.first, *self.headers))
        return b"\r\n".join((self.line, *lines, b"", self.body))


@dataclass(frozen=True)
class Reply:
    """An answer; `code` is empty for a success."""

    status: int
    body: Any

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.body["__type"]) if self.status != 200 else ""


def captured(
    endpoint: str,
    operation: str,
    members: dict[str, Any],
    more: Iterable[tuple[str, str]] = (),
    key: Credential = KEY,
) -> Captured:
    """A call as boto3 signs it: the same headers, and nothing that makes it unique."""
    return signed(endpoint, operation, json.dumps(members).encode(), more, key)


def signed(
    endpoint: str,
    operation: str,
    body: bytes,
    more: Iterable[tuple[str, str]] = (),
    key: Credential = KEY,
) -> Captured:
    """A call with any body."""
    headers = {
        "host": urlsplit(endpoint).netloc,
        "content-type": JSON,
        "x-amz-target": f"SageMaker.{operation}",
        **dict(more),
    }
    made = sign(Message("POST", "/", "", headers, body), key, "us-west-2", wall())
    made["content-length"] = str(len(body))
    return Captured([(name.encode(), value.encode()) for name, value in made.items()], body)


def connection(endpoint: str) -> socket.socket:
    """A connection to the server."""
    place = urlsplit(endpoint)
    return socket.create_connection((str(place.hostname), place.port or 80), SECONDS)


def exchange(endpoint: str, data: bytes) -> bytes:
    """The first answer of the server to some bytes; empty if it closes without one."""
    with connection(endpoint) as link:
        try:
            link.sendall(data)
            said = b""
            while not _is_whole(said) and (more := link.recv(65536)):
                said += more
        except ConnectionError:
            return b""
    return said


def _is_whole(said: bytes) -> bool:
    head, end, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    return bool(end) and length is not None and len(body) >= int(length[1])


def send(endpoint: str, request: Captured) -> Reply:
    """The answer to a request."""
    said = exchange(endpoint, request.data)
    head, _, body = said.partition(b"\r\n\r\n")
    return Reply(int(head.split(b" ", 2)[1]), json.loads(body))
