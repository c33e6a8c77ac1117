"""Reader of recorded logs: files, folders, gzip, standard input."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from unbroken.cli.show import note
from unbroken.cli.terminal import raw
from unbroken.errors import SpecError

CHUNK_BYTES = 256 * 1024
STDIN = "-"
NO_LOGS = (".json", ".yaml", ".yml", ".py", ".pt", ".pth", ".bin", ".safetensors", ".npy", ".zst")
"""Endings of files in folders that are skipped."""


class Readable(Protocol):
    """A stream that returns available data at once, such as the intact start of a cut gzip."""

    def read1(self, size: int, /) -> bytes: ...


def log_files(arguments: list[str]) -> list[str]:
    """The files to read: arguments, and the files below folders.  Raises SpecError."""
    result = []
    for argument in arguments:
        path = Path(argument)
        if argument == STDIN or path.is_file() or path.is_fifo():
            result.append(argument)
        elif path.is_dir():
            inside = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
            logs = sorted(one for one in inside if not one.endswith(NO_LOGS))
            if not logs:
                raise SpecError(f"no logs in folder {argument}")
            result += logs
        else:
            raise SpecError(f"no such file: {argument}")
    if len(set(result)) != len(result):
        raise SpecError("a log is given twice")
    return result


@dataclass(slots=True)
class Progress:
    """Progress of reading, shown on a terminal."""

    total_bytes: int = 0
    """Total size of the files."""
    read_bytes: int = 0
    shown: int = -1
    is_terminal: bool = False

    def add(self, count: int) -> None:
        """Count bytes; print each new percentage."""
        self.read_bytes += count
        percent = min(99, self.read_bytes * 100 // self.total_bytes) if self.total_bytes else 0
        if self.is_terminal and self.total_bytes > 8 * CHUNK_BYTES and percent != self.shown:
            self.shown = percent
            print(f"\rreading the logs: {percent} %", end="", file=raw(sys.stderr), flush=True)

    def clear(self) -> None:
        """Remove the line of the progress."""
        if self.shown >= 0:
            print("\r\x1b[K", end="", file=raw(sys.stderr), flush=True)
            self.shown = -1


def progress_of(files: list[str]) -> Progress:
    """The progress of reading these files."""
    sizes = (os.stat(file).st_size for file in files if file != STDIN)
    return Progress(sum(sizes), is_terminal=sys.stderr.isatty())


def chunks(file: str, progress: Progress) -> Iterator[bytes]:
    """Read a log.  A damaged gzip ends early, with a note."""
    if file == STDIN:
        yield from iter(lambda: sys.stdin.buffer.read(CHUNK_BYTES), b"")
        return
    try:
        with open(file, "rb") as raw:
            if raw.peek(2)[:2] != b"\x1f\x8b":
                yield from _read(raw, progress, raw)
                return
            with gzip.open(raw) as unpacked:
                yield from _read(unpacked, progress, raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        progress.clear()
        note(f"{file}: the gzip is damaged; only the part before the damage is read ({error})")
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror or error}") from error


def _read(stream: Readable, progress: Progress, raw: BinaryIO) -> Iterator[bytes]:
    before = 0
    while chunk := stream.read1(CHUNK_BYTES):
        if raw.seekable():
            at = raw.tell()
            progress.add(at - before)
            before = at
        yield chunk
