"""The workers' output: kept in a file for each stream, and shown on the agent's own, line by line.

A thread of its own does this with blocking writes. So a console or a file system that has stopped
taking data holds up the workers, as it would without the agent, and never the agent. Memory is
bounded: a partial line is cut at `LINE_BYTES_MAX`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import selectors
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unbroken.core.agent.faults import LINE_CHARACTERS
from unbroken.log_lines import Log

log = Log(__name__)

CHUNK_BYTES = 256 * 1024
PIPE_BYTES_MAX = 1024 * 1024
"""Largest capacity of a pipe that an unprivileged worker can set."""
LINE_BYTES_MAX = 1024 * 1024
CONTINUED = b" [unbroken: this line is longer than 1 MiB and continues in the next one]"
TAIL_LINES = 64


class WriteTimes:
    """Times of a worker's writes; kept by the output's thread, taken by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: float | None = None
        self._longest_gap = 0.0
        self._count = 0

    def note(self, now: float) -> None:
        """Note a write."""
        with self._lock:
            if self._at is not None:
                self._longest_gap = max(self._longest_gap, now - self._at)
            self._at = now
            self._count += 1

    def newest(self) -> float | None:
        """Return the time of the newest write, without taking it."""
        return self._at

    def take(self) -> tuple[float, float, int] | None:
        """Return and take, since the last call, the newest write, the longest gap, and the number
        of writes.

        The gap before the first write counts. None: nothing was written.
        """
        with self._lock:
            if self._at is None or not self._count:
                return None
            taken = self._at, self._longest_gap, self._count
            self._longest_gap, self._count = 0.0, 0
            return taken


@dataclass(slots=True, eq=False)
class Stream:
    """One stream of one worker."""

    source: int
    """Descriptor to read; owned by this object from now on."""
    file: int | None
    """Descriptor of its file; None: it could not be made."""
    console: int | None
    """Descriptor to show it on; None: it is not shown."""
    prefix: bytes
    on_first: Callable[[], None] | None = None
    """Called in the thread at the first byte."""
    on_read: Callable[[bytes, bool], None] | None = None
    """Called in the thread with the data read, and whether that was all; empty: the stream has
    ended."""
    on_lines: Callable[[Sequence[bytes]], None] | None = None
    """Called in the thread with whole lines that were written at once: the last ones."""
    rhythm: WriteTimes | None = None
    path: str = ""
    """Path of its file."""
    most_bytes: int | None = None
    """Size at which the file becomes `PATH.1`, in place of an earlier one; None: it only grows."""
    size: int = 0
    """Bytes in its file."""
    rest: bytes = b""
    tail: collections.deque[bytes] = field(
        default_factory=lambda: collections.deque(maxlen=TAIL_LINES)
    )
    is_open: bool = True


class OutputWatch(Protocol):
    """Receives a tick when everything written before a point in time was read."""

    def deadline(self) -> float | None:
        """Return the next such point."""

    def tick(self) -> None:
        """Take a tick: the point is past, and all was read."""


