"""An attacker between an operator and an agent, who reads all bytes and may change them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.watching import PATIENCE_SECONDS


@dataclass
class Eavesdropper:
    """Passes bytes between its clients and a port, and keeps them."""

    target: int
    port: int = 0
    down: list[bytes] = field(default_factory=list)
    """Bytes that each connection has sent to the agent."""
    up: list[bytes] = field(default_factory=list)
    """Bytes that the agent has sent to each connection."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    change: Callable[[bytes], bytes] = lambda data: data
    """Change to the bytes that the agent has sent."""

    @property
    def heard(self) -> bytes:
        """All bytes in both directions."""
        return b"".join((*self.down, *self.up))

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        number = len(self.down)
        self.down.append(b"")
        self.up.append(b"")
        there, out = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += (writer, out)

        async def pump(
            source: asyncio.StreamReader,
            sink: asyncio.StreamWriter,
            kept: list[bytes],
            change: Callable[[bytes], bytes],
        ) -> None:
            with suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    kept[number] += data
                    sink.write(change(data))
                    await sink.drain()
            sink.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pump(reader, out, self.down, lambda data: data))
            tasks.create_task(pump(there, writer, self.up, lambda data: self.change(data)))


@asynccontextmanager
async def eavesdropping(target: int) -> AsyncIterator[Eavesdropper]:
    """Run an eavesdropper at its own port, in front of that of an agent."""
    found = Eavesdropper(target)
    server = await asyncio.start_server(found.accept, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for writer in found.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def replayed(port: int, data: bytes) -> bytes:
    """Replay recorded bytes to an agent; return its answer until it disconnects."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while more := await reader.read(1 << 16):
                answer += more
    writer.close()
    return answer
