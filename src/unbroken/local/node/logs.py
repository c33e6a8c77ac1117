"""Reads a container's log as `kubectl logs` asks for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import SpecError
from unbroken.foreign_numbers import INT64_MAX, no_number, whole_number
from unbroken.kube import clock
from unbroken.local.node.processes.cri_log import (
    DROPPED,
    MAX_FILES,
    Entry,
    parsed,
    stamp,
)
from unbroken.nodes.file_watch import DirectoryWatch

CHUNK = 256 * 1024
DROPPED_LINES = "unbroken: lines dropped here, because the log was written faster than it was read"
"""Begin of the line in place of lines that are gone."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The part of a log to read, and its form (core/v1 PodLogOptions)."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    limit_bytes: int | None = None
    stream: str = ""
    """The only stream to show, as entries name it; empty: both."""
    since: str = ""
    """Entries with an earlier stamp are left out."""


def log_options(query: Mapping[str, str], now: float) -> LogOptions:
    """Read the options of a request; SpecError for values that make no sense."""
    if "sinceSeconds" in query and "sinceTime" in query:
        raise SpecError("only one of sinceTime or sinceSeconds may be specified")
    since = ""
    if "sinceSeconds" in query:
        since = stamp(int(max(0.0, now - _count(query, "sinceSeconds", 1)) * 1e9))
    if "sinceTime" in query:
        try:
            since = stamp(int(max(0.0, clock.parse_time(query["sinceTime"])) * 1e9))
        except (ValueError, OverflowError) as error:
            raise SpecError(f"sinceTime: {error}") from error
    return LogOptions(
        follow=_flag(query, "follow"),
        previous=_flag(query, "previous"),
        timestamps=_flag(query, "timestamps"),
        tail_lines=_count(query, "tailLines", 0) if "tailLines" in query else None,
        limit_bytes=_count(query, "limitBytes", 1) if "limitBytes" in query else None,
        stream=_stream(query),
        since=since,
    )


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "") in ("1", "true", "True")


def _stream(query: Mapping[str, str]) -> str:
    """Read the option of Kubernetes 1.32 (KEP-3288); SpecError."""
    stream = query.get("stream", "All")
    if stream not in ("All", "Stdout", "Stderr"):
        raise SpecError(f'stream: Unsupported value "{stream[:100]}": use All, Stdout or Stderr')
    if stream != "All" and "tailLines" in query:
        raise SpecError("stream: tailLines is allowed with All only")
    return "" if stream == "All" else stream.lower()


def _count(query: Mapping[str, str], name: str, least: int) -> int:
    number = whole_number(query[name], least)
    if number is None:
        raise SpecError(no_number(name, query[name], least, INT64_MAX))
    return number


