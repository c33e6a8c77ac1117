"""Copies of snapshots over HTTP: agents send them to their buddies, and fetch them back.

A sender asks first (`Expect: 100-continue`), so that a refusal costs no transfer. A copy that is
not received to its end, or is not whole, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from io import FileIO
from typing import Any, Protocol

from aiohttp import hdrs, web

from unbroken.core.snapshots.replication import Arrival, NextRound
from unbroken.errors import PeerError
from unbroken.foreign_numbers import whole_number
from unbroken.wire.codec import Natural, load, read
from unbroken.wire.proof import DIGEST_HEADER, snapshot_digest
from unbroken.wire.snapshot import HEADERS_BYTES

PATH = "/v1/snapshots"
NAME_PATH = PATH + "/{name}"
RANK_PATH = NAME_PATH + "/{rank:[0-9]{1,9}}"
POINT_PATH = RANK_PATH + "/{attempt:[0-9]{1,9}}/{step:[0-9]{1,18}}"
KEEP_HEADER = "Unbroken-Keep"
"""The step of the attempt that the sender needs besides the sent one, or `none`.

With a step, copies of older attempts are dropped. Without this header the newest two are kept.
"""
SILENCE_SECONDS = 20.0
"""Seconds without data after which a peer counts as gone."""
GIVE_BYTES = 1 << 20
Key = tuple[str, int]
Point = tuple[int, int]


class RequestRefused(PeerError):
    """Why a copy is refused, and the status code for it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class CopySink(Protocol):
    """A copy that is being received."""

    def write(self, data: bytes) -> None:
        """Write the next piece. Raises Refused."""

    async def finish(self) -> None:
        """Check the complete copy, and keep it. Raises Refused."""

    def discard(self) -> None:
        """Release the copy, unless it is kept."""


class CopyStore(Protocol):
    """Copies that an agent keeps for others."""

    def receive(
        self, key: Key, point: Point, size: int, needed: Collection[int] | None
    ) -> CopySink | None:
        """Begin to receive a copy; None: it is here already. Raises Refused.

        `needed`: the other steps of its attempt that the sender needs; None: not given.
        """

    def sizes(self, key: Key) -> dict[Point, int]:
        """Return the sizes of the copies of a rank."""

    def descriptor(self, key: Key, point: Point) -> int | None:
        """Return a descriptor of the memory that holds it; a new one, to be closed by the
        caller."""

    async def agree(self, name: str, attempt: int, node: int, told: Arrival) -> NextRound | None:
        """Take what a node holds; return the next round of all nodes, None: not known yet. Raises
        Refused."""

    def summary(self) -> dict[str, Any]:
        """Return the progress of replication, for people."""

    def node(self) -> int | None:
        """This agent's node rank."""


@dataclass(frozen=True, slots=True)
class _Sender:
    """The sender of an `Arrival`, from the rest of a request."""

    attempt: Natural
    node: Natural


class SnapshotRoutes:
    """HTTP handlers; the copies are requested with the first request."""

    def __init__(self, copies: Callable[[], CopyStore]) -> None:
        self._copies = copies

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the handlers to the application."""
        router.add_route("GET", PATH, self._summary)
        router.add_route("POST", NAME_PATH, self._agree)
        router.add_route("GET", RANK_PATH, self._list)
        router.add_route("GET", POINT_PATH, self._get)
        router.add_route("PUT", POINT_PATH, self._put, expect_handler=_nothing_yet)

    async def _summary(self, _: web.Request) -> web.Response:
        """Answer with the state of replication: the buddy, the copies sent and held."""
        return web.json_response(self._copies().summary())

    async def _list(self, request: web.Request) -> web.Response:
        """List the copies of a rank's snapshots."""
        copies = self._copies()
        sizes = copies.sizes(_key(request))
        result = [
            {"attempt": attempt, "step": step, "bytes": sizes[attempt, step]}
            for attempt, step in sorted(sizes, reverse=True)
        ]
        return web.json_response({"node": copies.node(), "snapshots": result})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Send a copy of a snapshot."""
        fd = self._copies().descriptor(_key(request), _point(request))
        if fd is None:
            raise web.HTTPNotFound(reason="no such snapshot is here")
        with FileIO(fd) as file:
            return await _give(request, file)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        """Receive a copy of a snapshot from another agent."""
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired
        needed = _needed(request.headers.get(KEEP_HEADER, ""))
        incoming = self._copies().receive(_key(request), _point(request), size, needed)
        if incoming is not None:
            await _receive(request, incoming, size)
        return web.Response()

    async def _agree(self, request: web.Request) -> web.Response:
        """Exchange with another agent which snapshots are complete."""
        sender, told = _arrival(await request.read())
        name = request.match_info["name"]
        next_round = await self._copies().agree(name, sender.attempt, sender.node, told)
        return (
            web.Response(status=204)
            if next_round is None
            else web.json_response(asdict(next_round))
        )


async def _give(request: web.Request, file: FileIO) -> web.StreamResponse:
    """Send a copy by the kernel: none of it passes through this process."""
    size = os.fstat(file.fileno()).st_size
    digest = snapshot_digest(os.pread(file.fileno(), HEADERS_BYTES, 0), size)
    answer = web.StreamResponse(headers={hdrs.CONTENT_LENGTH: str(size), DIGEST_HEADER: digest})
    await answer.prepare(request)
    loop = asyncio.get_running_loop()
    for begin in range(0, size, GIVE_BYTES):
        if request.transport is None:
            raise ConnectionResetError
        async with asyncio.timeout(SILENCE_SECONDS):
            count = min(GIVE_BYTES, size - begin)
            await loop.sendfile(request.transport, file, begin, count, fallback=False)
        # Data that the socket accepts at once is written without a turn of the loop.
        await asyncio.sleep(0)  # noqa: TID251  (a turn, no time)
    await answer.write_eof()
    return answer


async def _receive(request: web.Request, incoming: CopySink, size: int) -> None:
    begin = bytearray()
    try:
        if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # As aiohttp itself does: the answer is yet to begin.
        while not request.content.at_eof():
            async with asyncio.timeout(SILENCE_SECONDS):
                data = await request.content.readany()
            begin += data[: HEADERS_BYTES - len(begin)]
            incoming.write(data)
        told = request.headers.get(DIGEST_HEADER)
        if told is not None and told != snapshot_digest(bytes(begin), size):
            raise RequestRefused(422, "its headers are not the ones that were announced")
        await incoming.finish()
    except TimeoutError:
        raise RequestRefused(408, f"nothing came for {SILENCE_SECONDS:g} s") from None
    except ConnectionError as error:
        raise RequestRefused(400, "the sender has gone") from error
    finally:
        incoming.discard()


async def _nothing_yet(_: web.Request) -> None:
    """Wait: the sender continues once it is known that the copy is wanted."""


def _needed(text: str) -> Collection[int] | None:
    number = whole_number(text)
    if number is not None:
        return {number}
    return set() if text == "none" else None


def _arrival(body: bytes) -> tuple[_Sender, Arrival]:
    """Return the sender of a request and what it holds. Raises Refused."""
    try:
        told = load(body)
        return read(_Sender, told, "arrival"), read(Arrival, told, "arrival")
    except PeerError as error:
        raise RequestRefused(422, str(error)) from None


def _key(request: web.Request) -> Key:
    return request.match_info["name"], int(request.match_info["rank"])


def _point(request: web.Request) -> Point:
    return int(request.match_info["attempt"]), int(request.match_info["step"])
