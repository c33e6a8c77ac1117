"""One connection to a port of a pod, for one forwarded connection of a client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.errors import WorldError
from unbroken.local.listeners import strangers

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
