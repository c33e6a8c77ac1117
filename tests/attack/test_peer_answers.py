"""Answers of peers that do not have the job's key, read before any proof.

The attack: a program at the address of a peer answers `HTTP/1.1 999...9`.  Python refuses to read
more than 4,300 digits, and the agent never asked any peer again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from unbroken.agent.snapshots.copies import Fetch
from unbroken.agent.snapshots.slots import SnapshotMemory
from unbroken.agent_http.peer import connected
from unbroken.errors import PeerError

HEADS = {
    "5,000 digits": b"HTTP/1.1 " + b"9" * 5000 + b" OK",
    "superscript digits": b"HTTP/1.1 \xb2\xb2\xb2 OK",
    "two digits": b"HTTP/1.1 20 OK",
    "four digits": b"HTTP/1.1 2000 OK",
    "a sign": b"HTTP/1.1 +20 OK",
    "no status": b"HTTP/1.1",
    "a superscript length": b"HTTP/1.1 200 OK\r\nContent-Length: \xb2",
    "a huge length": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000,
}


@asynccontextmanager
async def answering(head: bytes) -> AsyncIterator[str]:
    """A program that answers every request with this head; its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_a_malformed_answer_is_an_error_of_the_peer(head: bytes) -> None:
    async with answering(head) as address:
        with pytest.raises(PeerError):
            async with connected(address, b"k" * 32):
                pass


async def test_a_malformed_answer_is_told_and_hides_no_other_holder() -> None:
    async with answering(HEADS["5,000 digits"]) as one, answering(HEADS["a sign"]) as other:
        fetch = Fetch(("model", 0), [one, other], b"k" * 32, None, SnapshotMemory())
        assert await fetch.offers() == []
        # Both are asked at once: either may answer first.
        assert {problem.partition(": no HTTP: ")[0] for problem in fetch.problems} == {one, other}