class OutputThread:
    """The thread. `add` streams; `finish` reads the rest of the output of an ended worker."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._watch: OutputWatch | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._orders: collections.deque[Callable[[], None]] = collections.deque()
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Write the pending output and end; stop waiting after this number of seconds."""

        def end() -> None:
            self._is_running = False

        self.call(end)
        self._thread.join(seconds)

    def add(self, stream: Stream) -> None:
        """Read the stream from now on, until its end."""
        os.set_blocking(stream.source, False)
        self.call(lambda: self._register(stream))

    def watch(self, watch: OutputWatch | None) -> None:
        """Keep the deadlines of `watch` from now on, replacing an earlier watch."""

        def begin() -> None:
            self._watch = watch

        self.call(begin)

    def call(self, order: Callable[[], None]) -> None:
        """Call the function in the thread, in order."""
        self._orders.append(order)
        # A full pipe wakes it just as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"w")

    def finish(self, streams: tuple[Stream, ...], done: Callable[[], None]) -> None:
        """Read everything that is available, then call `done` in the thread."""

        def drain() -> None:
            for stream in streams:
                while stream.is_open and self._read(stream):
                    pass
                if stream.rest:
                    self._take(stream, b"\n")
            done()

        self.call(drain)

    def _run(self) -> None:
        while self._is_running:
            ready = self._selector.select(self._patience())
            # First: what a kept worker writes now belongs to the attempt before the ordered one.
            self._obey()
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wakeup, 4096)
                elif key.data.is_open:
                    self._read(key.data)
            self._obey()
            if self._watch is not None and self._patience() == 0.0:
                self._read_all()
                self._watch.tick()

    def _obey(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _patience(self) -> float | None:
        """Return the seconds until the watch's deadline; None: it has none."""
        due = self._watch.deadline() if self._watch is not None else None
        return None if due is None else max(0.0, due - self._clock())

    def _read_all(self) -> None:
        """Read what every watched pipe holds now, but not endlessly what is written meanwhile."""
        for key in list(self._selector.get_map().values()):
            stream, taken = key.data, CHUNK_BYTES
            left = PIPE_BYTES_MAX if stream is not None and stream.on_read is not None else 0
            while left > 0 and taken == CHUNK_BYTES:
                taken = self._read(stream)
                left -= taken

    def _register(self, stream: Stream) -> None:
        self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def _read(self, stream: Stream) -> int:
        """Take one chunk; return its length, 0: there is none now."""
        try:
            chunk = os.read(stream.source, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        if chunk:
            if stream.rhythm is not None:
                stream.rhythm.note(self._clock())
            if stream.on_read is not None:
                stream.on_read(chunk, len(chunk) < CHUNK_BYTES)
            self._keep(stream, chunk)
            if stream.on_first is not None:
                # A callback finds the data in the file.
                stream.on_first()
                stream.on_first = None
            self._take(stream, chunk)
            return len(chunk)
        self._close(stream)
        return 0

    def _close(self, stream: Stream) -> None:
        if stream.rest:
            self._take(stream, b"\n")
        if stream.on_read is not None:
            stream.on_read(b"", True)
        stream.is_open = False
        self._selector.unregister(stream.source)
        os.close(stream.source)
        if stream.file is not None:
            os.close(stream.file)

    def _keep(self, stream: Stream, chunk: bytes) -> None:
        if stream.file is None:
            return
        try:
            _write(stream.file, chunk)
            stream.size += len(chunk)
            if stream.most_bytes is not None and stream.size >= stream.most_bytes:
                os.replace(stream.path, f"{stream.path}.1")
                file = open_file(stream.path)
                os.close(stream.file)
                stream.file, stream.size = file, 0
        except OSError as error:
            log.warning("output of a worker is not stored any more", error=error)
            os.close(stream.file)
            stream.file = None

    def _take(self, stream: Stream, chunk: bytes) -> None:
        """Show the whole lines; keep the partial one after them."""
        data = stream.rest + chunk
        # A carriage return ends a line as well: progress bars end theirs with nothing else.  One at
        # the very end may be half of a line end.
        held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            whole, newline, rest = data + CONTINUED, b"\n", b""
        stream.rest = rest + held
        if not newline:
            return
        lines = [line[: 4 * LINE_CHARACTERS] for line in whole.rsplit(b"\n", TAIL_LINES)]
        stream.tail.extend(lines)
        if stream.on_lines is not None:
            stream.on_lines(lines)
        if stream.console is not None:
            self._show(stream, whole)

    def _show(self, stream: Stream, whole: bytes) -> None:
        assert stream.console is not None
        text = stream.prefix + whole.replace(b"\n", b"\n" + stream.prefix) + b"\n"
        try:
            _write(stream.console, text)
        except OSError as error:
            log.warning("output of a worker is not shown any more", error=error)
            stream.console = None


def open_file(path: str) -> int:
    """Open a file to be added to. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def tail_text(stream: Stream) -> tuple[str, ...]:
    """Return the last lines of a finished stream."""
    lines = (line.decode(errors="replace")[:LINE_CHARACTERS] for line in stream.tail)
    return tuple(line for line in lines if line)


def last_line(stream: Stream) -> str:
    """Return the newest whole line read by now."""
    with contextlib.suppress(IndexError, RuntimeError):  # the thread continues to write
        result = next(filter(None, reversed(stream.tail)), b"")
        return result.decode(errors="replace")[:LINE_CHARACTERS]
    return ""
