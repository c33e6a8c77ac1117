"""Checkpoints in a directory: files that are on disk, completion by rename, deletion.

It relies only on properties of shared file systems: link and rename are atomic, mkdir and link fail
if the name exists. There are no locks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .names import BAD, TRASH, UNFINISHED, Name
from .storage import MANIFEST, CheckpointError, T

OWN = ".unbroken"
"""Folder of the attempts."""


class Directory:
    """The storage that a directory is."""

    is_remote = False
    is_exclusive = True
    writers = 1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        own = self.path / OWN
        try:
            if not self.path.is_dir():
                raise CheckpointError(f"{self.path} is no directory: make it, or mount it, first")
            own.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error
        for place in (self.path, own):
            if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
                raise CheckpointError(
                    f"{place} cannot be written by user {os.geteuid()}: it belongs to user"
                    f" {place.stat().st_uid}; give it to this user, or take another directory"
                )

    def entries(self) -> list[str]:
        """Return all names."""
        return os.listdir(self.path)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        try:
            return os.listdir(self.path / folder)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return (self.path / name).read_bytes()

    @contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file."""
        with (self.path / name).open("rb") as stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        """Write a file; the name is there when its content is on disk."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(".draft")
        write_file(draft, data)
        draft.rename(path)
        sync_directory(path.parent)

    def create(self, name: str, data: bytes) -> None:
        """Write a file; it is on disk on return."""
        path = self.path / name
        draft = path.with_name(f"draft-{os.getpid()}-{path.name}")
        write_file(draft, data)
        try:
            os.link(draft, path)
        finally:
            draft.unlink()
        sync_directory(path.parent)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Write a new file; it is on disk when the block has ended."""
        with (self.path / name).open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        sync_directory((self.path / name).parent)

    def unfinished(self, name: Name) -> str:
        """Return the folder of a checkpoint while it is written."""
        return f"{name}{UNFINISHED}"

    def begin(self, folder: str) -> None:
        """Make a folder."""
        (self.path / folder).mkdir(exist_ok=True)

    def publish(self, name: Name, manifest: bytes, check: Callable[[], None]) -> None:
        """Rename its folder."""
        place = self.path / self.unfinished(name)
        write_file(place / MANIFEST, manifest)
        sync_directory(place)
        check()
        place.rename(self.path / str(name))
        sync_directory(self.path)

    def remove(self, name: str) -> None:
        """Delete a file or a folder, if it is there."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()

    def set_aside(self, name: Name) -> None:
        """Rename its folder."""
        (self.path / str(name)).rename(self.path / f"{name}{BAD}")

    def delete(self, entry: str) -> None:
        """Delete a checkpoint; from its first moment on it does not count."""
        doomed = self.path / entry
        if not entry.endswith((TRASH, UNFINISHED)):
            # From here on it does not count, however far the deletion proceeds.
            doomed = doomed.rename(self.path / f"{entry}{TRASH}")
        shutil.rmtree(doomed)

    def retried(self, act: Callable[[], T]) -> T:
        """Call it once: a directory fails for a reason that stays."""
        return act()

    def set_patient(self, is_patient: bool) -> None:
        """Do nothing: nothing is called again."""

    def place(self, name: Name) -> Path:
        """Return the directory of a complete checkpoint."""
        return self.path / str(name)

    def reopened(self) -> Directory:
        """Return the same directory."""
        return Directory(self.path)


def write_file(path: Path, data: bytes) -> None:
    """Write a file; it is on disk on return."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory; its names are on disk on return."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
