"""Hostile agents in a process of their own: each listens at an address and attacks who connects.

    python flooding_agents.py '{"first": 100, "count": 100, "kinds": ["lists", "flood"]}'

Writes a line when all of them listen, a line for each whose attack the operator has taken in once,
and a line for each connection that the operator has ended: `cut KIND BYTES`, with what it had
taken.  Ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# A benchmark may run at the same time as the test.
os.environ["CONTROL_PLANE_NET"] = "240"

from control_plane_agents import PORT, WEBSOCKET, address

CHUNK = 64 * 1024
Attack = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def report(**more: object) -> dict[str, object]:
    """A small report."""
    return {"type": "report", "agent_id": "h", "state": "ready", "nproc": 8, **more}


def frame(payload: bytes, code: int = 1) -> bytes:
    """A whole frame of a WebSocket."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | code, size)) + payload
    if size < 1 << 16:
        return bytes((0x80 | code, 126)) + size.to_bytes(2, "big") + payload
    return bytes((0x80 | code, 127)) + size.to_bytes(8, "big") + payload


def text(value: object) -> bytes:
    """A frame with a JSON value."""
    return frame(json.dumps(value, separators=(",", ":")).encode())


async def lists(_: bytes, out: asyncio.StreamWriter) -> None:
    """4 MiB of empty lists in `progress`."""
    await repeat(out, _frames("lists"))


async def small_lists(_: bytes, out: asyncio.StreamWriter) -> None:
    """Send as many empty lists as a report may have, in different numbers."""
    await repeat(out, _frames("small_lists"))


async def deep(_: bytes, out: asyncio.StreamWriter) -> None:
    """100,000 lists inside each other."""
    await repeat(out, _frames("deep"))


async def numbers(_: bytes, out: asyncio.StreamWriter) -> None:
    """Numbers of many digits."""
    await repeat(out, [frame(b'{"type":"report","attempt":' + b"9" * 200_000 + b"}")])


async def flood(_: bytes, out: asyncio.StreamWriter) -> None:
    """Small reports, all different, as fast as possible."""
    await repeat(out, (text(report(newest_attempt=i, message=str(i))) for i in count()))


async def names(_: bytes, out: asyncio.StreamWriter) -> None:
    """Another name, other ranks and other rules in each report."""
    rules = ([{"name": f"{i}-{j}", "state": "Hanging", "ranks": "every"} for j in range(50)]
             for i in count())  # fmt: skip
    watch = ([{"rank": i * 50 + j, "alarms": [{"detector": "Nan"}]} for j in range(50)]
             for i in count())  # fmt: skip
    reports = (
        text(report(agent_id=f"h{i}", log_rules=next(rules), watch=next(watch), state="running"))
        for i in count()
    )
    await repeat(out, reports)


async def evidence(_: bytes, out: asyncio.StreamWriter) -> None:
    """Evidence that nobody has asked for."""
    await repeat(out, _frames("evidence"))


async def drip(_: bytes, out: asyncio.StreamWriter) -> None:
    """A frame of 600 KiB that never ends, byte by byte."""
    out.write(frame(b" " * 600 * 1024)[: 500 * 1024])
    await out.drain()
    note(out)
    while True:
        out.write(b" ")
        await out.drain()
        await asyncio.sleep(0.001)


async def pings(_: bytes, out: asyncio.StreamWriter) -> None:
    """PING frames as fast as possible."""
    await repeat(out, [frame(b"", 9) * 1000])


async def fragments(_: bytes, out: asyncio.StreamWriter) -> None:
    """Empty fragments of a message that never ends."""
    out.write(b"\x01\x00")
    await repeat(out, [b"\x00\x00" * 64 * 1024])


async def unread(_: bytes, out: asyncio.StreamWriter) -> None:
    """Send frames after a violation of the protocol: the closing side must stop reading."""
    await repeat(out, [frame(b"x")])


async def returns(_: bytes, out: asyncio.StreamWriter) -> None:
    """A report, and the end of the connection."""
    out.write(text(report()))


async def body(head: bytes, out: asyncio.StreamWriter) -> None:
    """No link, and a status that never ends."""
    if b"/v1/link" in head:
        out.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    out.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await repeat(out, [b"40000\r\n" + b"[" * CHUNK + b"\r\n"])


