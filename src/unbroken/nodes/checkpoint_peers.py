"""The other members of the checkpoint memory: their addresses, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import msgspec

from unbroken.core.checkpoint_memory import in_order
from unbroken.errors import PeerError, SpecError, WorldError
from unbroken.kube.clock import monotonic
from unbroken.log_lines import Log

log = Log(__name__)

STAMP_HEADER = "Unbroken-Stamp"
"""Marks a request that a member answers from its own memory."""
CONTENTS_PATH = "/v1/members/contents"
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
"""Seconds for a member's answer, besides those for a shard's bytes."""
BYTES_PER_SECOND = 16 << 20
"""Slowest transfer of a shard between members."""
PIECE_BYTES = 1 << 20
STALL_SECONDS = 10.0
"""Longest time for which a member takes no piece of a copy: the client, which waits for the copy,
gives up after 60 s."""
PAUSE_SECONDS = 60.0
"""Longest pause between two pieces of a shard."""
SILENT_SECONDS = 5.0
"""Seconds for which a member that did not answer is not asked again."""
CONCURRENT = 32
"""Members asked at once."""

FindMembers = Callable[[], Awaitable[Iterable[str]]]
"""Returns the addresses (host:port) of the members that there are now. Raises OSError."""


class Namespace(msgspec.Struct, frozen=True):
    """The documented answer about a namespace, and its stamp."""

    num_ranks: int
    steps_to_retain_per_rank: int
    stamp: int


class HeldShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard of another member."""

    rank: int
    step: int
    stamp: int


class Contents(msgspec.Struct, frozen=True):
    """The contents of a member, by namespace."""

    capacity_bytes: int
    used_bytes: int
    members: int
    """Members that it knows, itself included."""
    settings: dict[str, tuple[int, int, int]] = {}
    shards: dict[str, list[HeldShard]] = {}


def own_host(text: str) -> str:
    """Return a member's own IP address as others write it. Raises SpecError.

    A name, or all addresses at once, would make it take itself for another member.
    """
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        raise SpecError(f"--host: expected an IP address of this node, not {text!r}") from None
    is_mapped = isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None
    if found.is_unspecified or found.is_multicast or is_mapped or "%" in text:
        raise SpecError(f"--host: expected one IP address that other nodes reach, not {text!r}")
    return str(found)


def address_of(host: str, port: int) -> str:
    """Return the address of a member, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def in_service(name: str, port: int) -> FindMembers:
    """Return the search for the members behind a headless Service of Kubernetes."""

    async def find() -> Iterable[str]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return {address_of(str(one[4][0]), port) for one in found}

    return find


def in_folder(folder: Path) -> FindMembers:
    """Return the search for the members that have a file in a folder, named by their address."""

    async def find() -> Iterable[str]:
        return await asyncio.to_thread(os.listdir, folder)

    return find


class Peers:
    """The other members, and requests to them."""

    def __init__(self, own: str, session: aiohttp.ClientSession) -> None:
        self.own = own
        self.members: frozenset[str] = frozenset({own})
        self._session = session
        self._silent: dict[str, float] = {}
        """Members that did not answer, and when to ask them again."""

    def order(self, namespace: str, rank: int) -> list[str]:
        """Return all members in their order for a rank."""
        return in_order(self.members, namespace, rank)

    def answering(self, members: Iterable[str]) -> list[str]:
        """Return the members that were not silent a moment ago."""
        return [one for one in members if self._silent.get(one, 0.0) <= monotonic()]

    def ask_all_again(self) -> None:
        """Ask also the members that did not answer a moment ago."""
        self._silent.clear()

    @contextlib.asynccontextmanager
    async def ask(
        self,
        member: str,
        method: str,
        path: str,
        stamp: int,
        size: int = 0,
        data: BinaryIO | None = None,
        **more: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask a member for its own answer. Raises WorldError if it does not answer.

        `data`: a file of `size` bytes to send.
        """
        if not self.answering([member]):
            raise WorldError(f"{member} did not answer a moment ago")
        headers = {STAMP_HEADER: str(stamp), **more.pop("headers", {})}
        timeout = aiohttp.ClientTimeout(
            total=ANSWER_SECONDS + size / BYTES_PER_SECOND,
            sock_connect=CONNECT_SECONDS,
            sock_read=None if data is not None else PAUSE_SECONDS,
        )
        try:
            async with asyncio.timeout(None) as stall:
                if data is not None:
                    headers["Content-Length"] = str(size)
                    more["data"] = _pieces(data, stall) if size else b""
                async with self._session.request(
                    *(method, f"http://{member}{path}"),
                    headers=headers,
                    timeout=timeout,
                    **more,
                ) as answer:
                    stall.reschedule(None)
                    self._silent.pop(member, None)
                    yield answer
        except (aiohttp.ClientError, OSError, PeerError, TimeoutError) as error:
            self._silent[member] = monotonic() + SILENT_SECONDS
            log.warning(
                "member of the checkpoint memory does not answer", address=member, error=error
            )
            raise WorldError(f"{member}: {type(error).__name__}: {error}") from error

    async def status(self, member: str, method: str, path: str, stamp: int, **more: Any) -> int:
        """Return the status of a member's answer; 0: it did not answer."""
        try:
            async with self.ask(member, method, path, stamp, **more) as answer:
                return answer.status
        except WorldError:
            return 0

    async def contents(self, namespace: str = "") -> dict[str, Contents]:
        """Return the contents of all other members that answer."""
        slots = asyncio.Semaphore(CONCURRENT)
        query = {"namespace": namespace} if namespace else {}

        async def ask(member: str) -> tuple[str, Contents | None]:
            async with slots:
                try:
                    async with self.ask(member, "GET", CONTENTS_PATH, 0, params=query) as answer:
                        return member, msgspec.json.decode(await answer.read(), type=Contents)
                except WorldError:
                    return member, None
                except msgspec.MsgspecError as error:
                    log.warning("malformed contents of a member", address=member, error=error)
                    return member, None

        others = self.members - {self.own}
        found = await asyncio.gather(*(ask(member) for member in others))
        return {member: contents for member, contents in found if contents is not None}


async def _pieces(file: BinaryIO, stall: asyncio.Timeout) -> AsyncIterator[bytes]:
    """Yield a file's bytes; `stall` ends when the last piece was not taken in time."""
    loop = asyncio.get_running_loop()
    while True:
        stall.reschedule(loop.time() + STALL_SECONDS)
        data = file.read(PIECE_BYTES)
        if not data:
            break
        yield data
