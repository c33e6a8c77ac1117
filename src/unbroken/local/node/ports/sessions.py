"""Port forwarding over a WebSocket, in both protocols that clients speak.

`SPDY/3.1+portforward.k8s.io` (kubectl 1.31 and later): binary messages carry a SPDY connection, in
which each forwarded connection is a stream for data and a stream for an error text.
`v4.channel.k8s.io` (the Python client): the first byte of each message is its channel, two
channels for each port.  Source: kubelet v1.33, portforward/httpstream.go and websocket.go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import WSCloseCode, WSMsgType, web

from unbroken.errors import SpecError, WorldError
from unbroken.foreign_numbers import PORT_MAX, whole_number

from . import spdy
from .connection import BrokenError, ForwardedPod, PodConnection

TUNNEL = "SPDY/3.1+portforward.k8s.io"
CHANNELS = "v4.channel.k8s.io"
PROTOCOLS = (TUNNEL, CHANNELS)
MESSAGE_BYTES = 2 << 20
"""Longest message of a client.  The Python client sends up to 1 MiB at once, kubectl 32 KiB."""
CONNECTIONS_MAX = 128
"""Forwarded connections at once in one session; more are refused."""
PORTS_MAX = 64
"""Ports of one session of channels, whose number is one byte for two channels each."""
ERROR, DATA = "error", "data"


@dataclass(slots=True)
class _Pair:
    """The two streams of one forwarded connection."""

    request: str
    port: int
    streams: dict[str, int]
    """By type: `error` and `data`."""
    connection: PodConnection | None = None
    task: asyncio.Task[None] | None = None


class SpdySession:
    """Connections that one client forwards over one tunnel."""

    def __init__(self, pod: ForwardedPod, socket: web.WebSocketResponse) -> None:
        self._pod = pod
        self._socket = socket
        self._reader = spdy.Reader()
        self._writer = spdy.Writer()
        self._pairs: dict[str, _Pair] = {}
        self._streams: dict[int, _Pair] = {}

    async def run(self) -> None:
        """Forward until the client leaves or breaks the protocol."""
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._receive(tasks)
            finally:
                for pair in list(self._pairs.values()):
                    self._forget(pair)
        await self._socket.close()

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY:
                    raise spdy.SpdyError(f"a message of type {message.type.name}")
                for frame in self._reader.feed(message.data):
                    await self._take(frame, tasks)
        except spdy.SpdyError as error:
            text = str(error).encode()[:120]
            await self._socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=text)
        except ConnectionError:
            return  # the client has left

    async def _take(self, frame: spdy.Frame, tasks: asyncio.TaskGroup) -> None:
        match frame:
            case spdy.Opened():
                await self._open(frame, tasks)
            case spdy.Data(stream=stream, data=data, is_final=is_final):
                pair = self._streams.get(stream)
                if pair is not None and pair.connection and stream == pair.streams[DATA]:
                    await pair.connection.deliver(data, is_final=is_final)
            case spdy.Reset(stream=stream):
                await self._reset(stream)
            case spdy.Pinged(number=number):
                await self._socket.send_bytes(self._writer.ping(number))

    async def _open(self, frame: spdy.Opened, tasks: asyncio.TaskGroup) -> None:
        pair, kind = self._pair_of(frame)
        if pair is None:
            await self._socket.send_bytes(self._writer.reset(frame.stream, spdy.REFUSED_STREAM))
            return
        pair.streams[kind] = frame.stream
        self._pairs[pair.request] = pair
        self._streams[frame.stream] = pair
        await self._socket.send_bytes(self._writer.reply(frame.stream))
        if len(pair.streams) == 2:
            pair.connection = PodConnection(self._pod, pair.port)
            pair.task = tasks.create_task(self._forward(pair, pair.connection))

    def _pair_of(self, frame: spdy.Opened) -> tuple[_Pair | None, str]:
        """The connection that a new stream belongs to, None if it is refused, and its type."""
        kind = frame.headers.get("streamtype", "")
        try:
            port = port_of(frame.headers.get("port", ""))
        except SpecError:
            return None, kind
        # A client without request IDs opens the stream for errors first, then the one for data.
        first = frame.stream - (2 if kind == DATA else 0)
        request = frame.headers.get("requestid", "") or f"stream {first}"
        pair = self._pairs.get(request)
        if kind not in (ERROR, DATA) or len(request) > 100:
            return None, kind
        if pair is None:
            is_full = len(self._pairs) >= CONNECTIONS_MAX
            return (None if is_full else _Pair(request, port, {})), kind
        return (None if kind in pair.streams or pair.port != port else pair), kind

    async def _reset(self, stream: int) -> None:
        """The client has given up one of the streams: end the connection and the other stream."""
        pair = self._streams.get(stream)
        if pair is None:
            return
        error = pair.streams.get(ERROR)
        self._forget(pair)
        if error is not None and error != stream:
            await self._socket.send_bytes(self._writer.data(error, b"", is_final=True))

    async def _forward(self, pair: _Pair, connection: PodConnection) -> None:
        text = b""
        error, data = pair.streams[ERROR], pair.streams[DATA]
        end = self._writer.data(data, b"", is_final=True)
        with contextlib.suppress(ConnectionError):  # the client has left
            try:
                await connection.run(partial(self._send, data))
            except BrokenError:
                # kubectl ends all its connections if there is a text.
                end = self._writer.reset(data, spdy.CANCEL)
            except WorldError as failure:
                text = str(failure).encode()
            self._forget(pair)
            await self._socket.send_bytes(self._writer.data(error, text, is_final=True))
            await self._socket.send_bytes(end)

    async def _send(self, stream: int, data: bytes) -> None:
        await self._socket.send_bytes(self._writer.data(stream, data))

    def _forget(self, pair: _Pair) -> None:
        self._pairs.pop(pair.request, None)
        for stream in pair.streams.values():
            self._streams.pop(stream, None)
        if pair.task is not None and pair.task is not asyncio.current_task():
            pair.task.cancel()


class ChannelSession:
    """One connection to each of the ports, all opened at once."""

    def __init__(
        self, pod: ForwardedPod, socket: web.WebSocketResponse, ports: Sequence[int]
    ) -> None:
        self._pod = pod
        self._socket = socket
        self._ports = ports

    async def run(self) -> None:
        """Forward until the client leaves or all connections have ended."""
        with contextlib.suppress(ConnectionError):  # the client has left
            for number, port in enumerate(self._ports):
                for channel in (2 * number, 2 * number + 1):
                    await self._socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
            connections = [PodConnection(self._pod, port) for port in self._ports]
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(self._receive(connections))
                forwarding = [
                    tasks.create_task(self._forward(2 * number, connection))
                    for number, connection in enumerate(connections)
                ]
                ended = tasks.create_task(_all_ended(forwarding))
                await asyncio.wait([receiving, ended], return_when=asyncio.FIRST_COMPLETED)
                for task in (receiving, ended, *forwarding):
                    task.cancel()
        await self._socket.close()

    async def _receive(self, connections: Sequence[PodConnection]) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            number, is_error = divmod(message.data[0], 2)
            if not is_error and number < len(connections):
                await connections[number].deliver(message.data[1:])

    async def _forward(self, channel: int, connection: PodConnection) -> None:
        with contextlib.suppress(ConnectionError):  # the client has left
            try:
                await connection.run(partial(self._send, channel))
            except WorldError as failure:
                await self._send(channel + 1, str(failure).encode())

    async def _send(self, channel: int, data: bytes) -> None:
        await self._socket.send_bytes(bytes([channel]) + data)


async def _all_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


def port_of(text: str) -> int:
    """The number of a port; SpecError if the text is none."""
    port = whole_number(text, 1, PORT_MAX)
    if port is None:
        raise SpecError(f"port must be a number from 1 to {PORT_MAX}, not {text[:100]!r}")
    return port


def ports_of(values: Sequence[str]) -> list[int]:
    """The ports that a client of channels asks for; SpecError if they are none or too many.

    They stand in one value with commas, in several values, or both.
    """
    result = [port_of(text) for value in values for text in value.split(",")]
    if not 0 < len(result) <= PORTS_MAX:
        raise SpecError(f"port forwarding takes 1 to {PORTS_MAX} ports, not {len(result)}")
    return result
