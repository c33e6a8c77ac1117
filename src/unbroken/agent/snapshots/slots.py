"""Memory of snapshots: slots of every rank, kept from attempt to attempt, in anonymous files within
limits.

Each slot is an anonymous file of its own, never given to a later attempt: a worker that wakes up
late writes into memory of its own. When a newer attempt is known, the completed snapshots of older
ones are noted, and only those are ever offered. A slot of an older attempt goes when the same rank
has saved twice in a newer one. Then all ranks have saved once, as they train in step. It also goes
when a rank reports which slot it restored.

The memory is within the machine's and its group's limits. It is planned when a rank saves first in
an attempt (`core/snapshots/memory.py`). Nothing is promised twice: memory that was given and is not
filled yet counts as taken.

The kernel frees a file's pages while its last descriptor is closed, at 6 GB/s on one machine. A
thread waits for that: an agent that is silent for seconds is taken for lost.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.agent.side_thread import SideThread
from unbroken.core.snapshots.memory import SLOT_STATES, Key, memory_plan
from unbroken.core.wording import size_text
from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.agent import RECEIPT_CHARACTERS
from unbroken.wire.codec import NUMBER_MAX
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
from unbroken.wire.snapshot import HEADERS_BYTES, NAME_BYTES_MAX, VERSION, Header, read, version

SPARE_BYTES = 256 * 1024 * 1024
"""Bytes left for all other uses."""
SMALL_BYTES = 4 * 1024 * 1024
"""Files up to this size are closed at once."""
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = 0x1 | 0x2 | 0x4  # linux/fcntl.h: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


@dataclass(eq=False)
class MemoryFile:
    """An anonymous file, of fixed size: nobody can make its reader run into a hole."""

    fd: int
    size: int

    def pending_bytes(self) -> int:
        """Return the bytes promised, but not taken from the machine yet."""
        return max(0, self.size - os.fstat(self.fd).st_blocks * 512)


class SnapshotMemory:
    """All files of one agent."""

    def __init__(self, available: Callable[[], int] | None = None) -> None:
        self._available = available or available_bytes
        self._files: set[MemoryFile] = set()
        self._closing = Closing()
        self.reserved: Callable[[], int] = lambda: 0
        """Returns the bytes of which copies take none: those of slots that are planned."""
        self.copies_missing = 0
        """Bytes that are missing for copies, so that there are none; 0: there is room."""

    def room(self) -> int:
        """Return the bytes that may still be promised."""
        promised = sum(file.pending_bytes() for file in self._files)
        return max(0, self._available() + self._closing.bytes - promised - SPARE_BYTES)

    def take_copy(self, name: str, size: int) -> MemoryFile:
        """Return a new file for a copy. Raises WorldError if there is no room beside slots."""
        if self.copies_missing:
            raise WorldError(
                f"no memory for copies of snapshots: {size_text(self.copies_missing)} are missing; "
                "raise the pod's memory limit by that"
            )
        if size > self.room() - self.reserved():
            raise WorldError(f"no memory for a copy of {size} bytes beside the snapshots")
        return self.take(name, size)

    def take(self, name: str, size: int) -> MemoryFile:
        """Return a new file. Raises WorldError if there is no room."""
        room = self.room()
        if size > room:
            raise WorldError(
                f"no memory for a snapshot of {size} bytes: {room} are left; raise the "
                "pod's memory limit (a rank's snapshots take three times its state)"
            )
        file = MemoryFile(_create(name, size), size)
        self._files.add(file)
        return file

    def taken_bytes(self) -> int:
        """Return the bytes of all files; memory that two of them share counts once."""
        sizes = {os.fstat(file.fd).st_ino: file.size for file in self._files}
        return sum(sizes.values())

    def share(self, file: MemoryFile) -> MemoryFile:
        """Return the same memory again, to be released separately."""
        result = MemoryFile(os.dup(file.fd), file.size)
        self._files.add(result)
        return result

    def give_back(self, file: MemoryFile) -> None:
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

    def close(self, file: MemoryFile) -> None:
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


log = Log(__name__)

ANSWERS = {
    SNAPSHOT_OPEN: SNAPSHOT_SLOT,
    SNAPSHOT_SAVED: SNAPSHOT_KEPT,
    SNAPSHOT_USED: SNAPSHOT_KEPT,
    SNAPSHOT_FIND: SNAPSHOT_FOUND,
    SNAPSHOT_FETCH: SNAPSHOT_FOUND,
}
"""Types of messages that are accepted, each with the type of its answer."""
MEDIAN_OF = 15
"""Last saves, and last transfers, of which a median is reported."""
NAMES_MAX = 16
"""Most names of snapshots in one agent."""


@dataclass(eq=False)
class SlotFile:
    """One anonymous file."""

    attempt: int
    index: int
    """Number of the slot; -1: brought from elsewhere."""
    file: MemoryFile
    is_over: bool = False
    """True if its attempt is over."""
    frozen: int | None = None
    """Step that it held when its attempt ended; None: no whole snapshot."""
    node: int | str | None = None
    """Node rank of the agent that had it, or its address; None: it was made here."""

    def header(self) -> Header | None:
        """Return the header of the snapshot that it holds now."""
        return read(os.pread(self.file.fd, HEADERS_BYTES, 0), self.file.size)

    def step(self) -> int | None:
        """Return the step that may be restored from it; None: none."""
        header = self.header()
        if header is None or header.attempt != self.attempt:
            return None
        is_late = self.is_over and header.step != self.frozen
        return None if is_late else header.step

    def freeze(self) -> None:
        """End its attempt: later writes do not count."""
        if not self.is_over:
            header = self.header()
            self.is_over, self.frozen = True, header.step if header else None


@dataclass
class SlotAnswer:
    """Answer to one message; its descriptors stay the agent's."""

    message: dict[str, Any]
    fds: list[int] = field(default_factory=list)


