"""Memory of snapshots: slots of every rank, kept from attempt to attempt.

Each slot is an anonymous file of its own, never handed to a later attempt: who wakes up late
writes into memory that nobody else writes.  When a newer attempt is heard of, what older ones have
completed is noted, and only that is ever offered.  A slot of an older attempt goes when the same
rank has saved twice in a newer one (then all ranks have saved once, as they train in step), or
when a rank says which one it restored.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.wire.ipc import (
    SNAPSHOT_FETCH,
    SNAPSHOT_FIND,
    SNAPSHOT_FOUND,
    SNAPSHOT_KEPT,
    SNAPSHOT_OPEN,
    SNAPSHOT_SAVED,
    SNAPSHOT_SLOT,
    SNAPSHOT_USED,
)
from unbroken.wire.snapshot import HEADERS_BYTES, NAME_BYTES_MAX, Header, read

logger = logging.getLogger(__name__)

ANSWERS = {
    SNAPSHOT_OPEN: SNAPSHOT_SLOT,
    SNAPSHOT_SAVED: SNAPSHOT_KEPT,
    SNAPSHOT_USED: SNAPSHOT_KEPT,
    SNAPSHOT_FIND: SNAPSHOT_FOUND,
    SNAPSHOT_FETCH: SNAPSHOT_FOUND,
}
"""Types that are heard here, each with its answer's."""
NAMES_MAX = 16
"""Of snapshots, in one agent."""
SPARE_BYTES = 256 * 1024 * 1024
"""Left for everybody else."""
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = 0x1 | 0x2 | 0x4  # linux/fcntl.h: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


@dataclass(eq=False)
class Slot:
    """One anonymous file."""

    attempt: int
    index: int
    size: int
    fd: int
    is_over: bool = False
    """Its attempt is."""
    frozen: int | None = None
    """Step that it held when its attempt was over; None: nothing whole."""

    def header(self) -> Header | None:
        """What it holds now."""
        return read(os.pread(self.fd, HEADERS_BYTES, 0), self.size)

    def step(self) -> int | None:
        """The step that may be restored from it; None: nothing."""
        header = self.header()
        if header is None or header.attempt != self.attempt:
            return None
        is_late = self.is_over and header.step != self.frozen
        return None if is_late else header.step

    def freeze(self) -> None:
        """Its attempt is over: what is written from now on is nobody's."""
        if not self.is_over:
            header = self.header()
            self.is_over, self.frozen = True, header.step if header else None

    def pending_bytes(self) -> int:
        """Promised, but not taken from the machine yet."""
        return max(0, self.size - os.fstat(self.fd).st_blocks * 512)


@dataclass
class Answer:
    """To one message; the descriptors stay the agent's."""

    message: dict[str, Any]
    fds: list[int] = field(default_factory=list)


Key = tuple[str, int]
"""Name of the snapshot, and rank."""


