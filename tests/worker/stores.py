"""A store of fsspec in a directory, whose faults tests choose: for processes that share it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

CHANGES = ("put", "done", "delete")
"""Operations that change the store: an object begins, is complete, is deleted."""


class FaultyStore(LocalFileSystem):
    """A store that calls `before` for each operation with its name and path.

    `before` may raise or end the process. If it returns "lie", the operation is confirmed and not
    carried out.
    """

    protocol: ClassVar[Any] = ("oci", "hdfs")
    before: ClassVar[Callable[[str, str], str | None]] = lambda _what, _path: None
    is_exclusive = True

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        return super()._strip_protocol(text.partition("://")[2] if "://" in text else text)

    def ls(self, path: Any, detail: bool = False, **kwargs: Any) -> Any:
        """List a folder."""
        FaultyStore.before("list", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read an object."""
        FaultyStore.before("get", path)
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write an object."""
        super().pipe_file(path, value, mode if self.is_exclusive else "overwrite", **kwargs)

    def _open(self, path: Any, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        if FaultyStore.before("get" if mode == "rb" else "put", path) == "lie":
            path = os.devnull
        if mode != "rb":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        return _Opened(path, mode, fs=self)

    def rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Delete an object or a folder."""
        FaultyStore.before("delete", path)
        super().rm(path, *args, **kwargs)


class _Opened(LocalFileOpener):
    def close(self) -> None:
        if not self.closed and self.mode != "rb":
            FaultyStore.before("done", self.path)
        super().close()


def register() -> None:
    """Let `oci://` be such a store, as a store of whole objects, and `hdfs://` as one of files."""
    for protocol in FaultyStore.protocol:
        fsspec.register_implementation(protocol, FaultyStore, clobber=True)


def kill_at(point: int, *operations: str) -> None:
    """Kill this process just before the n-th of some operations."""
    left = [point]

    def before(what: str, _path: str) -> None:
        if what in operations:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    FaultyStore.before = before


def away(_what: str, _path: str) -> None:
    """Answer nothing, like a store that is away."""
    raise ConnectionError("no route to the store")


def full(what: str, _path: str) -> None:
    """Refuse each new object."""
    if what == "put":
        raise OSError(errno.EDQUOT, "quota exceeded")


def lying(what: str, path: str) -> str | None:
    """Confirm each object of a checkpoint, and store none."""
    return "lie" if what == "put" and "step-" in path else None
