"""Workers that save snapshots by the description of the slots alone, and checks of their copies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

from tests import watching
from tests.agent.ipc_clients import RAW
from tests.agent.running import Running
from unbroken.wire.snapshot import (
    BODY_AT,
    CHUNK_BYTES,
    HEADERS_BYTES,
    SEALED_AT,
    Header,
    digest,
    read,
    write,
)

NAME = "state/of training"

SAVES = (
    RAW
    + """
import mmap
from dataclasses import replace
from zlib import crc32
from unbroken.wire.snapshot import (
    ABSENT, BODY_AT, COPIED_AT, SEALED_AT, Header, chunk, digest, read, slot_bytes, write)

NAME = "state/of training"
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["JOB_RESTART_COUNT"])
BYTES = int(os.environ.get("BYTES", 100_000))

class Saver(Client):
    def __init__(self):
        super().__init__()
        self.say("init")
        self.slots = [None, None]

    def ask(self, kind, **keys):
        self.say(kind, **{"name": NAME, "rank": RANK, "attempt": ATTEMPT, **keys})
        return self.answer()

    def answer(self):
        head, fds, _, _ = socket.recv_fds(self.sock, 4, 64)
        while len(head) < 4:
            head += self.sock.recv(4 - len(head))
        (length,) = struct.unpack(">I", head)
        body = b""
        while len(body) < length:
            body += self.sock.recv(length - len(body))
        return json.loads(body), fds

    def open(self, index):
        found, fds = self.ask("snapshot_open", slot=index, bytes=slot_bytes(BYTES))
        assert "error" not in found, found
        self.slots[index] = mmap.mmap(fds[0], slot_bytes(BYTES))

    def save(self, step, index, is_torn=False):
        if self.slots[index] is None:
            self.open(index)
        memory = self.slots[index]
        memory[: len(ABSENT)] = ABSENT
        memory[BODY_AT : BODY_AT + BYTES] = pattern(RANK, step, BYTES)
        view = memoryview(memory)
        header = Header(digest(os.environ.get("UNBROKEN_JOB", "job")), NAME, ATTEMPT, step, RANK,
                        WORLD, digest("layout"), BYTES, BYTES, 0, 0)
        data = write(header)
        memory[COPIED_AT : COPIED_AT + len(data)] = data
        spans = [chunk(one, BYTES) for one in range(header.chunks)]
        sums = b"".join(crc32(view[a:b]).to_bytes(4, "little") for a, b in spans)
        memory[header.table_at : header.table_at + len(sums)] = sums
        if is_torn:
            memory[BODY_AT + BYTES // 2] ^= 1
        data = write(replace(header, table_checksum=crc32(sums)))
        memory[SEALED_AT : SEALED_AT + len(data)] = data
        return self.ask("snapshot_saved", slot=index, step=step)[0]

    def fetch(self, **keys):
        found, fds = self.ask("snapshot_fetch", **keys)
        if "error" in found or not fds:
            return found
        whole = []
        for fd in fds:
            with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
                header = read(memory[:1024], len(memory))
                body = memory[BODY_AT : BODY_AT + header.body_bytes]
                whole.append(body == pattern(header.rank, header.step, header.body_bytes))
            os.close(fd)
        return {**found, "whole": whole}

def pattern(rank, step, size):
    piece = struct.pack("<qq", rank, step)
    return (piece * (size // 16 + 1))[:size]
"""
)
"""`Saver`: a rank that saves a body of one pattern for each rank and step."""

TRAINS = (
    SAVES
    + """
rank = Saver()
tell(fetched=rank.fetch())
first, last = (int(os.environ[name]) for name in ("FIRST", "LAST"))
for number in range(first, last):
    rank.save(number * int(os.environ.get("STRIDE", 1)), number % 2)
    time.sleep(float(os.environ.get("SECONDS", "0")))
tell(last=number)
signal.pause()
"""
)
"""A rank that saves steps FIRST to LAST, one each SECONDS."""


def pattern(rank: int, step: int, size: int) -> bytes:
    """Return the body that `SAVES` writes."""
    piece = rank.to_bytes(8, "little") + step.to_bytes(8, "little")
    return (piece * (size // 16 + 1))[:size]


@dataclass(frozen=True)
class Copy:
    """A copy that an agent offers."""

    attempt: int
    step: int


def path(rank: int, *point: int) -> str:
    """Return the URL path of all copies of a rank, or of one."""
    return "/".join(["/v1/snapshots/state%2Fof%20training", str(rank), *map(str, point)])


def copies(agent: Running, rank: int) -> list[Copy]:
    """Return an agent's copies of a rank, the newest first; assert that each is whole."""
    code, body, _ = agent.request("GET", path(rank))
    assert code == 200, body
    found = []
    for one in json.loads(body)["snapshots"]:
        point = one["attempt"], one["step"]
        code, data, _ = agent.request("GET", path(rank, *point))
        if code == 404:
            continue  # A newer one has taken its place meanwhile.
        assert code == 200
        assert len(data) == one["bytes"]
        header = whole(data)
        assert (header.rank, header.attempt, header.step) == (rank, *point)
        found.append(Copy(*point))
    return found


def whole(data: bytes) -> Header:
    """Return the header of a snapshot; assert that all of its body is of one state."""
    header = read(data[:HEADERS_BYTES], len(data))
    assert header is not None
    assert header.table_checksum is not None
    size = header.body_bytes
    assert data[BODY_AT : BODY_AT + size] == pattern(header.rank, header.step, size)
    return header


async def until(holds: Callable[[], bool]) -> None:
    """Wait in a thread until `holds()`, so that operators receive messages meanwhile."""
    await watching.until(lambda: asyncio.to_thread(holds))


def slot(
    rank: int, attempt: int, step: int, size: int = 100_000, job: str = "job", world: int = 4
) -> bytes:
    """Return a whole snapshot, as it is sent."""
    body = pattern(rank, step, size)
    bare = Header(
        digest(job), NAME, attempt, step, rank, world, digest("layout"), size, size, 0, 0
    )  # fmt: skip
    pieces = range(0, size, CHUNK_BYTES)
    sums = b"".join(crc32(body[at : at + CHUNK_BYTES]).to_bytes(4, "little") for at in pieces)
    head = write(bare).ljust(SEALED_AT, b"\0") + write(replace(bare, table_checksum=crc32(sums)))
    return head.ljust(BODY_AT, b"\0") + body + sums
