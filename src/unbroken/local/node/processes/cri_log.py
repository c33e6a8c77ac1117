"""Container logs in the format of container runtimes, written and read.

One entry a line, `2026-01-02T03:04:05.000000006Z stdout F text`; `P` marks a piece whose line
continues in the next entry (CRI log format, kubernetes/design-proposals kubelet-cri-logging).

Standard library only: the writing half runs in the launcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

MAX_LINE = 16 * 1024
"""Longer lines are cut into pieces (containerd, max_container_log_line_size)."""
MAX_BYTES = 10 * 1024 * 1024
MAX_FILES = 5
"""Sizes at which logs rotate (kubelet, containerLogMaxSize and containerLogMaxFiles)."""
DROPPED = ".dropped"
"""End of the name of the file that counts the lines of all files that are gone."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stamp(nanoseconds: int) -> str:
    """RFC 3339 with nine digits, UTC."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    moment = _EPOCH + timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def framed(stream: str, data: bytes, when: str) -> tuple[bytes, bytes]:
    """Entries for the whole lines in `data`, and the beginning of a line that is left over."""
    full = f"{when} {stream} F ".encode()
    text, newline, rest = data.rpartition(b"\n")
    out: list[bytes] = []
    if newline:
        if len(text) > MAX_LINE and any(len(line) > MAX_LINE for line in text.split(b"\n")):
            for line in text.split(b"\n"):
                pieces, line = _pieces(stream, line, when)
                out += [pieces, full, line, b"\n"]
        else:
            out += [full, text.replace(b"\n", b"\n" + full), b"\n"]
    pieces, rest = _pieces(stream, rest, when)
    out.append(pieces)
    return b"".join(out), rest


def partial(stream: str, data: bytes, when: str) -> bytes:
    """The entry of a last line that has no end."""
    return f"{when} {stream} P ".encode() + data + b"\n" if data else b""


def _pieces(stream: str, line: bytes, when: str) -> tuple[bytes, bytes]:
    out: list[bytes] = []
    while len(line) > MAX_LINE:
        out.append(partial(stream, line[:MAX_LINE], when))
        line = line[MAX_LINE:]
    return b"".join(out), line


class LogFile:
    """The log of one run of a container; rotates itself at a line's end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = {"stdout": b"", "stderr": b""}
        self._fd = -1
        self._size = 0
        self._lines = [0]
        """Lines in each file, the newest first."""
        self._dropped = 0

    def open(self) -> None:
        """Open or continue the file."""
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size

    def write(self, stream: str, data: bytes, nanoseconds: int) -> None:
        """Append what a stream gave; an unfinished line waits for its end."""
        entries, self._rest[stream] = framed(stream, self._rest[stream] + data, stamp(nanoseconds))
        self._append(entries, data.count(b"\n"))

    def finish(self, nanoseconds: int) -> None:
        """Write unfinished lines: nothing more will come."""
        for stream, rest in self._rest.items():
            self._append(partial(stream, rest, stamp(nanoseconds)), 0)

    def _append(self, entries: bytes, lines: int) -> None:
        view = memoryview(entries)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # A full disk costs output, never the container.
            return
        self._size += len(entries)
        self._lines[0] += lines
        if self._size >= MAX_BYTES:
            self._rotate()

    def _rotate(self) -> None:
        if len(self._lines) == MAX_FILES:
            self._dropped += self._lines.pop()
            # Before the file goes: a reader that misses it finds how much it missed.
            write_count(self._path + DROPPED, self._dropped)
        self._lines.insert(0, 0)
        os.close(self._fd)
        names = [self._path, *(f"{self._path}.{n}" for n in range(1, MAX_FILES))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if os.path.exists(newer):
                os.replace(newer, older)
        self.open()


def write_count(path: str, count: int) -> None:
    """Write a number so that a reader sees all of it."""
    fd = os.open(path + ".draft", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(str(count))
    os.replace(path + ".draft", path)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as it was read."""

    stamp: str
    stream: str
    is_partial: bool
    text: bytes


def parsed(line: bytes) -> Entry | None:
    """Read one line of a log file without its newline; None if it is not one."""
    parts = line.split(b" ", 3)
    if len(parts) != 4 or parts[2] not in (b"F", b"P"):
        return None
    return Entry(parts[0].decode("ascii", "replace"), parts[1].decode(), parts[2] == b"P", parts[3])
