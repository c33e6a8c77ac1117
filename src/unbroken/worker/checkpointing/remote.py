"""Checkpoints at a URL: object stores and file systems that fsspec knows.

Nothing is renamed: a checkpoint counts once its last object, the manifest, is there. That object is
written where none of its name may exist. A store may be away, full, or answer that it has what it
has not. So each object is read back before anything relies on it, and what may pass is tried again.
The library of the store finds the credentials.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from threading import Event, current_thread, main_thread
from typing import IO, Any

from unbroken.wire.compat import zip_equal

from . import storage
from .files import OWN, Directory
from .names import BAD, UNFINISHED, Name, parse
from .storage import MANIFEST, CheckpointError, Storage, T, reason, retry

_BAD = "bad.json"
_WRITERS = 4
_LISTERS = 16
_BLOCK_BYTES = 16 << 20
"""Bytes of a request. S3 allows 10,000 requests a file."""
_FINAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors that do not pass within minutes."""
_WHOLE_OBJECTS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "memory"}
"""Schemes whose stores show an object when all of it is there, and never a part."""


class Remote:
    """The storage at a URL of fsspec."""

    is_remote = True
    writers = _WRITERS

    def __init__(self, url: str) -> None:
        self.path = url.rstrip("/")
        self._stop = Event()
        scheme = url.partition("://")[0]
        self._is_whole = scheme in _WHOLE_OBJECTS
        try:
            self._fs, self._root = import_module("fsspec.core").url_to_fs(
                self.path, use_listings_cache=False, skip_instance_cache=True
            )
        except ImportError as error:
            package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(scheme, "")
            action = f"pip install {package}" if package else "install it"
            raise CheckpointError(
                f"{self.path} needs a Python package that the environment of the workers lacks"
                f" ({error}): {action} there, in the image of the job"
            ) from error
        except Exception as error:
            raise CheckpointError(f"{self.path} cannot be used: {reason(error)}"[:500]) from error
        self._root = self._root.rstrip("/")

    @cached_property
    def is_exclusive(self) -> bool:
        """True if the store refuses a name that is taken, which is tried once."""

        def refused() -> bool:
            for _ in range(2):
                try:
                    self._pipe(f"{OWN}/probe", b"", "create")
                except FileExistsError:
                    return True
            return False

        return self._is_whole and self._patiently(f"{OWN}/probe cannot be written", refused)

    def entries(self) -> list[str]:
        """Return the checkpoints; their manifests say in which state they are."""

        def listed() -> list[str]:
            folders = [one for one in self._listed("") if (found := parse(one)) and not found[1]]
            with ThreadPoolExecutor(_LISTERS) as pool:
                return [
                    folder + (BAD if _BAD in names else "" if MANIFEST in names else UNFINISHED)
                    for folder, names in zip_equal(folders, pool.map(self._listed, folders))
                ]

        return self._patiently("cannot be listed", listed)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        return self._patiently("cannot be listed", lambda: self._listed(folder))

    def read(self, name: str) -> bytes:
        """Return an object's content."""
        return self._patiently(f"{name} cannot be read", lambda: self._content(name))

    @contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Open an object for reading at any offset."""
        with self._translated(f"{name} cannot be read"):
            stream = self._fs.open(self._at(name), "rb", block_size=_BLOCK_BYTES)
        with stream:
            yield _Translated(stream, lambda: self._translated(f"{name} cannot be read"))  # type: ignore[misc]

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, and read it back."""
        self._patiently(f"{name} cannot be written", lambda: self._put(name, data, "overwrite"))

    def create(self, name: str, data: bytes) -> None:
        """Write a small object where there is none, and read it back."""
        self._patiently(f"{name} cannot be written", lambda: self._put(name, data, "create"))

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Write an object, in requests of some MiB."""
        with self._translated(f"{name} cannot be written"):
            self._make_folder(name)
            stream = self._fs.open(self._at(name), "wb", block_size=_BLOCK_BYTES)
        through = _Translated(stream, lambda: self._translated(f"{name} cannot be written"))
        try:
            yield through  # type: ignore[misc]
        except BaseException:
            # A close would store what has been written so far.
            with suppress(Exception):
                stream.discard()
                stream.closed = True
            raise
        through.close()

    def unfinished(self, name: Name) -> str:
        """Return the folder of a checkpoint, which stays the same."""
        return str(name)

    def begin(self, folder: str) -> None:
        """Do nothing: stores have no folders."""

    def publish(self, name: Name, manifest: bytes, check: Callable[[], None]) -> None:
        """Write its last object."""
        check()
        self.create(f"{name}/{MANIFEST}", manifest)

    def remove(self, name: str) -> None:
        """Delete an object or a folder, if it is there and the store answers."""
        with suppress(CheckpointError, OSError), self._translated(f"{name} cannot be deleted"):
            self._fs.rm(self._at(name), recursive=True)

    def set_aside(self, name: Name) -> None:
        """Mark it; copies of large objects are not made."""
        self.write(f"{name}/{_BAD}", b"{}")
        self._delete(f"{name}/{MANIFEST}")

    def delete(self, entry: str) -> None:
        """Delete a checkpoint, its manifest first."""
        folder = entry.removesuffix(UNFINISHED)
        self._delete(f"{folder}/{MANIFEST}")
        self._delete(folder)

    def retried(self, act: Callable[[], T]) -> T:
        """Call a function; again after a while if it fails and trying again may help.

        In the main thread training waits for that, so it is tried less often.
        """
        delays, seconds = storage.RETRY_DELAYS, storage.RETRY_SECONDS
        if current_thread() is main_thread():
            delays, seconds = delays[: storage.READ_RETRIES], storage.READ_SECONDS
        return retry(act, delays, seconds, self._stop)

    def set_patient(self, is_patient: bool) -> None:
        """Say whether anything is tried again."""
        if is_patient:
            self._stop.clear()
        else:
            self._stop.set()

    def place(self, name: Name) -> str:
        """Return the URL of a complete checkpoint."""
        return f"{self.path}/{name}"

    def reopened(self) -> Remote:
        """Return the same storage for a later attempt."""
        return Remote(self.path)

    def _patiently(self, what: str, act: Callable[[], T]) -> T:
        def tried() -> T:
            with self._translated(what):
                return act()

        return self.retried(tried)

    def _listed(self, folder: str) -> list[str]:
        place = self._at(folder) if folder else self._root
        self._fs.invalidate_cache()
        try:
            paths = [path.rstrip("/") for path in self._fs.ls(place, detail=False)]
        except FileNotFoundError:
            return []
        return [path.rpartition("/")[2] for path in paths if path != place]

    def _content(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(self._at(name))
        return data

    def _put(self, name: str, data: bytes, mode: str) -> None:
        try:
            self._pipe(name, data, mode)
        except FileExistsError:
            # The answer to an earlier try may have been lost.
            if self._content(name) != data:
                raise
        try:
            is_there = self._content(name) == data
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise CheckpointError(
                f"{self.path} has confirmed {name}, and does not have it: look at the store", 1.0
            )

    def _pipe(self, name: str, data: bytes, mode: str) -> None:
        self._make_folder(name)
        if self._is_whole:
            self._fs.pipe_file(self._at(name), data, mode=mode)
            return
        if mode == "create" and self._fs.exists(self._at(name)):
            raise FileExistsError(name)
        draft = self._at(f"{name}.draft")
        self._fs.pipe_file(draft, data)
        self._fs.mv(draft, self._at(name))

    def _delete(self, name: str) -> None:
        def deleted() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm(self._at(name), recursive=True)

        self._patiently(f"{name} cannot be deleted", deleted)

    def _make_folder(self, name: str) -> None:
        if not self._is_whole:
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turn the errors of any library into ours."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, CheckpointError):
            raise
        except Exception as error:
            is_final = isinstance(error, PermissionError) or getattr(error, "errno", 0) in _FINAL
            text = f"{self.path}: {what}: {reason(error)}"[:500]
            raise CheckpointError(text, None if is_final else 1.0) from error


class _Translated:
    """A stream whose errors are ours."""

    def __init__(self, stream: Any, translated: Callable[[], Any]) -> None:
        self._stream, self._translated = stream, translated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, *size: int) -> bytes:
        """Read from the store."""
        with self._translated():
            data: bytes = self._stream.read(*size)
            return data

    def readinto(self, buffer: Any) -> int:
        """Read from the store."""
        with self._translated():
            count: int = self._stream.readinto(buffer)
            return count

    def write(self, data: Any) -> int:
        """Write to the store, or to the next request."""
        with self._translated():
            count: int = self._stream.write(data)
            return count

    def flush(self) -> None:
        """Do nothing: the store gets whole requests."""

    def close(self) -> None:
        """Send what is left."""
        with self._translated():
            self._stream.close()


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """Return the storage of a directory, or of a URL that fsspec knows."""
    text = os.fspath(place)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        return Remote(text)
    return Directory(rest if separator else text)
