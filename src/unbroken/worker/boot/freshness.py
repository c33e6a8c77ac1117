"""Check whether imported files are unchanged on disk.

Looking at 2,000 files takes a processor 6 ms, in the middle of a recovery. If no other machine can
write to a file system, inotify reports any change in a directory. Then only files that inotify
cannot report on (files elsewhere, links to others) are looked at, until it has reported something.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LOCAL = ("bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs",
          "tmpfs", "xfs", "zfs")  # fmt: skip
_CHANGES = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""Contents, attributes, closed after writing, moved, created, deleted, the directory itself moved
or deleted (linux/inotify.h)."""
_EVENT_BYTES = 64 * 1024
State = tuple[int, int]


class Freshness:
    """States of files, most of them below the given roots (which end with `/`)."""

    def __init__(
        self,
        files: Mapping[str, State],
        roots: Sequence[str],
        state: Callable[[str], State | None],
    ) -> None:
        self._files, self._roots, self._state = files, roots, state
        self._fd = -1
        self._watch()
        # Before there were watches, files may have changed.
        self._changed = self._first(files)

    def fds(self) -> tuple[int, ...]:
        """Return its own open descriptors."""
        return (self._fd,) if self._fd >= 0 else ()

    def close(self) -> None:
        """Stop watching."""
        for fd in self.fds():
            os.close(fd)
        self._fd = -1

    def changed_file(self) -> str | None:
        """Return a file that has changed."""
        if self._changed is None and (self._is_changed() or self._is_moved()):
            self.close()
            self._watch()
            self._changed = self._first(self._files)
        return self._changed or self._first(self._unwatched)

    def _first(self, files: Mapping[str, State]) -> str | None:
        return next((file for file, known in files.items() if self._state(file) != known), None)

    def _is_changed(self) -> bool:
        if self._fd < 0:
            return False
        try:
            return bool(os.read(self._fd, _EVENT_BYTES))
        except BlockingIOError:
            return False

    def _is_moved(self) -> bool:
        return any(_identity(root) != known for root, known in self._places.items())

    def _watch(self) -> None:
        """Watch the files that inotify can report on; `_unwatched` has the known states of the
        rest."""
        self._unwatched, self._places = dict(self._files), {}
        # A program that does not use ctypes must not get it from this library.
        libc: Any = "ctypes" in sys.modules and sys.modules["ctypes"].CDLL(None)
        if not libc or not hasattr(libc, "inotify_init1"):
            return
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            return
        systems, is_watched = _systems(), dict[str, bool]()
        for file in self._files:
            root = next((root for root in self._roots if file.startswith(root)), "")
            if root and _is_plain(file) and self._add(file, root, libc, systems, is_watched):
                del self._unwatched[file]
        self._places = {root: _identity(root) for root in self._roots}

    def _add(
        self, file: str, root: str, libc: Any, systems: dict[int, str], is_watched: dict[str, bool]
    ) -> bool:
        """Watch its directory and those above, up to the root; return whether these watches can be
        trusted."""
        directory = os.path.dirname(file)
        while len(directory) + 1 >= len(root):
            if directory not in is_watched:
                device = (_identity(directory) or (-1, -1))[0]
                is_watched[directory] = systems.get(device) in _LOCAL and (
                    libc.inotify_add_watch(self._fd, os.fsencode(directory), _CHANGES) >= 0
                )
            if not is_watched[directory]:
                return False
            directory = os.path.dirname(directory)
        return True


def _is_plain(file: str) -> bool:
    """True if the file has only one name: a change under another name is reported there."""
    try:
        status = os.lstat(file)
    except OSError:
        return False
    return status.st_nlink == 1 and (status.st_mode & 0o170000) == 0o100000


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _systems() -> dict[int, str]:
    """Return the type of file system, by device (proc_pid_mountinfo(5))."""
    result = {}
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            major, _, minor = before.split()[2].partition(":")
            result[os.makedev(int(major), int(minor))] = after.split()[0]
    return result
