"""Which sockets are torch's, and how whoever waits for them is thrown out.

A listener is torch's if it came to be while a store or a group was made, and Python did not make
it; connections are torch's if they are in one epoll with such a listener, or are a store's client's
and came to be as a listener does.  Sockets that native code of another thread opens at that moment
cannot be told from them.
"""

from __future__ import annotations

import _socket
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

__all__ = ["Making", "TorchSockets"]

TCP_CLOSE, TCP_LISTEN = 7, 10
"""States, as include/net/tcp_states.h of Linux numbers them."""
CONNECT_SECONDS = 0.25
"""A store's client that is shut down while it connects sleeps for 0.25 to 0.75 s before it says so
(TCPStore.cpp of torch 2.13); left alone it is done in a moment, unless its server hangs."""
ANSWER_SECONDS = 0.02
"""Between two answers to whoever waits for a peer."""
SEQUENCE = struct.Struct("=q")
"""What a peer says first (gloo/transport/tcp/device.cc)."""


@dataclass(eq=False)
class Making:
    """A store, or a group of so many ranks, that is not there yet."""

    size: int
    before: set[int]
    began: float = field(default_factory=monotonic)
    answered: dict[int, float] = field(default_factory=dict)

    def answer(self, listeners: dict[int, int]) -> None:
        """Connect as each rank that gloo may wait for.

        One that has died before it connected, or whose connection is shut down before it has said
        who it is, is waited for until the group's timeout, in no socket (gloo/transport/tcp/
        listener.cc).  What it gets now is at its end at once.
        """
        for inode, fd in listeners.items():
            if monotonic() - self.answered.get(inode, -ANSWER_SECONDS) < ANSWER_SECONDS:
                continue
            with suppress(OSError), _taken(fd, inode) as sock:
                family, address = sock.family, sock.getsockname()
                for sequence in range(self.size):
                    _say(family, address, SEQUENCE.pack(sequence))
            self.answered[inode] = monotonic()


class TorchSockets:
    """Known by inode: the number of a descriptor is another socket's as soon as it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._makings: list[Making] = []
        self._foreign: set[int] = set()
        self._groups: set[int] = set()
        """Listeners."""
        self._stores: set[int] = set()
        """Listeners, and connections of clients."""

    def begin(self, size: int = 0) -> Making:
        """A store is being made, or a group of so many ranks."""
        with self._lock:
            if not self._makings:
                self._foreign.clear()
            making = Making(size, set(_inodes()))
            self._makings.append(making)
            return making

    def end(self, making: Making) -> None:
        """It is made, or cannot be."""
        with self._lock:
            self._makings.remove(making)
            self._add(making, _inodes(), self._groups, self._stores)

    def is_store_being_made(self) -> bool:
        """Or a store's client connects."""
        return any(not making.size for making in self._makings)

    def is_serving(self) -> bool:
        """Whether a store's server listens in this process."""
        with self._lock:
            found = _inodes()
            ours = self._stores & found.keys()
            return any(_state(found[inode], inode) == TCP_LISTEN for inode in ours)

    def spare(self, sock: socket.socket) -> None:
        """Python has made it."""
        if self._makings:
            with suppress(OSError):
                self._foreign.add(os.fstat(sock.fileno()).st_ino)

    def shut(self) -> None:
        """Throw out whoever reads, writes or connects, in this process and at the other ends, and
        whoever waits for a peer to connect."""
        with self._lock:
            found, groups, stores = _inodes(), set(self._groups), set(self._stores)
            for making in self._makings:
                if making.size or monotonic() - making.began > CONNECT_SECONDS:
                    self._add(making, found, groups, stores)
                making.answer({inode: found[inode] for inode in groups & found.keys()})
            gloos = _polled(groups)
            for inode in gloos & found.keys():
                # What is sent still goes out: gloo forgets messages that it cannot send, and who
                # waits for them is never told (`signalException` in gloo/transport/tcp/pair.cc).
                _shut(found[inode], inode, socket.SHUT_RD)
            for inode in ((stores | _polled(stores)) - gloos) & found.keys():
                _shut(found[inode], inode, socket.SHUT_RDWR)

    def forget(self) -> None:
        """They are another attempt's now."""
        with self._lock:
            self._groups.clear()
            self._stores.clear()

    def _add(
        self, making: Making, found: dict[int, int], groups: set[int], stores: set[int]
    ) -> None:
        for inode in found.keys() - making.before - self._foreign:
            if not making.size:
                stores.add(inode)
            elif _state(found[inode], inode) == TCP_LISTEN:
                groups.add(inode)


def _say(family: int, address: Any, words: bytes) -> None:
    with suppress(OSError), socket.socket(family) as sock:
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(address)
        sock.sendall(words)


def _inodes() -> dict[int, int]:
    """Of the sockets of this process: descriptors by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _polled(listeners: set[int]) -> set[int]:
    """The inodes that are in an epoll of this process together with one of these."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd") if listeners else ():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
                inodes = {_inode(line) for line in lines if line.startswith("tfd:")}
                found |= inodes if inodes & listeners else set()
    return found


def _inode(line: str) -> int:
    """`tfd: 9 events: 19 data: 9 pos:0 ino:40e sdev:10` (Documentation/filesystems/proc.rst)."""
    _, _, rest = line.partition(" ino:")
    return int(rest.split()[0], 16) if rest else 0


@contextmanager
def _taken(fd: int, inode: int) -> Iterator[_socket.socket]:
    """A socket by its descriptor, whatever becomes of the latter.  OSError: it is another's.

    Not by Python's own class, whose sockets are spared.
    """
    sock = _socket.socket(fileno=os.dup(fd))
    try:
        if os.fstat(sock.fileno()).st_ino != inode:
            raise OSError("closed")
        yield sock
    finally:
        sock.close()


def _state(fd: int, inode: int) -> int | None:
    """None: no TCP."""
    with suppress(OSError), _taken(fd, inode) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return None


def _shut(fd: int, inode: int, how: int) -> None:
    """Shut down a connection over TCP, or one to be.  Never a socket that listens, gloo's thread
    that accepts would end the process; nor one that may listen soon, nobody could connect to it."""
    if _state(fd, inode) not in (None, TCP_CLOSE, TCP_LISTEN):
        with suppress(OSError), _taken(fd, inode) as sock:
            sock.shutdown(how)
