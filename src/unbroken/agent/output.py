"""The workers' output: kept in a file for each stream, and shown on the agent's own, line by line.

A thread of its own does this with blocking writes, so that a console or a file system that has
stopped taking data holds up the workers, as it would without us, and never the agent.  Memory is
bounded: what is not yet a whole line is cut at `LINE_BYTES_MAX`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from unbroken.core.faults import LINE_CHARACTERS

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
LINE_BYTES_MAX = 64 * 1024
TAIL_LINES = 64


@dataclass(slots=True, eq=False)
class Stream:
    """One stream of one worker."""

    source: int
    """Descriptor to read; owned by this from now on."""
    file: int | None
    """Descriptor of its file; None: it could not be made."""
    console: int | None
    """Descriptor to show it on; None: it is not shown."""
    prefix: bytes
    on_first: Callable[[], None] | None = None
    """Called in the thread at the first byte."""
    rest: bytes = b""
    tail: collections.deque[bytes] = field(
        default_factory=lambda: collections.deque(maxlen=TAIL_LINES)
    )
    is_open: bool = True


class Output:
    """The thread.  `add` streams; `finish` reads what a worker that has ended has left."""

    def __init__(self) -> None:
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
        """Write what there is and end; gives up waiting after so long."""

        def end() -> None:
            self._is_running = False

        self._order(end)
        self._thread.join(seconds)

    def add(self, stream: Stream) -> None:
        """Read it from now on, until its end."""
        os.set_blocking(stream.source, False)
        self._order(lambda: self._register(stream))

    def finish(self, streams: tuple[Stream, ...], done: Callable[[], None]) -> None:
        """Read everything that is there, then call `done` in the thread."""

        def drain() -> None:
            for stream in streams:
                while stream.is_open and self._read(stream):
                    pass
                if stream.rest:
                    self._take(stream, b"\n")
            done()

        self._order(drain)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        # A full pipe wakes it just as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"w")

    def _run(self) -> None:
        while self._is_running:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wakeup, 4096)
                else:
                    self._read(key.data)
            while self._orders:
                self._orders.popleft()()

    def _register(self, stream: Stream) -> None:
        self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def _read(self, stream: Stream) -> bool:
        """Take one chunk; False: there is nothing now."""
        try:
            chunk = os.read(stream.source, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            if stream.on_first is not None:
                stream.on_first()
                stream.on_first = None
            self._keep(stream, chunk)
            self._take(stream, chunk)
            return True
        self._close(stream)
        return False

    def _close(self, stream: Stream) -> None:
        if stream.rest:
            self._take(stream, b"\n")
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
        except OSError as error:
            logger.warning("output is no longer kept reason=%r", error.strerror)
            os.close(stream.file)
            stream.file = None

    def _take(self, stream: Stream, chunk: bytes) -> None:
        """Show the whole lines; keep what follows the last of them."""
        data = stream.rest + chunk
        # A carriage return ends a line as well: progress bars end theirs with nothing else.  One at
        # the very end may be half of a line end.
        held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            whole, newline, rest = data, b"\n", b""
        stream.rest = rest + held
        if not newline:
            return
        stream.tail.extend(line[: 4 * LINE_CHARACTERS] for line in whole.rsplit(b"\n", TAIL_LINES))
        if stream.console is not None:
            self._show(stream, whole)

    def _show(self, stream: Stream, whole: bytes) -> None:
        assert stream.console is not None
        text = stream.prefix + whole.replace(b"\n", b"\n" + stream.prefix) + b"\n"
        try:
            _write(stream.console, text)
        except OSError as error:
            logger.warning("output is no longer shown reason=%r", error.strerror)
            stream.console = None


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def tail_text(stream: Stream) -> tuple[str, ...]:
    """The last lines of a stream that was finished."""
    lines = (line.decode(errors="replace")[:LINE_CHARACTERS] for line in stream.tail)
    return tuple(line for line in lines if line)