class LogReader:
    """Reads entries of one run's log in order, over any number of rotations.

    Where files are gone before they were read, an entry without a stream says how many lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._rest = b""
        self.line = 0
        """Lines of the log before the next one."""
        self._first = 0
        """Lines of the log before the oldest file, when that was opened."""
        self._dropped = str(path) + DROPPED

    def new(self) -> Iterator[list[Entry]]:
        """Entries since the last call; the first time, all that there are."""
        while self._fd >= 0 or self._open_oldest():
            if missed := self._missed():
                yield [missed]
            yield from self._to_end()
            if not self._is_rotated():
                return
            # Lines that were written between the last read and the rotation.
            yield from self._to_end()
            self._follow()

    def _names(self) -> list[Path]:
        """Names of the log's files, the newest first."""
        older = (self._path.with_name(f"{self._path.name}.{n}") for n in range(1, MAX_FILES))
        return [self._path, *older]

    def _place(self) -> int | None:
        """Number of the open file among the log's; None: it is gone."""
        own = os.fstat(self._fd).st_ino
        return next((n for n, name in enumerate(self._names()) if _inode(name) == own), None)

    def _is_rotated(self) -> bool:
        return self._place() != 0 and self._path.exists()

    def _open(self, number: int) -> bool:
        try:
            self._fd = os.open(self._names()[number], os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _open_oldest(self) -> bool:
        while True:
            first = _count_in(self._dropped)
            if not any(self._open(number) for number in reversed(range(MAX_FILES))):
                return False
            place = self._place()
            is_oldest = place is not None and not any(
                name.exists() for name in self._names()[place + 1 :]
            )
            if is_oldest and _count_in(self._dropped) == first:
                self._first = first
                return True
            self.close()  # files were rotated meanwhile

    def _follow(self) -> None:
        """Open the file after the open one."""
        before = self._fd
        while place := self._place():
            if not self._open(place - 1):
                return  # it is about to be made
            after, self._fd = self._fd, before
            if self._place() == place:
                self._fd = after
                os.close(before)
                return
            os.close(after)
        self.close()
        self._open_oldest()

    def _missed(self) -> Entry | None:
        """The entry about lines that are gone between the last one and the open file."""
        count, self.line = self._first - self.line, max(self.line, self._first)
        if count <= 0:
            return None
        return Entry(stamp(0), "", False, f"{DROPPED_LINES}: {count}".encode())

    def _to_end(self) -> Iterator[list[Entry]]:
        while data := os.read(self._fd, CHUNK):
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            entries = [entry for line in lines if (entry := parsed(line)) is not None]
            self.line += sum(not entry.is_partial for entry in entries)
            yield entries

    def close(self) -> None:
        """Give the file back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _count_in(path: str) -> int:
    """The number that `cri_log.write_count` has written; 0: none was."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except FileNotFoundError:
        return 0
    return whole_number(text) or 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def since_line(entries: list[Entry], before: int, first: int) -> list[Entry]:
    """The entries of the lines from number `first` on; `before` lines are older than the entries.

    Pieces of one line count once.
    """
    for place, entry in enumerate(entries):
        if before >= first:
            return entries[place:]
        before += bool(entry.stream) and not entry.is_partial
    return []


async def _pieces(reader: LogReader) -> AsyncIterator[list[Entry]]:
    """New entries in pieces, with a turn for the whole local cluster after each: the 50 MiB of a
    container that writes empty lines take seconds to read."""
    for chunk in reader.new():
        yield chunk
        await asyncio.sleep(0)  # noqa: TID251 - gives way, and waits for nothing


async def _line_count(path: Path) -> int:
    """The number of lines of a log, with those that are gone and an unfinished last one."""
    reader, is_unfinished = LogReader(path), False
    try:
        async for chunk in _pieces(reader):
            is_unfinished = bool(chunk) and chunk[-1].is_partial
        return reader.line + is_unfinished
    finally:
        reader.close()


def rendered(entries: list[Entry], options: LogOptions, *, is_begun: bool = False) -> bytes:
    """Entries as they are shown.

    `is_begun`: the first continues a line. A line of several entries has one time (kubelet 1.33,
    logs.go, logWriter.write).
    """
    out: list[bytes] = []
    for entry in entries:
        is_other = entry.stamp < options.since or options.stream not in ("", entry.stream)
        if entry.stream and is_other:
            continue
        if options.timestamps and not is_begun:
            out.append(entry.stamp.encode() + b" ")
        out.append(entry.text)
        is_begun = entry.is_partial
        if not entry.is_partial:
            out.append(b"\n")
    return b"".join(out)


async def stream(path: Path, options: LogOptions, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """The log's bytes as asked for; a followed one until `ended` is set and all is read."""
    left = options.limit_bytes
    async for data in _unlimited(path, options, ended):
        if left is not None:
            data = data[:left]
            left -= len(data)
        if data:
            yield data
        if left == 0:
            return


async def _unlimited(path: Path, options: LogOptions, ended: asyncio.Event) -> AsyncIterator[bytes]:
    reader = LogReader(path)
    first, is_begun = 0, False
    try:
        # The watch comes before the first read, so that nothing falls between them.
        with DirectoryWatch(path.parent) as watch:
            is_tail = options.tail_lines is not None
            if options.tail_lines is not None:
                first = await _line_count(path) - options.tail_lines
            while True:
                is_last = not options.follow or ended.is_set()
                watch.changed.clear()
                async for chunk in _pieces(reader):
                    entries = chunk
                    if is_tail:
                        lines = sum(bool(one.stream) and not one.is_partial for one in chunk)
                        entries = since_line(chunk, reader.line - lines, first)
                    yield rendered(entries, options, is_begun=is_begun)
                    is_begun = entries[-1].is_partial if entries else is_begun
                is_tail = False
                if is_last:
                    return
                await _either(watch.changed, ended)
    finally:
        reader.close()


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(first.wait()), tasks.create_task(second.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
