"""Sessions of port forwarding against hostile and slow clients and programs, over real sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.spdy_client import Client
from tests.watching import PATIENCE_SECONDS
from unbroken.listener import bound
from unbroken.local.node import port_forwarding
from unbroken.local.node.port_forwarding import ForwardedPod

SYN_REPLY, RST_STREAM = b"\x80\x03\0\2", b"\x80\x03\0\3"
ADDRESS = "127.63.7.1"


@asynccontextmanager
async def serving(program: Any) -> AsyncIterator[str]:
    """A program that listens; its port."""
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await program(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    served = await asyncio.start_server(handle, ADDRESS, 0)
    try:
        yield str(served.sockets[0].getsockname()[1])
    finally:
        served.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def deaf(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take nothing, until the other side ends the connection."""
    await writer.wait_closed()


@asynccontextmanager
async def forwarding(
    program: Any, *, is_gone: bool = False
) -> AsyncIterator[tuple[aiohttp.ClientWebSocketResponse, str]]:
    """Serve a session for a program of a pod; a client's socket and the program's port."""
    pod = ForwardedPod("p", lambda: "" if is_gone else ADDRESS, {})

    async def answer(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=port_forwarding.PROTOCOLS)
        await socket.prepare(request)
        await port_forwarding.SpdySession(pod, socket).run()
        return socket

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    (listening,) = await bound(ADDRESS, 0)
    await web.SockSite(runner, listening).start()
    url = f"http://{ADDRESS}:{listening.getsockname()[1]}/"
    try:
        async with (
            serving(program) as port,
            aiohttp.ClientSession() as client,
            client.ws_connect(url, protocols=[port_forwarding.TUNNEL]) as socket,
        ):
            yield socket, port
    finally:
        await runner.cleanup()


def opened(client: Client, stream: int, kind: str, port: str, request: str) -> bytes:
    """A new stream, as kubectl opens it."""
    return client.opened(stream, {"streamtype": kind, "port": port, "requestid": request})


def pair(client: Client, number: int, port: str) -> tuple[bytes, int]:
    """Open both streams of a connection; return the frames, and the number of the data stream."""
    error, data = 4 * number + 1, 4 * number + 3
    both = opened(client, error, "error", port, str(number))
    return both + opened(client, data, "data", port, str(number)), data


def data(stream: int, content: bytes) -> bytes:
    """A data frame."""
    return struct.pack(">II", stream, len(content)) + content


async def frames(socket: aiohttp.ClientWebSocketResponse, last: bytes) -> list[bytes]:
    """Messages of the session, to the first that begins so."""
    found = []
    async for message in socket:
        found.append(message.data)
        if message.data.startswith(last):
            break
    return found


async def test_a_program_that_takes_nothing_loses_its_connection_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_forwarding, "STALL_SECONDS", 0.2)
    async with serving(echo) as other, forwarding(deaf) as (socket, port):
        client = Client()
        first, stuck = pair(client, 0, port)
        second, lively = pair(client, 1, other)
        await socket.send_bytes(first + second)
        for _ in range(40):
            await socket.send_bytes(data(stuck, b"x" * 500_000))
        reset = RST_STREAM + struct.pack(">II", 8, stuck)
        assert (await frames(socket, reset))[-1].startswith(reset)
        await socket.send_bytes(data(lively, b"over and back"))
        answer = data(lively, b"over and back")
        assert (await frames(socket, answer))[-1] == answer


async def test_connections_of_one_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forwarding, "CONNECT_SECONDS", PATIENCE_SECONDS)
    async with forwarding(echo) as (socket, port):
        client = Client()
        for number in range(port_forwarding.CONNECTIONS_MAX):
            both, _ = pair(client, number, port)
            await socket.send_bytes(both)
            assert (await frames(socket, SYN_REPLY))[-1].startswith(SYN_REPLY)
        both, refused = pair(client, port_forwarding.CONNECTIONS_MAX, port)
        await socket.send_bytes(both)
        found = await frames(socket, RST_STREAM + struct.pack(">II", 8, refused - 2))
        assert struct.unpack(">I", found[-1][-4:]) == (3,)  # REFUSED_STREAM
        # One that ends makes room for another.
        _, old = pair(Client(), 0, port)
        await socket.send_bytes(client.control(3, struct.pack(">II", old, 5)))
        both, stream = pair(client, port_forwarding.CONNECTIONS_MAX + 1, port)
        await socket.send_bytes(both + data(stream, b"room"))
        assert (await frames(socket, data(stream, b"room")))[-1] == data(stream, b"room")


BAD = {
    "no port": {"streamtype": "data", "requestid": "9"},
    "port 0": {"streamtype": "data", "port": "0", "requestid": "9"},
    "port 65536": {"streamtype": "data", "port": "65536", "requestid": "9"},
    "digits of another script": {"streamtype": "data", "port": "\N{ARABIC-INDIC DIGIT ONE}"},
    "no type": {"port": "80", "requestid": "9"},
    "a long request ID": {"streamtype": "data", "port": "80", "requestid": "9" * 101},
    "a second stream for data": {"streamtype": "data", "port": "1", "requestid": "same"},
    "another port": {"streamtype": "error", "port": "2", "requestid": "same"},
}


@pytest.mark.parametrize("name", BAD)
async def test_a_stream_that_makes_no_sense_is_refused_alone(name: str) -> None:
    async with forwarding(echo) as (socket, port):
        client = Client()
        # Its stream for errors never comes.
        await socket.send_bytes(opened(client, 1, "data", "1", "same"))
        await socket.send_bytes(client.opened(3, BAD[name]))
        refused = RST_STREAM + struct.pack(">II", 8, 3)
        assert (await frames(socket, refused))[-1].startswith(refused)
        both, stream = pair(client, 1, port)
        await socket.send_bytes(both + data(stream, b"fine"))
        assert (await frames(socket, data(stream, b"fine")))[-1] == data(stream, b"fine")


async def test_a_client_without_request_ids_is_served() -> None:
    async with forwarding(echo) as (socket, port):
        client = Client()
        for stream, kind in ((1, "error"), (3, "data")):
            await socket.send_bytes(client.opened(stream, {"streamtype": kind, "port": port}))
        await socket.send_bytes(data(3, b"old"))
        assert (await frames(socket, data(3, b"old")))[-1] == data(3, b"old")


async def test_a_pod_that_is_gone_is_not_mistaken_for_the_next_at_its_address() -> None:
    async with forwarding(echo, is_gone=True) as (socket, port):
        both, _ = pair(Client(), 0, port)
        await socket.send_bytes(both)
        text = f"error forwarding port {port} to pod p: the pod is gone".encode()
        told = struct.pack(">II", 1, 1 << 24 | len(text)) + text
        assert (await frames(socket, told))[-1] == told


async def test_bytes_that_are_no_frames_end_the_session() -> None:
    async with forwarding(echo) as (socket, _):
        await socket.send_bytes(b"\xff" * 100)
        message = await socket.receive()
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == 1002


def test_ports_of_a_session_of_channels() -> None:
    assert port_forwarding.ports_of(["80,81", "82"]) == [80, 81, 82]
    for bad in ([], [""], ["80,"], ["-1"], ["x"], ["1"] * (port_forwarding.PORTS_MAX + 1)):
        with pytest.raises(port_forwarding.SpecError, match="port"):
            port_forwarding.ports_of(bad)