Point = tuple[int, int]
"""Attempt and step."""


@dataclass
class SavedState:
    """Facts about a rank's saves in the running attempt."""

    step: int
    state_bytes: int
    replicas: str
    """Ranks that hold the same state, as ranges."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF))
    """Seconds for which the last saves held up training."""


class SnapshotSlots:
    """All slots of one agent; call `close` when it ends."""

    def __init__(self, available: Callable[[], int] | None = None, nproc: int = 1) -> None:
        """`nproc`: ranks of the agent."""
        self.memory, self._nproc = SnapshotMemory(available), nproc
        self.memory.reserved = self._reserved
        self.has_buddy = False
        """True if another agent keeps copies, and this one keeps another's."""
        self.missing = 0
        """Bytes that are missing for slots, so that nothing is saved; 0: there is room."""
        self._sizes: dict[Key, int] = {}
        """Size of one slot of each rank, in the newest attempt that has saved."""
        self._planned = -1
        """That attempt."""
        self.on_saved: Callable[[Key, SlotFile, int], None] | None = None
        """Called for each whole snapshot of the running attempt."""
        self._slots: dict[Key, list[SlotFile]] = {}
        self._saves: dict[Key, int] = {}
        """Number of saves of each rank in the newest attempt."""
        self.states: dict[Key, SavedState] = {}
        """Saves of each rank in the newest attempt, for people."""
        self._newest = -1

    def begin(self, attempt: int) -> None:
        """Begin an attempt; all older ones are over."""
        if attempt <= self._newest:
            return
        self._newest = attempt
        self._saves.clear()
        self.states.clear()
        self.missing = 0
        for slot in (one for slots in self._slots.values() for one in slots):
            slot.freeze()

    def answer(self, message: Mapping[str, Any]) -> SlotAnswer:
        """Return the answer to a worker's request, one of `ANSWERS`; a refusal has `error`."""
        kind = str(message.get("type"))
        try:
            answer = self._do(kind, message)
        except UnbrokenError as error:
            return self.refusal(message, str(error))
        return SlotAnswer({"type": ANSWERS[kind], **answer.message}, answer.fds)

    def refusal(self, message: Mapping[str, Any], reason: str) -> SlotAnswer:
        """Return the answer to a request that is refused."""
        kind = str(message.get("type"))
        log.warning("request of a worker refused", message=kind, error=reason)
        return SlotAnswer({"type": ANSWERS[kind], "error": reason})

    def close(self) -> None:
        """Release all memory."""
        for key in list(self._slots):
            self._free(key, lambda slot: True)

    def _do(self, kind: str, message: Mapping[str, Any]) -> SlotAnswer:
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
            answer = self._saved(key, attempt, _whole(message, "slot"), _whole(message, "step"))
            self._note(key, message)
            return answer
        if kind == SNAPSHOT_USED:
            return self._used(key, _whole(message, "from_attempt"), _whole(message, "step"))
        if kind == SNAPSHOT_FETCH:
            return self._find(key)
        if message.get("everyone") is True:
            return SlotAnswer({"steps": self._everyone(key[0])})
        return self._find(key, _wanted(message))

    def _open(self, key: Key, attempt: int, index: int, size: int) -> SlotAnswer:
        if index > 1:
            raise PeerError("there are slots 0 and 1")
        if key not in self._slots and len({name for name, _ in self._slots} | {key[0]}) > NAMES_MAX:
            raise WorldError(f"an agent keeps snapshots of {NAMES_MAX} names")
        # The worker asks for a slot again when the old one has become too small.
        self._free(key, lambda slot: (slot.attempt, slot.index) == (attempt, index))
        self._plan(key, size)
        slot = SlotFile(attempt, index, self.memory.take(f"unbroken-{key[1]}-{index}", size))
        self._slots.setdefault(key, []).append(slot)
        return SlotAnswer({}, [slot.file.fd])

    def _plan(self, key: Key, size: int) -> None:
        """Plan the memory for all ranks, if it is not planned for a slot of this size yet. Raises
        WorldError if slots have no room."""
        known = self._sizes if self._planned == self._newest else {}
        if size <= known.get(key, 0):
            return
        sizes = known | {key: size}
        plan = memory_plan(sizes, self._nproc, has_buddy=self.has_buddy)
        room = self.memory.room()
        # A worker may ask for any number of bytes, and a report has room for NUMBER_MAX.
        self.missing = min(NUMBER_MAX, plan.slots_missing(room + self._slot_bytes()))
        if self.missing:
            raise WorldError(
                f"no memory for snapshots: {size_text(plan.slots)} are needed, {SLOT_STATES} "
                f"states of each rank, and {size_text(self.missing)} are missing; raise the pod's "
                "memory limit by that"
            )
        self._sizes, self._planned = sizes, self._newest
        missing = plan.copies_missing(room + self.memory.taken_bytes())
        self.memory.copies_missing = min(NUMBER_MAX, missing)

    def _reserved(self) -> int:
        plan = memory_plan(self._sizes, self._nproc, has_buddy=self.has_buddy)
        return max(0, plan.slots - self._slot_bytes())

    def _slot_bytes(self) -> int:
        return sum(slot.file.size for slots in self._slots.values() for slot in slots)

    def _saved(self, key: Key, attempt: int, index: int, step: int) -> SlotAnswer:
        slots = self._slots.get(key, [])
        saved = [one for one in slots if (one.attempt, one.index) == (attempt, index)]
        if not saved:
            raise PeerError(f"slot {index} of attempt {attempt} was never opened")
        result = version(os.pread(saved[0].file.fd, HEADERS_BYTES, 0))
        if result not in (None, VERSION):
            raise PeerError(
                f"a snapshot is of format {result}, and this agent reads {VERSION}: give agent and "
                "worker the same version of unbroken"
            )
        saves = self._saves[key] = self._saves.get(key, 0) + 1
        if saves == 2:
            saving = {other for other in self._slots if other in self._saves}
            for other in list(self._slots):
                # Ranks that live elsewhere by now.
                if other == key or (other[0] == key[0] and other not in saving):
                    self._free(other, lambda slot: slot.attempt < attempt)
        log.debug("snapshot stored", snapshot=key[0], rank=key[1], attempt=attempt, step=step)
        if self.on_saved is not None:
            self.on_saved(key, saved[0], step)
        return SlotAnswer({})

    def _note(self, key: Key, message: Mapping[str, Any]) -> None:
        """Note what the worker says about a save."""
        step, index = _whole(message, "step"), _whole(message, "slot")
        told, seconds = message.get("replicas"), message.get("seconds")
        replicas = told[:RECEIPT_CHARACTERS] if isinstance(told, str) else ""
        state = self.states.setdefault(key, SavedState(step, 0, replicas))
        state.step, state.replicas = step, replicas
        slots = [one for one in self._slots.get(key, []) if one.index == index]
        header = slots[-1].header() if slots else None
        if header is not None:
            state.state_bytes = header.body_bytes
        if isinstance(seconds, float) and 0 <= seconds < NUMBER_MAX:
            state.seconds.append(seconds)

    def _used(self, key: Key, attempt: int, step: int) -> SlotAnswer:
        self._free(
            key,
            lambda slot: (
                slot.attempt < self._newest and (slot.attempt, slot.frozen) != (attempt, step)
            ),
        )
        return SlotAnswer({})

    @property
    def newest(self) -> int:
        """Return the running attempt; -1: none yet."""
        return self._newest

    def node(self, key: Key, point: Point) -> int | str | None:
        """Return the node rank or address of the agent that it came from; None: it was made
        here."""
        slots = self._slots.get(key, [])
        return next((slot.node for slot in slots if (slot.attempt, slot.frozen) == point), None)

    def points(self, key: Key) -> list[Point]:
        """Return the points of a rank that may be restored from here."""
        return [(slot.attempt, step) for slot, step in self._offered(key)]

    def add(self, key: Key, point: Point, file: MemoryFile, node: int | str | None) -> None:
        """Offer a snapshot that was brought here; it is a file of the same memory."""
        if point in self.points(key):
            self.memory.give_back(file)
            return
        slot = SlotFile(point[0], -1, file, is_over=True, frozen=point[1], node=node)
        self._slots.setdefault(key, []).append(slot)

    def _offered(self, key: Key) -> list[tuple[SlotFile, int]]:
        slots = [(slot, slot.step()) for slot in self._slots.get(key, [])]
        return [(slot, step) for slot, step in slots if step is not None]

    def _everyone(self, name: str) -> list[dict[str, int]]:
        ours = [key for key in self._slots if key[0] == name]
        headers = [slot.header() for key in ours for slot, _ in self._offered(key)]
        return [row(header) for header in headers if header is not None]

    def _find(self, key: Key, wanted: Point | None = None) -> SlotAnswer:
        result = self._offered(key)
        if wanted is not None:
            result = [(slot, step) for slot, step in result if (slot.attempt, step) == wanted][:1]
        steps = [{"attempt": slot.attempt, "step": step} for slot, step in result]
        origins = [slot.node for slot, _ in result]
        return SlotAnswer({"steps": steps, "from": origins}, [slot.file.fd for slot, _ in result])

    def _free(self, key: Key, is_useless: Callable[[SlotFile], bool]) -> None:
        kept = []
        for slot in self._slots.pop(key, []):
            if is_useless(slot):
                self.memory.give_back(slot.file)
            else:
                kept.append(slot)
        if kept:
            self._slots[key] = kept


def middle(values: Iterable[float]) -> float | None:
    """Return the median, the higher one of an even number; None: there are no values."""
    # Not by `statistics`, whose import takes 10 ms of an agent's start.
    found = sorted(values)
    return found[len(found) // 2] if found else None


def row(header: Header) -> dict[str, int]:
    """Return one row of the list of snapshots that all ranks have saved."""
    return {
        "rank": header.rank,
        "world_size": header.world_size,
        "attempt": header.attempt,
        "step": header.step,
    }


def _wanted(message: Mapping[str, Any]) -> Point | None:
    """Return the one snapshot that a worker requests; None: any. Raises PeerError."""
    if message.get("from_attempt") is None and message.get("step") is None:
        return None
    return _whole(message, "from_attempt"), _whole(message, "step")


def _whole(message: Mapping[str, Any], key: str) -> int:
    result = message.get(key)
    if not isinstance(result, int) or not 0 <= result < 2**62:
        raise PeerError(f"{key} is no whole number: {str(result)[:100]}")
    return result
