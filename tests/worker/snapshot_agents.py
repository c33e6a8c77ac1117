"""The agent's part of snapshots, served over a socket in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.agent.snapshots.slots import ANSWERS, SlotAnswer, SnapshotSlots
from unbroken.wire.ipc import RECEIPT, SNAPSHOT_FETCH, SNAPSHOT_FIND, Frames, encode
from unbroken.worker.channel import Channel

PLENTY = 8 << 30


class Agent:
    """Agent of a worker: its own memory, that of its buddies by node rank, and its receipts."""

    turn = threading.Lock()
    """Lock for all agents, since agents of several ranks may share one memory."""

    def __init__(
        self, memory: SnapshotSlots, buddies: Mapping[int, SnapshotSlots] | None = None
    ) -> None:
        self.memory, self.buddies = memory, buddies or {}
        self.receipts: list[dict[str, Any]] = []
        self.lists = self.fetches = 0

    def hear(self, sock: socket.socket, message: dict[str, Any]) -> None:
        """Answer one message."""
        with self.turn:
            self._heard(sock, message)

    def _heard(self, sock: socket.socket, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == RECEIPT:
            self.receipts.append(message)
        if kind in ANSWERS:
            is_fetch = kind == SNAPSHOT_FETCH
            answer = self._fetched(message) if is_fetch else self.memory.answer(message)
            socket.send_fds(sock, [encode(answer.message)], answer.fds)

    def _fetched(self, message: dict[str, Any]) -> SlotAnswer:
        is_list, wanted = message.get("list") is True, message.get("step")
        self.lists, self.fetches = self.lists + is_list, self.fetches + (not is_list)
        steps: list[Any] = []
        givers: list[int] = []
        fds: list[int] = []
        for node, memory in self.buddies.items():
            found = memory.answer({**message, "type": SNAPSHOT_FIND})
            for one, fd in zip(found.message["steps"], found.fds, strict=True):
                if is_list or one["step"] == wanted:
                    steps.append(one)
                    givers.append(node)
                    fds.append(fd)
        told = {"type": ANSWERS[SNAPSHOT_FIND], "steps": steps, "from": givers}
        return SlotAnswer(told, [] if is_list else fds)


def serve(sock: socket.socket, agent: Agent) -> None:
    """Answer until the worker's end is closed."""
    frames = Frames()
    # A killed worker may leave answers unread, which the kernel calls a reset.
    with sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := sock.recv(65536):
            for message in frames.feed(data):
                agent.hear(sock, message)


@contextlib.contextmanager
def served(agent: Agent | SnapshotSlots) -> Iterator[socket.socket]:
    """Yield the worker's end of a socket at which the agent answers."""
    ours, theirs = socket.socketpair()
    heard = Agent(agent) if isinstance(agent, SnapshotSlots) else agent
    thread = threading.Thread(target=serve, args=(ours, heard))
    thread.start()
    try:
        yield theirs
    finally:
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)
        theirs.close()
        thread.join()


@contextlib.contextmanager
def channel(agent: Agent | SnapshotSlots) -> Iterator[Channel]:
    """Yield a channel to the agent, as a worker has it."""
    with served(agent) as sock:
        # The channel's thread closes its own copy of the socket.
        found = Channel(sock.dup())
        found.start()
        yield found


@contextlib.contextmanager
def agent() -> Iterator[SnapshotSlots]:
    """Yield the slots of an agent with enough memory."""
    snapshots = SnapshotSlots(lambda: PLENTY)
    try:
        yield snapshots
    finally:
        snapshots.close()
