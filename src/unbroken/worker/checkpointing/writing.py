"""One rank's part of a checkpoint, and its completion by the last rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol

from .names import Name
from .peers import Peers
from .series import Manifest, Series
from .state import PARTS, own_name
from .storage import MANIFEST, CheckpointError, File, Storage, verified


class Writing(Protocol):
    """Writes the tensors."""

    def write(self, storage: Storage, folder: str, member: int) -> list[File]:
        """Write this rank's tensors."""

    def finish(self, storage: Storage, folder: str) -> list[File]:
        """Write the file that reads all of them together."""


@dataclass
class Part:
    """The part that this rank is writing, or has written last."""

    name: Name = field(default_factory=lambda: Name(-1, -1))
    group: Peers = field(default_factory=lambda: Peers(0, 1, (0,)))
    own: bytes = b""
    safe: Name = field(default_factory=lambda: Name(0, 0))
    metric: float | None = None
    seconds: float = 0.0
    """Seconds that the last written part took."""
    has_failed: bool = False
    may_count: bool = False
    """True once it may have become complete."""

    @property
    def step(self) -> int:
        """Return the step of the checkpoint."""
        return self.name.step

    def write(self, series: Series, tensors: Writing) -> bool:
        """Write the part; return whether it was the last one, and the checkpoint is complete."""
        self.may_count = False
        storage = series.storage
        series.check()
        folder, member = storage.unfinished(self.name), self.group.members.index(self.group.rank)
        storage.begin(folder)
        if MANIFEST in storage.names(folder):
            raise CheckpointError(f"{storage.path}/{folder} is there already")
        files = tensors.write(storage, folder, member)
        files += storage.retried(lambda: self._written(storage, folder))
        part = json.dumps([asdict(file) for file in files]).encode()
        storage.write(_part(folder, member), part)
        # Each rank looks after its own part exists, so the last one to look sees all.
        parts = [f"{at}.json" for at in range(len(self.group.members))]
        if not set(parts) <= set(storage.names(f"{folder}/{PARTS}")):
            return False
        try:
            storage.create(f"{folder}/{PARTS}/completing", f"{member}".encode())
        except (FileExistsError, FileNotFoundError):
            return False  # another rank saw all as well, and completes it or has done so
        self._complete(series, tensors, folder)
        return True

    def withdraw(self, storage: Storage) -> None:
        """Delete a checkpoint that cannot be completed any more."""
        if storage.is_remote and self.may_count:
            return  # its last object may be there, though the store gave no answer
        folder = storage.unfinished(self.name)
        if len(self.group.members) == 1:
            storage.remove(folder)
            return
        member = self.group.members.index(self.group.rank)
        for name in storage.names(folder):
            if name == own_name(self.group.rank) or name.startswith(f"__{member}_"):
                storage.remove(f"{folder}/{name}")

    def _written(self, storage: Storage, folder: str) -> list[File]:
        files: list[File] = []
        with verified(storage, f"{folder}/{own_name(self.group.rank)}", files) as stream:
            stream.write(self.own)
        return files

    def _complete(self, series: Series, tensors: Writing, folder: str) -> None:
        storage, files = series.storage, []  # type: Storage, list[File]
        for member in range(len(self.group.members)):
            part = storage.read(_part(folder, member))
            files += [File(**file) for file in json.loads(part)]
        files += tensors.finish(storage, folder)
        manifest = Manifest(
            self.name.step,
            self.name.attempt,
            self.group.world_size,
            self.group.members,
            tuple(files),
            self.metric,
        )
        self.may_count = True
        series.publish(self.name, manifest)
        if storage.is_exclusive:  # otherwise another rank may be completing it, too
            storage.remove(f"{self.name}/{PARTS}")


def _part(folder: str, member: int) -> str:
    return f"{folder}/{PARTS}/{member}.json"