class Snapshots:
    """All slots of one agent; `close` when it ends."""

    def __init__(self, available: Callable[[], int] | None = None) -> None:
        self._available = available or available_bytes
        self._slots: dict[Key, list[Slot]] = {}
        self._saves: dict[Key, int] = {}
        """How often each has saved in the newest attempt."""
        self._newest = -1

    def begin(self, attempt: int) -> None:
        """An attempt starts; all older ones are over."""
        if attempt <= self._newest:
            return
        self._newest = attempt
        self._saves.clear()
        for slot in (one for slots in self._slots.values() for one in slots):
            slot.freeze()

    def answer(self, message: Mapping[str, Any]) -> Answer:
        """Do what a worker asks for, of `ANSWERS`; what is refused has `error`."""
        kind = str(message.get("type"))
        try:
            found = self._do(kind, message)
        except UnbrokenError as error:
            return self.refusal(message, str(error))
        return Answer({"type": ANSWERS[kind], **found.message}, found.fds)

    def refusal(self, message: Mapping[str, Any], reason: str) -> Answer:
        """What a worker is told whose message is not followed."""
        kind = str(message.get("type"))
        logger.warning("message=%s refused reason=%r", kind, reason)
        return Answer({"type": ANSWERS[kind], "error": reason})

    def close(self) -> None:
        """Give all memory back."""
        for key in list(self._slots):
            self._free(key, lambda slot: True)

    def _do(self, kind: str, message: Mapping[str, Any]) -> Answer:
        name, rank, attempt = (
            message.get("name"),
            _whole(message, "rank"),
            _whole(message, "attempt"),
        )
        if not isinstance(name, str) or not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise PeerError(f"a snapshot's name has 1 to {NAME_BYTES_MAX} bytes")
        if attempt < self._newest:
            raise WorldError(f"attempt {attempt} is over: attempt {self._newest} runs")
        self.begin(attempt)
        key = (name, rank)
        if kind == SNAPSHOT_OPEN:
            return self._open(key, attempt, _whole(message, "slot"), _whole(message, "bytes"))
        if kind == SNAPSHOT_SAVED:
            return self._saved(key, attempt, _whole(message, "slot"), _whole(message, "step"))
        if kind == SNAPSHOT_USED:
            return self._used(key, _whole(message, "from_attempt"), _whole(message, "step"))
        return self._find(key)

    def _open(self, key: Key, attempt: int, index: int, size: int) -> Answer:
        if index > 1:
            raise PeerError("there are slots 0 and 1")
        if key not in self._slots and len({name for name, _ in self._slots} | {key[0]}) > NAMES_MAX:
            raise WorldError(f"an agent keeps snapshots of {NAMES_MAX} names")
        # The worker asks for a slot again when the old one has become too small.
        self._free(key, lambda slot: (slot.attempt, slot.index) == (attempt, index))
        promised = sum(one.pending_bytes() for slots in self._slots.values() for one in slots)
        room = self._available() - promised - SPARE_BYTES
        if size > room:
            raise WorldError(
                f"no memory for a snapshot of {size} bytes: {max(0, room)} are left; raise the "
                "pod's memory limit (a rank's snapshots take three times its state)"
            )
        slot = Slot(attempt, index, size, _memory(f"unbroken-{key[1]}-{index}", size))
        self._slots.setdefault(key, []).append(slot)
        return Answer({}, [slot.fd])

    def _saved(self, key: Key, attempt: int, index: int, step: int) -> Answer:
        slots = self._slots.get(key, [])
        if not any((one.attempt, one.index) == (attempt, index) for one in slots):
            raise PeerError(f"slot {index} of attempt {attempt} was never opened")
        saves = self._saves[key] = self._saves.get(key, 0) + 1
        if saves == 2:
            saving = {other for other in self._slots if other in self._saves}
            for other in list(self._slots):
                # Ranks that live elsewhere by now.
                if other == key or (other[0] == key[0] and other not in saving):
                    self._free(other, lambda slot: slot.attempt < attempt)
        logger.debug("snapshot=%s rank=%d attempt=%d step=%d", *key, attempt, step)
        return Answer({})

    def _used(self, key: Key, attempt: int, step: int) -> Answer:
        self._free(
            key,
            lambda slot: (
                slot.attempt < self._newest and (slot.attempt, slot.frozen) != (attempt, step)
            ),
        )
        return Answer({})

    def _find(self, key: Key) -> Answer:
        found = []
        for slot in self._slots.get(key, []):
            step = slot.step()
            if step is not None:
                found.append((slot, step))
        steps = [{"attempt": slot.attempt, "step": step} for slot, step in found]
        return Answer({"steps": steps}, [slot.fd for slot, _ in found])

    def _free(self, key: Key, is_useless: Callable[[Slot], bool]) -> None:
        kept = []
        for slot in self._slots.pop(key, []):
            if is_useless(slot):
                os.close(slot.fd)
            else:
                kept.append(slot)
        if kept:
            self._slots[key] = kept


def _whole(message: Mapping[str, Any], key: str) -> int:
    found = message.get(key)
    if not isinstance(found, int) or not 0 <= found < 2**62:
        raise PeerError(f"{key} is no whole number: {str(found)[:100]}")
    return found


def _memory(name: str, size: int) -> int:
    """A file of that size for good: nobody can make its reader run into a hole."""
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
    """What the machine and this process's memory group would still give."""
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
