"""Where checkpoints are kept: the few operations that every kind of storage has.

`files` has the one for directories, `remote` the one for URLs of fsspec. Names are relative to the
root, with `/`. An entry is a checkpoint's name with a suffix that says in which state it is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic  # noqa: TID251  (how long a store has not worked)
from typing import IO, Any, Protocol, TypeVar

from unbroken.errors import WorldError

from .names import Name

MANIFEST = "complete.json"
RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *([60.0] * 9))
"""Seconds before each retry of a write to a store that does not work: 10 minutes in all."""
READ_RETRIES = 6
"""Retries of what training waits for: the first of `RETRY_DELAYS`, one minute in all."""
RETRY_SECONDS = 600.0
READ_SECONDS = 60.0
"""Seconds after the first try from which on none begins, as a try itself takes long: s3fs makes
several requests before it gives up."""
_CHUNK_BYTES = 4 << 20
T = TypeVar("T")


class CheckpointError(WorldError):
    """Checkpoints cannot be saved or restored; the text gives the action to take."""


class Superseded(CheckpointError):
    """A newer attempt has taken this one's place: this one must not save here any more."""


@dataclass(frozen=True)
class File:
    """Expected contents of a file."""

    name: str
    bytes: int
    crc32: int


class Storage(Protocol):
    """A place for checkpoints. Errors are OSError, or CheckpointError with `retry_after_seconds`
    where trying again may help."""

    path: Any
    """Shown to users."""
    is_remote: bool
    """True if an operation may take long or fail for a while, so that training never waits for
    it."""
    writers: int
    """Files that a rank writes at the same time."""

    @property
    def is_exclusive(self) -> bool:
        """True if `create` refuses a name that is taken."""

    def entries(self) -> list[str]:
        """Return all names at the root; those of checkpoints with their suffix."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if it is absent."""

    def read(self, name: str) -> bytes:
        """Return a file's content. Raises FileNotFoundError."""

    def reading(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading at any offset. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, at once and durably; it may replace another."""

    def create(self, name: str, data: bytes) -> None:
        """Do the same. Raises FileExistsError if the name is taken."""

    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Write a file; it is durable when the block has ended."""

    def unfinished(self, name: Name) -> str:
        """Return the folder of a checkpoint while it is written."""

    def begin(self, folder: str) -> None:
        """Make a folder."""

    def publish(self, name: Name, manifest: bytes, check: Callable[[], None]) -> None:
        """Make a checkpoint count, after a last check; everything in it is durable."""

    def remove(self, name: str) -> None:
        """Delete a file or a folder, if it is there."""

    def set_aside(self, name: Name) -> None:
        """Let a checkpoint not count any more, and keep it."""

    def delete(self, entry: str) -> None:
        """Delete a checkpoint; from its first moment on it does not count."""

    def retried(self, act: Callable[[], T]) -> T:
        """Call a function; again after a while if it fails and trying again may help."""

    def set_patient(self, is_patient: bool) -> None:
        """Say whether anything is tried again."""

    def place(self, name: Name) -> Path | str:
        """Return the directory or URL of a complete checkpoint."""

    def reopened(self) -> Storage:
        """Return the same storage for a later attempt."""


class Checksum:
    """A stream that computes the checksum of the written data."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.bytes, self.crc32 = 0, 0
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except (OSError, CheckpointError) as error:
            # torch turns it into an error without a reason.
            self.failure = error
            raise
        self.bytes += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        return len(view)

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self.bytes

    def flush(self) -> None:
        """Flush to the operating system."""
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: torch closes its transforms; the stream ends with the block."""


@contextmanager
def verified(storage: Storage, name: str, files: list[File]) -> Iterator[Checksum]:
    """Open a new file; when the block ends it is durable, has been read back, and is in `files`."""
    with storage.writing(name) as stream:
        through = Checksum(stream)
        try:
            yield through
        except Exception:
            if through.failure is not None:
                raise through.failure from None
            raise
    folder, _, last = name.rpartition("/")
    file = File(last, through.bytes, through.crc32)
    problem = difference(storage, folder, file)
    if problem:
        raise CheckpointError(f"{storage.path}/{name}: {problem}, right after it was written", 1.0)
    files.append(file)


def difference(storage: Storage, folder: str, file: File) -> str:
    """Return the fault of a file; empty: none. It is read from the disk if the system allows it."""
    crc32, length = 0, 0
    try:
        with storage.reading(f"{folder}/{file.name}") as stream:
            with suppress(AttributeError, OSError):  # a stream of a network has no number
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while data := stream.read(_CHUNK_BYTES):
                crc32, length = zlib.crc32(data, crc32), length + len(data)
    except FileNotFoundError:
        return f"{file.name} is missing"
    if length != file.bytes:
        return f"{file.name} has {length} bytes instead of {file.bytes}"
    return "" if crc32 == file.crc32 else f"{file.name} does not fit its checksum"


def retry(act: Callable[[], T], delays: tuple[float, ...], seconds: float, stop: Event) -> T:
    """Call a function, and again after each delay while it raises an error that may pass.

    It is not called again once `stop` is set, or so many seconds have passed.
    """
    began = monotonic()
    for delay in delays:
        try:
            return act()
        except WorldError as error:
            is_over = error.retry_after_seconds is None or monotonic() - began > seconds
            if is_over or stop.wait(delay):
                raise
    return act()


def reason(error: Exception) -> str:
    """Return the text of an error of a storage."""
    return getattr(error, "strerror", None) or str(error) or repr(error)
