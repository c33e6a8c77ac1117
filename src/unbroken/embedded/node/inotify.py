"""Waits for changes in a directory (inotify), so that a followed log needs no polling."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from types import TracebackType

_libc = ctypes.CDLL(None, use_errno=True)
# sys/inotify.h
IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100


class DirectoryWatch:
    """`changed` is set when something in the directory is written, made or renamed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self.changed = asyncio.Event()

    def __enter__(self) -> DirectoryWatch:
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        mask = IN_MODIFY | IN_MOVED_TO | IN_CREATE
        if self._fd < 0 or _libc.inotify_add_watch(self._fd, bytes(self._directory), mask) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot watch {self._directory}: {os.strerror(number)}")
        asyncio.get_running_loop().add_reader(self._fd, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _note(self) -> None:
        os.read(self._fd, 65536)
        self.changed.set()
