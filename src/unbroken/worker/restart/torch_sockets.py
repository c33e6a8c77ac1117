"""Find the sockets of torch in this process, and end the waits for them.

Torch does not reveal which sockets are its own. They are recognized by their properties:

- A store's sockets have the port of a server in this process, or are connected to the address of a
  server of which this process is a client.
- Gloo's sockets are in one epoll with a listener, and neither epoll nor listener closes on exec.
  Those of Python, libuv, gRPC and ZeroMQ do. Those of UCX's TCP transport do not: they are taken
  for gloo's.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic  # noqa: TID251  (how long a client connects)
from typing import Any

__all__ = ["TorchSockets"]

TCP_CLOSE, TCP_LISTEN = 7, 10
"""States, as include/net/tcp_states.h of Linux numbers them."""
CONNECT_SECONDS = 0.25
"""Seconds in which a store's client that connects is left alone.

Shut down while it connects, it sleeps for 0.25 to 0.75 s before it fails (TCPStore.cpp of torch
2.13). Left alone it connects in a moment, unless its server hangs.
"""
ANSWER_SECONDS = 0.02
"""Pause between two rounds of connections to one listener."""
SEQUENCE = struct.Struct("=q")
"""The first bytes that a peer sends (gloo/transport/tcp/device.cc)."""


@dataclass(eq=False)
class _Store:
    """A store's server, or a client of one."""

    port: int
    hosts: frozenset[str]
    """Addresses of the client's server; empty for a server."""
    began: float = field(default_factory=monotonic)
    is_made: bool = False

    def owns(self, sock: _socket.socket) -> bool:
        if not self.hosts:
            return bool(sock.getsockname()[1] == self.port)
        with suppress(OSError):  # not connected
            host, port, *_ = sock.getpeername()
            return port == self.port and _plain(host) in self.hosts
        return False


class TorchSockets:
    """Shuts down the sockets of stores and groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: list[_Store] = []
        self._sizes: list[int] = []
        """Sizes of the groups that are being made."""
        self._answered: dict[int, float] = {}
        """Times of the last connections to listeners."""

    @contextmanager
    def store(self, host: str, port: int, *, is_server: bool) -> Iterator[None]:
        """Watch a store while it is made, and from then on."""
        made = _Store(port, frozenset() if is_server else _addresses(host))
        self._stores.append(made)
        try:
            yield
            made.is_made = True
        finally:
            if not made.is_made:
                self._stores.remove(made)

    @contextmanager
    def group(self, size: int) -> Iterator[None]:
        """Watch a group of `size` ranks while it is made."""
        self._sizes.append(size)
        try:
            yield
        finally:
            self._sizes.remove(size)

    def is_store_being_made(self) -> bool:
        """Return whether a server starts or a client connects."""
        return not all(store.is_made for store in self._stores)

    def is_serving(self) -> bool:
        """Return whether a store's server listens in this process."""
        servers = [store for store in self._stores if not store.hosts]
        result = _inodes() if servers else {}
        return any(
            _state(fd, inode) == TCP_LISTEN and _is_owned(fd, inode, servers)
            for inode, fd in result.items()
        )

    def shut(self) -> None:
        """End the waits of all sockets that read, write or connect, in this process and at the
        other ends.

        Waits for a peer to connect end as well.
        """
        with self._lock:
            result = _inodes()
            listeners, gloo = _gloo(result)
            if self._sizes:
                self._answer(listeners, max(self._sizes))
            for inode, fd in gloo.items():
                # Queued data still goes out: gloo forgets messages that it cannot send, and the
                # rank that waits for one would never learn it (`signalException` in
                # gloo/transport/tcp/pair.cc).
                _shut(fd, inode, socket.SHUT_RD)
            now = monotonic()
            stores = [s for s in self._stores if s.is_made or now - s.began > CONNECT_SECONDS]
            for inode, fd in result.items() if stores else ():
                if inode not in gloo and inode not in listeners and _is_owned(fd, inode, stores):
                    _shut(fd, inode, socket.SHUT_RDWR)

    def forget(self) -> None:
        """Forget the stores of the attempt that has ended."""
        self._stores.clear()

    def _answer(self, listeners: dict[int, int], size: int) -> None:
        """Connect as each rank that gloo may wait for.

        Gloo waits until the group's timeout, in no socket, for two kinds of ranks
        (gloo/transport/tcp/listener.cc). They died before they connected, or their connection was
        shut down before they sent their number. Our own connection ends at once, and so does the
        wait.
        """
        for inode, fd in listeners.items():
            if monotonic() - self._answered.get(inode, -ANSWER_SECONDS) < ANSWER_SECONDS:
                continue
            with suppress(OSError), _taken(fd, inode) as sock:
                family, address = sock.family, sock.getsockname()
                for sequence in range(size):
                    _send(family, address, SEQUENCE.pack(sequence))
            self._answered[inode] = monotonic()