async def headers(_: bytes, out: asyncio.StreamWriter) -> None:
    """Headers that never end."""
    out.write(b"HTTP/1.1 200 OK\r\n")
    await repeat(out, [b"X-A: " + b"a" * 8000 + b"\r\n"])


async def informed(_: bytes, out: asyncio.StreamWriter) -> None:
    """Informational answers that never end."""
    await repeat(out, [b"HTTP/1.1 100 Continue\r\n\r\n" * 1000])


async def fat(_: bytes, out: asyncio.StreamWriter) -> None:
    """The largest report that is read, of texts that take four times their bytes."""
    await repeat(out, _frames("fat"))


@cache
def _frames(kind: str) -> list[bytes]:
    """Frames that take long to make, made once."""
    nested = b"[" * 100_000 + b"]" * 100_000
    ranks = [{"rank": i, "pid": 1, "threads": [{}] * 16} for i in range(1024)]
    asked = {"type": "evidence", "request": 1, "attempt": 0, "agent_id": "h", "ranks": ranks}
    lines = ["\U0001f600" + "a" * 4000] * 8
    one = {"kind": "ExitCode", "local_rank": 0, "rank": 0, "pid": 1, "lines": lines}
    match kind:
        case "lists":
            return [text(report(progress={"a": [[]] * (4 * 1024 * 1024 // 3)}))]
        case "small_lists":
            return [text(report(progress={"a": [[]] * 80_000, "n": i})) for i in range(4)]
        case "deep":
            return [frame(b'{"type":"report","progress":' + nested + b"}")]
        case "evidence":
            return [text(report()), text(asked)]
        case _:
            fat = report(faults=[one] * 8)
            return [text(fat | {"message": str(i)}) for i in range(4)]


async def repeat(out: asyncio.StreamWriter, frames: list[bytes] | Iterator[bytes]) -> None:
    """Send them again and again, as fast as they are taken."""
    number = 0
    while True:
        for one in frames:
            for at in range(0, len(one), CHUNK):
                out.write(one[at : at + CHUNK])
                await out.drain()
                SENT[out] += len(one[at : at + CHUNK])
            if (number := number + 1) == 3:
                note(out)
            await asyncio.sleep(0)


def note(out: asyncio.StreamWriter) -> None:
    """Write a line for the agent, once."""
    address = out.get_extra_info("sockname")[0]
    if address not in TAKEN:
        TAKEN.add(address)
        os.write(1, b"taken\n")


SENT: Counter[asyncio.StreamWriter] = Counter()
"""Bytes that were sent on each connection."""
TAKEN: set[str] = set()
"""Addresses of the agents for which a line was written."""

LINKED: dict[str, Attack] = {
    one.__name__: one
    for one in (
        lists, small_lists, deep, numbers, flood, names, evidence, drip, pings, fragments, unread,
        returns, fat,
    )
}  # fmt: skip
"""Attacks over a link that was opened correctly."""
PLAIN: dict[str, Attack] = {one.__name__: one for one in (body, headers, informed)}
"""Attacks over HTTP."""


async def serve(kind: str, source: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
    """One connection."""
    try:
        head = await source.readuntil(b"\r\n\r\n")
        if kind in LINKED:
            (key,) = (
                line.split(b": ", 1)[1]
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"sec-websocket-key")
            )
            accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET).digest())
            out.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            )
        await (LINKED | PLAIN)[kind](head, out)
    except (ConnectionError, asyncio.IncompleteReadError):
        os.write(1, f"cut {kind} {SENT[out]}\n".encode())  # The operator has ended the connection.
    finally:
        note(out)
        del SENT[out]
        out.close()


async def main() -> None:
    """Attack until stdin ends."""
    options = json.loads(sys.argv[1])
    kinds = options["kinds"]
    for kind in ("lists", "small_lists", "deep", "evidence", "fat"):
        _frames(kind)
    for i in range(options["count"]):
        kind = kinds[i % len(kinds)]
        listener = socket.create_server((address(options["first"] + i), PORT), backlog=8)
        # What is sent is soon what the operator has taken, and not what the kernel holds.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        await asyncio.start_server(
            lambda source, out, kind=kind: serve(kind, source, out), sock=listener
        )
    os.write(1, b"listening\n")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
