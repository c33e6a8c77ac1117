"""The lines of a recorded log: each with its time, its rank and its place in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from unbroken.errors import SpecError

from .lines import LineAssembler
from .origins import FileOrigin, dropped_lines, rank_of, take_off
from .times import Times

HEAD_LINES = 200
"""Lines of a file that are read to find out whose lines it has."""
LINES_WITHOUT_TIME_MAX = 10_000
"""Lines without a time at the start of a file after which it counts as one without times."""


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A line of a file."""

    file: str
    number: int
    """Number of the line from 1, as an editor counts."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a worker."""

    at: float
    rank: int
    stream: str
    text: bytes
    place: LinePlace


@dataclass(slots=True)
class Reading:
    """Options for reading a file's lines."""

    name: str
    origin: FileOrigin
    nproc: int | None = None
    """Workers of a node."""
    time_format: str = "auto"
    seconds_per_line: float | None = None
    """Seconds from one line to the next; None: times are in the lines."""


@dataclass(slots=True)
class Recorded:
    """The lines of one file in order, each with its time and rank."""

    reading: Reading
    chunks: Iterable[bytes]
    has_times: bool = True
    """False: all lines have the time 0."""
    was_backward: int = 0
    """Lines with an earlier time than a line before them; they count at the later time."""
    missing: int = 0
    """Lines that are gone from the log, as a line in their place says."""
    missing_at: LinePlace | None = None
    """The newest such line."""
    has_prefixes: bool = False
    """Lines carry their rank."""
    head: list[Line] = field(default_factory=list)
    _rest: Iterator[Line] = field(default_factory=lambda: iter(()))
    _times: Times = field(default_factory=Times)
    _at: float | None = None

    def __post_init__(self) -> None:
        self._times = Times(self.reading.time_format)

    def open(self) -> None:
        """Read the first lines, and on to the first time; `has_times` is then known."""
        self._rest = self._lines()
        first: float | None = None
        for line in self._rest:
            self.head.append(line)
            first = self._at if first is None else first
            if len(self.head) >= (LINES_WITHOUT_TIME_MAX if first is None else HEAD_LINES):
                break
        self.has_times = first is not None
        self.head = [replace(line, at=max(line.at, first or 0.0)) for line in self.head]

    def __iter__(self) -> Iterator[Line]:
        yield from self.head
        self.head = []
        yield from self._rest

    def _lines(self) -> Iterator[Line]:
        """Yield the lines; before the first time stamp the time is 0."""
        reading, rank, stream = self.reading, 0, self.reading.origin.stream
        count = 0
        for number, is_first, text in numbered(self.chunks):
            stamp = b""
            if is_first:
                told = take_off(text)
                if gone := dropped_lines(told.text):
                    # Its time is no worker's.
                    self.missing += gone
                    self.missing_at = LinePlace(reading.name, number)
                    continue
                result = rank_of(reading.origin, told, reading.nproc)
                if result is None:
                    continue
                self.has_prefixes = self.has_prefixes or bool(told.prefixes)
                rank, stream = result, told.stream or reading.origin.stream
                text, stamp = told.text, told.stamp
            if reading.seconds_per_line is not None:
                self._at = count * reading.seconds_per_line
            else:
                self._see(stamp or text)
            count += 1
            yield Line(self._at or 0.0, rank, stream, text, LinePlace(reading.name, number))

    def _see(self, text: bytes) -> None:
        at = self._times.read(text)
        if at is None:
            return
        if self._at is not None and at < self._at:
            self.was_backward += 1
            return
        self._at = at


def numbered(chunks: Iterable[bytes]) -> Iterator[tuple[int, bool, bytes]]:
    """Yield lines as the agent would see them, each with its place in the file.

    The place is the number of the file's line, and whether the yielded line begins it: a progress
    bar has many lines in one.
    """
    assembler, number, is_first = LineAssembler(), 1, True
    for chunk in chunks:
        *whole, tail = chunk.split(b"\n")
        for part in whole:
            for line in assembler.feed(part + b"\n", is_drained=False):
                yield number, is_first, line
                is_first = False
            number, is_first = number + 1, True
        for line in assembler.feed(tail, is_drained=False) if tail else ():
            yield number, is_first, line
            is_first = False
    for line in assembler.close():
        yield number, is_first, line


def world_of(nnodes: int, nproc: int | None) -> range:
    """Return all ranks of a job; empty if the number of ranks per node is not known."""
    return range(nnodes * nproc) if nproc else range(0)


def require_times(files: Sequence[Recorded]) -> None:
    """Raise SpecError if no file has a time in it."""
    if files and not any(file.has_times for file in files):
        raise SpecError(
            "no line has a time in it: name the format with --time-format, or give --pace"
        )
