"""Waits for changes in a directory, or of one file in it (inotify), without polling."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

_libc = ctypes.CDLL(None, use_errno=True)
# sys/inotify.h
IN_MODIFY, IN_MOVED_TO, IN_CREATE, IN_Q_OVERFLOW = 0x2, 0x80, 0x100, 0x4000
_EVENT = struct.Struct("iIII")


class DirectoryWatch:
    """`changed` is set when something in the directory is written, truncated, made or renamed.

    The directory must exist: OSError else.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self.changed = asyncio.Event()

    def __enter__(self) -> Self:
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        mask = IN_MODIFY | IN_MOVED_TO | IN_CREATE
        if self._fd < 0 or _libc.inotify_add_watch(self._fd, bytes(self._directory), mask) < 0:
            number = ctypes.get_errno()
            if self._fd >= 0:
                os.close(self._fd)
            raise OSError(number, f"cannot watch {self._directory}: {os.strerror(number)}")
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        self._note(os.read(self._fd, 65536))

    def _note(self, events: bytes) -> None:
        self.changed.set()


class FileWatch(DirectoryWatch):
    """`changed` is set when the file is written, truncated, made, or another takes its place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._name = os.fsencode(path.name)

    def _note(self, events: bytes) -> None:
        """The directory may hold other files that are written all the time."""
        at = 0
        while at + _EVENT.size <= len(events):
            _, mask, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size
            if events[at : at + length].rstrip(b"\0") == self._name or mask & IN_Q_OVERFLOW:
                self.changed.set()
            at += length
