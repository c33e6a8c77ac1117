"""An agent's part of snapshots, answering over a socket in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from unbroken.agent.snapshots import ANSWERS, Snapshots
from unbroken.wire.ipc import Frames, encode
from unbroken.worker.channel import Channel

PLENTY = 8 << 30


def serve(sock: socket.socket, snapshots: Snapshots) -> None:
    """Answer until the worker's end is closed."""
    frames = Frames()
    # A killed worker may leave answers unread, which the kernel calls a reset.
    with sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := sock.recv(65536):
            for message in frames.feed(data):
                if message["type"] in ANSWERS:
                    answer = snapshots.answer(message)
                    socket.send_fds(sock, [encode(answer.message)], answer.fds)


@contextlib.contextmanager
def served(snapshots: Snapshots) -> Iterator[socket.socket]:
    """The worker's end of a socket at which the agent answers."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(ours, snapshots))
    thread.start()
    try:
        yield theirs
    finally:
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)
        theirs.close()
        thread.join()


@contextlib.contextmanager
def channel(snapshots: Snapshots) -> Iterator[Channel]:
    """A channel to the agent, as a worker has it."""
    with served(snapshots) as sock:
        # The channel's thread closes its own copy of the socket.
        found = Channel(sock.dup())
        found.start()
        yield found


@contextlib.contextmanager
def agent() -> Iterator[Snapshots]:
    """The slots of an agent with memory enough."""
    snapshots = Snapshots(lambda: PLENTY)
    try:
        yield snapshots
    finally:
        snapshots.close()
