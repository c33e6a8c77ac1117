"""Shards of the checkpoint memory as files of a folder in memory, which outlive the process.

A folder for each namespace holds a file for each shard. The file's name holds all that is known of
the shard (`core/checkpoint_memory`), so the next process finds everything. A file gets its name
once it is whole: at the start, incomplete files of a killed process are removed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from unbroken.core.checkpoint_memory import (
    CheckpointMemory,
    CheckpointRefusal,
    NamespaceSettings,
    Shard,
    ShardKey,
    is_namespace,
    settings_of_file,
    shard_of_file,
)
from unbroken.errors import WorldError
from unbroken.kube.clock import wall
from unbroken.log_lines import Log

INCOMING = "incoming"
"""Folder of shards that are not whole, beside that of the namespaces."""
NAMESPACES = "namespaces"

log = Log(__name__)


class CheckpointFiles:
    """The shards of one member; `open` comes first."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.memory = CheckpointMemory(capacity)
        self._incoming = folder / INCOMING
        self._namespaces = folder / NAMESPACES
        self._count = 0

    def open(self) -> None:
        """Make the folder, and load the shards of an earlier process. Raises WorldError."""
        try:
            shutil.rmtree(self._incoming, ignore_errors=True)
            for folder in (self._incoming, self._namespaces):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in self._namespaces.iterdir():
                if is_namespace(folder.name) and folder.is_dir() and not folder.is_symlink():
                    self._take_up(folder)
            self.resize(self.memory.capacity)
        except OSError as error:
            raise WorldError(f"cannot keep checkpoints in {self._namespaces}: {error}") from error

    def resize(self, capacity: int) -> None:
        """Set the bytes of all shards, and delete those that no longer fit. Raises OSError."""
        dropped = self.memory.resize(capacity)
        self._unlink(dropped)
        if dropped:
            log.info("checkpoints dropped for a smaller memory", count=len(dropped))

    def _take_up(self, folder: Path) -> None:
        used_at = folder.stat().st_mtime
        for path in folder.iterdir():
            settings = settings_of_file(path.name)
            if settings is not None:
                self.memory.configure(folder.name, settings, used_at)
                continue
            shard = shard_of_file(folder.name, path.name, path.lstat().st_size)
            older = None if shard is None else self.memory.restore(shard, used_at)
            if older is not None:
                self._unlink([older])

    def path(self, shard: Shard) -> Path:
        """Path of a shard's file."""
        return self._namespaces / shard.key.namespace / shard.file_name

    def find(self, key: ShardKey) -> Shard | None:
        """Return a shard; None: it is not here. One whose file is gone is forgotten."""
        found = self.memory.find(key)
        if found is None or self.path(found).exists():
            return found
        log.warning("checkpoint has no file", path=self.path(found))
        self.memory.remove(key)
        return None

    def configure(
        self, namespace: str, settings: NamespaceSettings, *, makes_room: bool = True
    ) -> CheckpointRefusal | None:
        """Create a namespace, or take over newer settings. Raises OSError.

        `makes_room`: an idle namespace is deleted if there are too many.
        """
        if makes_room:
            self._make_room(namespace)
        refusal = self.memory.configure(namespace, settings, wall())
        if refusal is None and self.memory.settings(namespace) == settings:
            folder = self._namespaces / namespace
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / settings.file_name).touch(mode=0o600)
        return refusal

    def _make_room(self, namespace: str) -> None:
        idle = self.memory.yielding(namespace, wall())
        if idle is not None:
            log.info("idle namespace of checkpoints deleted", namespace=idle)
            self.forget(idle)

    def receive(self, shard: Shard) -> IncomingShard | CheckpointRefusal:
        """Reserve memory for a shard; enter the answer, and write to it. Raises OSError."""
        self._make_room(shard.key.namespace)
        admitted = self.memory.admit(shard, wall())
        if isinstance(admitted, CheckpointRefusal):
            return admitted
        self._unlink(admitted)
        if admitted:
            log.info("checkpoints dropped for newer ones", count=len(admitted))
        self._count += 1
        return IncomingShard(self, shard, self._incoming / str(self._count))

    def keep(self, incoming: IncomingShard, steps_retained: int) -> None:
        """Keep a shard that is whole. Raises OSError."""
        shard = incoming.shard
        path = self.path(shard)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        os.rename(incoming.path, path)
        incoming.is_kept = True
        self._unlink(self.memory.accept(shard, steps_retained))

    def remove(self, key: ShardKey, before: int | None = None) -> bool:
        """Delete a shard, if its stamp is below `before`; False: it is not here."""
        found = self.memory.remove(key, before)
        if found is not None:
            self._unlink([found])
        return found is not None

    def forget(self, namespace: str) -> bool:
        """Delete a namespace with all of its shards; False: there is none."""
        is_known = self.memory.forget(namespace)
        shutil.rmtree(self._namespaces / namespace, ignore_errors=True)
        return is_known

    def _unlink(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            kept = self.memory.find(shard.key)
            if kept is None or kept.file_name != shard.file_name:
                self.path(shard).unlink(missing_ok=True)


class IncomingShard:
    """A shard that is being received; removed at the end of the block unless it is kept."""

    def __init__(self, files: CheckpointFiles, shard: Shard, path: Path) -> None:
        self.shard = shard
        self.path = path
        self.is_kept = False
        self._files = files
        self._written = 0
        self._fd = -1

    def __enter__(self) -> IncomingShard:
        try:
            self._fd = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
        except OSError:
            self._files.memory.release(self.shard)
            raise
        return self

    def write(self, data: bytes) -> None:
        """Append bytes.  Raises OSError: the folder's file system is full."""
        view = memoryview(data)
        if self._written + len(view) > self.shard.size:
            raise OSError(errno.EMSGSIZE, "more bytes than announced")
        while view:
            count = os.write(self._fd, view)
            self._written += count
            view = view[count:]

    @property
    def is_whole(self) -> bool:
        """True once all announced bytes have come."""
        return self._written == self.shard.size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        if not self.is_kept:
            self._files.memory.release(self.shard)
            self.path.unlink(missing_ok=True)
