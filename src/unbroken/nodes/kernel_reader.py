"""Reader of the kernel's log as it grows: /dev/kmsg, or a file that replaces it.

A cursor is the position read so far. A restarted reader continues there, and without a cursor 5
minutes back (as node-problem-detector does, config/kernel-monitor.json).
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

from unbroken.core.nodes.kernel_log import KernelLine, read_line, read_record
from unbroken.foreign_numbers import whole_number
from unbroken.kube.clock import wall
from unbroken.log_lines import Log

from .file_watch import FileWatch
from .host import boot_id, uptime_seconds

log = Log(__name__)

KMSG = Path("/dev/kmsg")
LOOK_BACK_SECONDS = 300.0
TAIL_BYTES = 256 << 10
"""Bytes that are read at the end of a file without a cursor."""
RECORD_BYTES = 8192
"""A read of less than the record fails; the longest is 8 KiB (Linux kernel/printk,
PRINTK_MESSAGE_MAX 2 KiB, escaped to at most four times that)."""
LINE_BYTES_MAX = 64 << 10
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

Read = tuple[KernelLine, str]
"""A message, and the cursor behind it."""


class KmsgReader:
    """/dev/kmsg: a read gives a record; records that were overwritten are lost."""

    def __init__(self, root: Path, cursor: str) -> None:
        self._boot = boot_id(root)
        self._uptime_seconds = uptime_seconds(root) or 0.0
        start, _, sequence = cursor.rpartition(":")
        self._after = whole_number(sequence) if start == f"kmsg:{self._boot}" else None
        self._fd = -1

    def open(self) -> None:
        """Raises OSError where the log may not be read."""
        self._fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> Iterator[Read]:
        """All that is there now."""
        while (data := self._record()) is not None:
            line = read_record(data)
            if line is not None and line.sequence is not None and self._is_news(line):
                yield line, f"kmsg:{self._boot}:{line.sequence}"

    def _record(self) -> bytes | None:
        while True:
            try:
                return os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # The kernel was faster; the next read continues with the oldest remaining record.
                log.warning("kernel messages were overwritten before they were read", file=KMSG)

    def _is_news(self, line: KernelLine) -> bool:
        if self._after is not None:
            return line.sequence is not None and line.sequence > self._after
        age = self._uptime_seconds - (line.microseconds or 0) / 1e6
        return age <= LOOK_BACK_SECONDS

    async def lines(self) -> AsyncGenerator[Read, None]:
        """Lines that exist, and lines that come."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self.open()
        try:
            loop.add_reader(self._fd, ready.set)
            while True:
                ready.clear()
                for one in self.read():
                    yield one
                await ready.wait()
        finally:
            loop.remove_reader(self._fd)
            self.close()


class FileReader:
    """A file that grows, is truncated, replaced, or does not exist yet.

    Its text is trusted because only its owner can have written it: reading raises PermissionError
    if group or others may write to it.
    """

    def __init__(self, path: Path, cursor: str) -> None:
        self._path = path
        self._cursor = cursor
        self._fd = -1
        self._inode = 0
        self._offset = 0
        self._rest = b""
        self._is_cut = False
        """True if the rest up to the next end of a line belongs to a line that was too long."""
        self._is_first = True

    @property
    def is_open(self) -> bool:
        """True if the file was there."""
        return self._fd >= 0

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> Iterator[Read]:
        """All whole lines that are there now."""
        yield from self._grown()
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return
        if inode != self._inode or self._fd < 0:
            self.close()
            self._open()
            yield from self._grown()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        result = os.fstat(self._fd)
        if result.st_mode & OTHERS_WRITE:
            self.close()
            raise PermissionError(
                f"{self._path} may be written by others than its owner, who could forge faults: "
                f"chmod go-w {self._path}"
            )
        self._inode, self._rest, self._is_cut = result.st_ino, b"", False
        is_first, self._is_first = self._is_first, False
        self._offset = self._start(result) if is_first else 0

    def _start(self, found: os.stat_result) -> int:
        start, _, text = self._cursor.rpartition(":")
        offset = whole_number(text, 0, found.st_size)
        if start == f"file:{found.st_ino}" and offset is not None:
            return offset
        if wall() - found.st_mtime > LOOK_BACK_SECONDS:
            return found.st_size
        if found.st_size <= TAIL_BYTES:
            return 0
        skipped = found.st_size - TAIL_BYTES
        self._is_cut = True
        return skipped

    def _grown(self) -> Iterator[Read]:
        if self._fd < 0:
            return
        if os.fstat(self._fd).st_size < self._offset + len(self._rest):
            self._offset, self._rest, self._is_cut = 0, b"", False  # truncated
        while data := os.pread(self._fd, LINE_BYTES_MAX, self._offset + len(self._rest)):
            *whole, self._rest = (self._rest + data).split(b"\n")
            for text in whole:
                self._offset += len(text) + 1
                line = None if self._is_cut else read_line(text)
                self._is_cut = False
                if line is not None:
                    yield line, f"file:{self._inode}:{self._offset}"
            if self._is_cut or len(self._rest) >= LINE_BYTES_MAX:  # no line of a log
                self._offset, self._rest = self._offset + len(self._rest), b""
                self._is_cut = True

    async def lines(self) -> AsyncGenerator[Read, None]:
        """Lines that exist, and lines that come."""
        with FileWatch(self._path) as watch:
            try:
                while True:
                    watch.changed.clear()
                    for one in self.read():
                        yield one
                    await watch.changed.wait()
            finally:
                self.close()
