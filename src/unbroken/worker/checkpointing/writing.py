"""One rank's part of a checkpoint, and its completion by the last rank."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from .files import Directory, File, Manifest, sync_directory, verified, write_file
from .names import Name
from .peers import Peers
from .state import own_name

_PARTS, _COMPLETING = "parts", "completing"


class Writing(Protocol):
    """Writes the tensors."""

    def write(self, place: Path, member: int) -> list[File]:
        """Write this rank's tensors."""

    def finish(self, place: Path) -> list[File]:
        """Write the file that reads all of them together."""


@dataclass
class Part:
    """The part that this rank is writing, or has written last."""

    name: Name = field(default_factory=lambda: Name(0, 0))
    group: Peers = field(default_factory=lambda: Peers(0, 1, (0,)))
    own: bytes = b""
    safe: Name = field(default_factory=lambda: Name(0, 0))
    seconds: float = 0.0
    """Seconds that the last written part took."""
    has_failed: bool = False

    @property
    def step(self) -> int:
        """Return the step of the checkpoint."""
        return self.name.step

    def write(self, directory: Directory, tensors: Writing) -> bool:
        """Write the part; return whether it was the last one, and the checkpoint is complete."""
        directory.check()
        place, member = directory.unfinished(self.name), self.group.members.index(self.group.rank)
        (place / _PARTS).mkdir(parents=True, exist_ok=True)
        files = tensors.write(place, member)
        with verified(place / self._own, files) as stream:
            stream.write(self.own)
        sync_directory(place)
        draft = place / _PARTS / f"{member}.draft"
        write_file(draft, json.dumps([asdict(file) for file in files]).encode())
        draft.rename(draft.with_suffix(".json"))
        # Each rank looks after its own part exists, so the last one to look sees all.
        parts = [place / _PARTS / f"{at}.json" for at in range(len(self.group.members))]
        if not all(part.exists() for part in parts):
            return False
        try:
            (place / _PARTS / _COMPLETING).mkdir()
        except (FileExistsError, FileNotFoundError):
            return False  # another rank saw all as well, and completes it or has done so
        self._complete(directory, tensors, parts)
        return True

    def withdraw(self, directory: Directory) -> None:
        """Delete a checkpoint that cannot be completed any more."""
        place = directory.unfinished(self.name)
        if len(self.group.members) == 1:
            directory.discard(self.name)
            return
        member = self.group.members.index(self.group.rank)
        for path in (place / self._own, *place.glob(f"__{member}_*")):
            with suppress(OSError):
                path.unlink()

    @property
    def _own(self) -> str:
        return own_name(self.group.rank)

    def _complete(self, directory: Directory, tensors: Writing, parts: list[Path]) -> None:
        files = [File(**file) for part in parts for file in json.loads(part.read_bytes())]
        files += tensors.finish(directory.unfinished(self.name))
        manifest = Manifest(
            self.name.step,
            self.name.attempt,
            self.group.world_size,
            self.group.members,
            tuple(files),
        )
        directory.publish(self.name, manifest)
        shutil.rmtree(directory.path / str(self.name) / _PARTS, ignore_errors=True)
