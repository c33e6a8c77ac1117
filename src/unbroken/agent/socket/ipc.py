"""The socket between the agent and its workers: admission, and frames both ways.

Path and frames are those of the HyperPod agent (`wire/ipc.py`). A connection belongs to the worker
from which its process descends, according to the kernel. A frame that is too long, too many
connections and messages that are not read cost the sender its connection, and affect no other
worker. A frame that holds no JSON object is dropped.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unbroken.agent.evidence import procfs
from unbroken.errors import WorldError
from unbroken.log_lines import Log
from unbroken.wire.ipc import Frames, encode

from . import directory as socket_directory

log = Log(__name__)

CONNECTIONS_MAX = 8
"""Most connections of one worker."""
UNSENT_BYTES_MAX = 8 * 1024 * 1024
READ_BYTES = 256 * 1024
"""Bytes read at a time, so that a worker that sends much does not hold up others."""
PAUSE_SECONDS = 1.0
"""Seconds without accepting, if the agent has no descriptors left."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Speaker:
    """The worker that a connection belongs to."""

    local_rank: int
    pid: int
    """Pid of the worker's own process, whichever process of it has connected."""


@dataclass(slots=True)
class _Unsent:
    data: memoryview
    fds: list[int]
    """The agent's descriptors, closed once they are sent."""


@dataclass(slots=True, eq=False)
class Connection:
    """The connection of one process."""

    sock: socket.socket
    speaker: Speaker
    close: Callable[[Connection, str], None]
    """Ends it; the text is for the log, unless it is empty."""
    frames: Frames = field(default_factory=Frames)
    unsent: collections.deque[_Unsent] = field(default_factory=collections.deque)
    unsent_bytes: int = 0
    clients: dict[str, bool] = field(default_factory=dict)
    """Client ids that have registered, and whether each is restartable."""

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message and copies of the descriptors, now or when there is room."""
        if self.sock.fileno() < 0:
            return
        data = encode(message)
        self.unsent.append(_Unsent(memoryview(data), [os.dup(fd) for fd in fds]))
        self.unsent_bytes += len(data)
        self.flush()
        if self.unsent_bytes > UNSENT_BYTES_MAX:
            self.close(self, f"it reads nothing: {self.unsent_bytes} bytes are unsent")

    def flush(self) -> None:
        """Send as much as there is room for."""
        loop = asyncio.get_running_loop()
        try:
            while self.unsent:
                self._send_some(self.unsent[0])
        except BlockingIOError:
            loop.add_writer(self.sock, self.flush)
        except OSError:
            self.close(self, "")
        else:
            loop.remove_writer(self.sock)

    def _send_some(self, item: _Unsent) -> None:
        sent = socket.send_fds(self.sock, [item.data], item.fds)
        _close_all(item.fds)
        item.data = item.data[sent:]
        self.unsent_bytes -= sent
        if not item.data:
            self.unsent.popleft()


class Receiver(Protocol):
    """The receiver of messages."""

    def received(self, connection: Connection, message: Mapping[str, Any]) -> None:
        """Take a worker's message."""

    def lost(self, connection: Connection) -> None:
        """Note that the connection has ended."""


class WorkerSocket:
    """Listens from `start` to `close`."""

    def __init__(self, workers: Callable[[], Mapping[int, int]], receiver: Receiver) -> None:
        self._workers = workers
        """Local ranks of the living workers, by pid."""
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._lock = -1
        """Descriptor of the lock that shows other agents that this one lives."""
        self.connections: set[Connection] = set()

    def start(self) -> str:
        """Listen; return the path. Raises WorldError."""
        path = socket_directory.socket_path()
        socket_directory.sweep()
        try:
            self._lock = socket_directory.make()
            self._listener.bind(path)
            self._listener.listen(128)
        except OSError as error:
            text = f"cannot listen at {path}: {error.strerror}; set TMPDIR"
            raise WorldError(text) from error
        self._loop.add_reader(self._listener, self._accept)
        return path

    def close(self) -> None:
        """End all connections, and remove everything from the file system."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self.connections):
            self._close(connection, "")
        socket_directory.remove()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def of(self, pid: int) -> list[Connection]:
        """Return the connections of a worker."""
        return [connection for connection in self.connections if connection.speaker.pid == pid]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("workers cannot connect", retry_seconds=PAUSE_SECONDS, error=error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(PAUSE_SECONDS, self._resume)
            return
        sock.setblocking(False)
        result = self._speaker(sock)
        if isinstance(result, str):
            log.warning("connection of a worker refused", error=result)
            sock.close()
            return
        connection = Connection(sock, result, self._close)
        self.connections.add(connection)
        self._loop.add_reader(sock, self._read, connection)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _speaker(self, sock: socket.socket) -> Speaker | str:
        """Return the connected process, or the reason why it is refused."""
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid():
            return f"process {pid} is user {uid}'s"
        workers = self._workers()
        worker = ancestor(pid, workers)
        if worker is None:
            return f"process {pid} is no worker's"
        if len(self.of(worker)) >= CONNECTIONS_MAX:
            return f"local rank {workers[worker]} has {CONNECTIONS_MAX} connections already"
        return Speaker(workers[worker], worker)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection, "")
            return
        try:
            messages = connection.frames.feed(data)
        except ValueError as error:
            self._close(connection, str(error))
            return
        for message in messages:
            self._receiver.received(connection, message)

    def _close(self, connection: Connection, reason: str) -> None:
        if connection not in self.connections:
            return
        if reason:
            rank = connection.speaker.local_rank
            log.warning("connection of a worker closed", local_rank=rank, reason=reason)
        self.connections.discard(connection)
        self._loop.remove_reader(connection.sock)
        self._loop.remove_writer(connection.sock)
        connection.sock.close()
        for item in connection.unsent:
            _close_all(item.fds)
        connection.unsent.clear()
        self._receiver.lost(connection)


def ancestor(pid: int, workers: Mapping[int, int]) -> int | None:
    """Return the worker from which a process descends.

    A process whose parents have ended is identified by its session, which every worker leads.
    """
    own, seen = os.getpid(), pid
    while seen > 1 and seen != own:
        if seen in workers:
            return seen
        stat = procfs.stat(seen)
        seen = 0 if stat is None else stat.parent
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(pid)
        return session if session in workers else None
    return None


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
