"""Memory that outlives a worker: anonymous files of the agent, within the machine's and its group's
limits.

Nothing is promised twice: memory that was given and is not filled yet counts as taken.

The kernel frees a file's pages while its last descriptor is closed, at 6 GB/s on one machine. A
thread waits for that: an agent that is silent for seconds is taken for lost.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unbroken.agent.side_thread import SideThread
from unbroken.errors import WorldError

SPARE_BYTES = 256 * 1024 * 1024
"""Bytes left for all other uses."""
SMALL_BYTES = 4 * 1024 * 1024
"""Files up to this size are closed at once."""
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = 0x1 | 0x2 | 0x4  # linux/fcntl.h: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


@dataclass(eq=False)
class File:
    """An anonymous file, of fixed size: nobody can make its reader run into a hole."""

    fd: int
    size: int

    def pending_bytes(self) -> int:
        """Return the bytes promised, but not taken from the machine yet."""
        return max(0, self.size - os.fstat(self.fd).st_blocks * 512)


class Memory:
    """All files of one agent."""

    def __init__(self, available: Callable[[], int] | None = None) -> None:
        self._available = available or available_bytes
        self._files: set[File] = set()
        self._closing = Closing()

    def room(self) -> int:
        """Return the bytes that may still be promised."""
        promised = sum(file.pending_bytes() for file in self._files)
        return max(0, self._available() + self._closing.bytes - promised - SPARE_BYTES)

    def take(self, name: str, size: int) -> File:
        """Return a new file. Raises WorldError if there is no room."""
        room = self.room()
        if size > room:
            raise WorldError(
                f"no memory for a snapshot of {size} bytes: {room} are left; raise the "
                "pod's memory limit (a rank's snapshots take three times its state)"
            )
        file = File(_create(name, size), size)
        self._files.add(file)
        return file

    def share(self, file: File) -> File:
        """Return the same memory again, to be released separately."""
        result = File(os.dup(file.fd), file.size)
        self._files.add(result)
        return result

    def give_back(self, file: File) -> None:
        """Release a file: it is no longer needed."""
        if file in self._files:
            self._files.discard(file)
            if file.size > SMALL_BYTES:
                self._closing.close(file)
            else:
                os.close(file.fd)


class Closing:
    """Closes large files, one after the other."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes that will be free soon."""
        self._lock = threading.Lock()
        self._thread = SideThread("closing")

    def close(self, file: File) -> None:
        """Have a file closed."""
        size = file.size - file.pending_bytes()
        self._count(size)

        def close() -> None:
            os.close(file.fd)
            self._count(-size)

        self._thread.call(close)

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes += size


def _create(name: str, size: int) -> int:
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise WorldError(f"no memory for a snapshot: {error.strerror}") from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise WorldError(f"no memory for a snapshot of {size} bytes: {error.strerror}") from error
    return fd


def available_bytes(
    root: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Return the bytes that the machine and this process's memory group can still provide."""
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    bounds = [int(rows["MemAvailable"].split()[0]) * 1024]
    for folder, limit, used, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        bounds += _group_bytes(folder, limit, used, cache)
    return min(bounds)


def _group_bytes(folder: Path, limit: str, used: str, cache: str) -> list[int]:
    try:
        most = (folder / limit).read_text().strip()
        taken = int((folder / used).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = sum(int(row[1]) for row in rows if row[0] == cache)
    except (OSError, ValueError, IndexError):
        return []
    return [int(most) - taken + reclaimable] if most.isdigit() else []
