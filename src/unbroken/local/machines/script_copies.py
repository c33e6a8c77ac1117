"""Copies of lifecycle scripts, taken only from the folder that was mapped to their address.

Callers of the cluster API choose addresses and file names. So both are resolved when they are used,
and nothing outside the mapped folder is run or copied.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from unbroken.errors import SpecError, WorldError
from unbroken.local.machines.decisions.scripts import LocalSource
from unbroken.spec.nodes.kinds import script_names

FILES_MAX = 10_000
BYTES_MAX = 1 << 30
DEPTH_MAX = 32
"""Lifecycle scripts of HyperPod's samples: about 100 files of 1 MB together, 5 folders deep."""


def source_folder(source: LocalSource, file: str) -> Path:
    """The folder of a script, which is there; SpecError for one outside the mapped folder."""
    root = _real(source.root)
    folder = _real(root.joinpath(*source.names))
    script = _real(folder.joinpath(*script_names(file)))
    for path in (folder, script):
        if not path.is_relative_to(root):
            raise SpecError(f"{path} is outside the mapped folder {root}")
    if not script.is_relative_to(folder):
        raise SpecError(f"{script} is outside its source {folder}")
    if not script.is_file():
        raise SpecError(f"there is no such file in {folder}")
    return folder


def copy_source(folder: Path, target: Path) -> list[str]:
    """Copy a folder; names in it that were left out, because they lead out or are no files.

    A link stays a link if it leads to a place in the copy.  WorldError for a folder that is too
    large.  Blocks.
    """
    copy = _Copy(folder)
    copy.add(folder, target, DEPTH_MAX)
    return copy.left_out


def script_in(copy: Path, file: str) -> Path:
    """The script in a copy; SpecError where it is not a file in there."""
    script = copy.joinpath(*script_names(file))
    if not _real(script).is_relative_to(_real(copy)) or not script.is_file():
        raise SpecError("the file is a link that leads out of its source")
    return script


class _Copy:
    """One copy while it is made."""

    def __init__(self, folder: Path) -> None:
        self.left_out: list[str] = []
        self._folder = folder
        self._files = 0
        self._bytes = 0

    def add(self, folder: Path, target: Path, depth: int) -> None:
        """Copy a folder and what is below it, at most `depth` folders deep."""
        if depth == 0:
            raise self._too_large(f"more than {DEPTH_MAX} folders deep")
        target.mkdir(mode=0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                self._files += 1
                if self._files > FILES_MAX:
                    raise self._too_large(f"more than {FILES_MAX} files")
                self._add_entry(entry, target / entry.name, depth)

    def _add_entry(self, entry: os.DirEntry[str], target: Path, depth: int) -> None:
        if entry.is_symlink():
            link = Path(entry.path)
            if self._stays_inside(link):
                target.symlink_to(link.readlink())
            else:
                self.left_out.append(str(link.relative_to(self._folder)))
        elif entry.is_dir(follow_symlinks=False):
            self.add(Path(entry.path), target, depth - 1)
        elif entry.is_file(follow_symlinks=False):
            self._bytes += entry.stat(follow_symlinks=False).st_size
            if self._bytes > BYTES_MAX:
                raise self._too_large(f"more than {BYTES_MAX >> 20} MiB")
            shutil.copy2(entry.path, target, follow_symlinks=False)
        else:
            self.left_out.append(str(Path(entry.path).relative_to(self._folder)))

    def _stays_inside(self, link: Path) -> bool:
        return not link.readlink().is_absolute() and _real(link).is_relative_to(_real(self._folder))

    def _too_large(self, reason: str) -> WorldError:
        return WorldError(f"the scripts in {self._folder} are too large to copy: {reason}")


def _real(path: Path | str) -> Path:
    """The path without links.  Unlike Path.resolve it raises nothing for links in a circle."""
    return Path(os.path.realpath(path))