def _send(family: int, address: Any, data: bytes) -> None:
    with suppress(OSError), socket.socket(family) as sock:
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(address)
        sock.sendall(data)


def _addresses(host: str) -> frozenset[str]:
    with suppress(OSError):
        result = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return frozenset(_plain(str(address[0])) for *_, address in result)
    return frozenset({host})


def _plain(host: str) -> str:
    """Strip the mark of an IPv4 address in a socket of IPv6."""
    return host.removeprefix("::ffff:")


def _inodes() -> dict[int, int]:
    """Map the inodes of this process's sockets to descriptors.

    The number of a descriptor is another socket's as soon as it is closed.
    """
    result = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                result[status.st_ino] = int(name)
    return result


def _gloo(found: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Find gloo's listeners and its other sockets."""
    listeners: dict[int, int] = {}
    others: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            if not _stays_on_exec(int(name)):
                continue
            lines = Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
            polled = {_inode(line) for line in lines if line.startswith("tfd:")}
            members = {inode: found[inode] for inode in polled & found.keys()}
            own = {inode: fd for inode, fd in members.items() if _is_gloos(fd, inode)}
            listeners |= own
            others |= {i: fd for i, fd in members.items() if own and i not in own}
    return listeners, others


def _is_gloos(fd: int, inode: int) -> bool:
    return _state(fd, inode) == TCP_LISTEN and _stays_on_exec(fd)


def _stays_on_exec(fd: int) -> bool:
    return not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def _inode(line: str) -> int:
    """Read `tfd: 9 events: 19 data: 9 pos:0 ino:40e sdev:10` (filesystems/proc.rst of Linux)."""
    _, _, rest = line.partition(" ino:")
    return int(rest.split()[0], 16) if rest else 0


@contextmanager
def _taken(fd: int, inode: int) -> Iterator[_socket.socket]:
    """Duplicate a socket, so that it cannot be closed meanwhile. Raises OSError if it was
    closed."""
    sock = _socket.socket(fileno=os.dup(fd))
    try:
        if os.fstat(sock.fileno()).st_ino != inode:
            raise OSError("closed")
        yield sock
    finally:
        sock.close()


def _is_owned(fd: int, inode: int, stores: list[_Store]) -> bool:
    with suppress(OSError), _taken(fd, inode) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            return any(store.owns(sock) for store in stores)
    return False


def _state(fd: int, inode: int) -> int | None:
    """Return the state of a TCP socket; None for another."""
    with suppress(OSError), _taken(fd, inode) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return None


def _shut(fd: int, inode: int, how: int) -> None:
    """Shut down a connection over TCP, established or not.

    A listening socket is left alone, as gloo's thread that accepts would end the process; and so is
    one that may listen soon.
    """
    if _state(fd, inode) not in (None, TCP_CLOSE, TCP_LISTEN):
        with suppress(OSError), _taken(fd, inode) as sock:
            sock.shutdown(how)
