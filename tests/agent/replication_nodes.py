"""Two agents' halves of replication, each in its own process that may be killed before any line."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

import unbroken
from tests.agent.snapshot_clients import NAME, slot, whole
from tests.worker.kill_points import kill_at
from unbroken.agent.snapshots.replication import Replication
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.agent_http.snapshots import RequestRefused, SnapshotRoutes
from unbroken.wire.agent import StartCommand
from unbroken.wire.snapshot import HEADERS_BYTES

STEPS = 3
"""Number of bursts of saved steps."""
PLACE = os.path.dirname(unbroken.__file__)
COUNTED = (
    *("agent/snapshots/replication", "agent/snapshots/copies"),
    *("agent_http/snapshots", "core/snapshots/replication"),
)
Point = tuple[int, int]


@dataclass
class Process:
    """A child process, and the socket to it."""

    pid: int
    sock: socket.socket

    def is_through(self) -> bool:
        """Wait until it has finished or was killed; return whether it has finished."""
        return self.sock.recv(1) == b"."

    def said(self) -> Any:
        """Let it end; return its last answer, or {} if it was killed."""
        with suppress(OSError):
            self.sock.sendall(b"?")
        text = b""
        # Reset: it was killed before it had read all.
        with suppress(ConnectionResetError):
            while more := self.sock.recv(65536):
                text += more
        text = text.lstrip(b".")
        os.waitpid(self.pid, 0)
        self.sock.close()
        found = json.loads(text) if text else {}
        assert "error" not in found, found["error"]
        return found


def listeners() -> list[socket.socket]:
    """Return listening sockets for two agents."""
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]


def begin(act: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> Process:
    """Run a coroutine in a child process, which sends its answer over a socket."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid:
        there.close()
        return Process(pid, here)
    try:
        here.close()
        there.setblocking(False)
        asyncio.run(act(there, *arguments))
    except BaseException:  # noqa: BLE001  (the parent raises it)
        say(there, {"error": traceback.format_exc()})
    finally:
        os._exit(0)


class Node:
    """One agent with one rank."""

    def __init__(self, rank: int, tasks: asyncio.TaskGroup) -> None:
        self.rank, self.slots = rank, SnapshotSlots(lambda: 1 << 40)
        self.replication = Replication(self.slots, None, tasks.create_task)
        self.files: dict[int, int] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Serve the snapshot routes at the listener."""
        app = web.Application(middlewares=[_refusing])
        SnapshotRoutes(lambda: self.replication).add_to(app.router)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, listener).start()

    def start(self, attempt: int, **told: Any) -> None:
        """Start an attempt, as an operator does."""
        command = StartCommand(attempt, self.rank, 2, "127.0.0.1", 1, **told)
        self.slots.begin(attempt)
        self.replication.begin(command)

    def ask(self, kind: str, **keys: Any) -> Any:
        """Send a request, as a worker does; return the answer."""
        message = {"type": kind, "name": NAME, "rank": self.rank, "attempt": 0, **keys}
        found = self.slots.answer(message)
        assert "error" not in found.message, found.message
        return found

    def save(self, step: int) -> None:
        """Save a step as a worker does: the header is written after the body."""
        data, index = slot(self.rank, 0, step, world=2), step % 2
        if index not in self.files:
            (fd,) = self.ask("snapshot_open", slot=index, bytes=len(data)).fds
            self.files[index] = os.dup(fd)
        os.pwrite(self.files[index], bytes(HEADERS_BYTES), 0)
        os.pwrite(self.files[index], data[HEADERS_BYTES:], HEADERS_BYTES)
        os.pwrite(self.files[index], data[:HEADERS_BYTES], 0)
        self.ask("snapshot_saved", slot=index, step=step)

    def own(self) -> list[Point]:
        """Return the steps that the next attempt's worker is offered; assert that each is whole."""
        found = self.ask("snapshot_find", attempt=9)
        for fd in found.fds:
            header = whole(os.pread(fd, os.fstat(fd).st_size, 0))
            assert header.rank == self.rank
        return [(one["attempt"], one["step"]) for one in found.message["steps"]]

    def others(self) -> list[Point]:
        """Return its copies of the other node's rank; assert that each is whole."""
        key = (NAME, 1 - self.rank)
        for point in self.replication.sizes(key):
            fd = self.replication.descriptor(key, point)
            assert fd is not None
            header = whole(os.pread(fd, os.fstat(fd).st_size, 0))
            assert (header.rank, header.attempt, header.step) == (key[1], *point)
        return list(self.replication.sizes(key))

    def sent(self) -> int:
        """Return the newest step at the buddy."""
        # Not by its summary: that has lines that are counted.
        return self.replication._sent.get((NAME, self.rank), (0, -1))[1]

    def common(self) -> int:
        """Return the newest step that it knows all nodes to hold; -1 if there is none."""
        found = self.replication.summary()["common"].get(NAME)
        return -1 if found is None else int(found)


@web.middleware
async def _refusing(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        found: web.StreamResponse = await handler(request)
    except RequestRefused as error:
        return web.json_response({"detail": str(error)}, status=error.status)
    return found


async def training(
    talk: socket.socket, rank: int, ends: list[socket.socket], point: int, burst: int
) -> None:
    """Save each step, and have the last step of each burst sent.

    If `point` is not 0, the process is killed before a line. Otherwise it answers with the steps
    that the next attempt would find here.
    """
    loop = asyncio.get_running_loop()
    ports = [one.getsockname()[1] for one in ends]
    async with asyncio.TaskGroup() as tasks:
        node = Node(rank, tasks)
        await node.serve(ends[rank])
        if point:
            kill_at(point, *COUNTED, place=PLACE)
        node.start(0, buddy=f"127.0.0.1:{ports[1 - rank]}")
        question = tasks.create_task(loop.sock_recv(talk, 1))
        for step in range(STEPS * burst):
            if not question.done():
                node.save(step)
            is_last, wanted = (step + 1) % burst == 0, step - (burst > 1)
            while is_last and node.sent() < wanted and not question.done():
                await asyncio.sleep(0)
        talk.send(b".")
        await question
        known = node.common()
        node.start(9)
        say(talk, {"own": node.own(), "others": node.others(), "common": known})


async def fetching(talk: socket.socket, holders: list[str], point: int) -> None:
    """Fetch the copies of rank 0. If `point` is not 0, the process is killed before a line."""
    async with asyncio.TaskGroup() as tasks:
        node = Node(0, tasks)
        node.start(9, holders=tuple(holders))
        if point:
            kill_at(point, *COUNTED, place=PLACE)
        await node.replication.fetch((NAME, 0), None, is_list=False)
        say(talk, {"own": node.own()})


def say(talk: socket.socket, answer: object) -> None:
    """Send the answer, and end the process."""
    talk.setblocking(True)
    talk.sendall(json.dumps(answer).encode())
    os._exit(0)
