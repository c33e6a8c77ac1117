"""Copies of this node's own snapshots, to which all nodes may have to return when one is lost.

It keeps at most two states of a rank per attempt. States of an older attempt stay until all nodes
hold a state of a newer one.
"""

from __future__ import annotations

from collections.abc import Collection

from unbroken.agent.snapshots.memory import File, Memory
from unbroken.agent.snapshots.slots import Snapshots
from unbroken.agent_http.snapshots import Key, Point

OLDER_MAX = 3
"""Number of older attempts whose copies are kept for each rank."""
SPARE_MAX = 16


class Held:
    """Copies that one agent holds; `close` when it ends."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._kept: dict[Key, dict[Point, File]] = {}
        self._spare: list[File] = []
        """Memory to be used again."""

    @property
    def _memory(self) -> Memory:
        return self._snapshots.memory

    def take(self, size: int) -> File:
        """Return memory for a copy. Raises WorldError if there is none."""
        for file in self._spare:
            if file.size == size:
                self._spare.remove(file)
                return file
        return self._memory.take("unbroken-held", size)

    def release(self, file: File) -> None:
        """Release memory that is not needed now, and that nothing writes into."""
        if len(self._spare) < SPARE_MAX:
            self._spare.append(file)
        else:
            self._memory.give_back(file)

    def discard(self, file: File) -> None:
        """Release memory that is not needed, and that may still be written into."""
        self._memory.give_back(file)

    def keep(self, key: Key, point: Point, file: File) -> None:
        """Keep a copy: it is a whole state."""
        self._kept.setdefault(key, {})[point] = file

    def keep_slot(self, key: Key, point: Point, fd: int, size: int) -> None:
        """Keep a slot of an ended attempt as a copy: the same memory for longer."""
        if point not in self._kept.get(key, {}):
            self.keep(key, point, self._memory.share(File(fd, size)))

    def trim(self, name: str, attempt: int, needed: Collection[int], *, is_agreed: bool) -> None:
        """Release all but these copies of this attempt; `is_agreed`: of older ones too."""
        for key, kept in self._kept.items():
            useless = [point for point in kept if key[0] == name and (
                point[1] not in needed if point[0] == attempt else is_agreed
            )]  # fmt: skip
            for point in useless:
                file = kept.pop(point)
                # A slot of an older attempt may have a writer that woke up late.
                (self.release if point[0] == attempt else self.discard)(file)

    def begin(self) -> None:
        """Begin a newer attempt: all present copies may be restored."""
        while self._spare:
            self._memory.give_back(self._spare.pop())
        for key, kept in self._kept.items():
            for point in sorted(kept)[:-OLDER_MAX]:
                self._memory.give_back(kept.pop(point))
            for point, file in kept.items():
                self._snapshots.add(key, point, self._memory.share(file), None)

    def close(self) -> None:
        """Release all memory."""
        for file in [*self._spare, *(one for kept in self._kept.values() for one in kept.values())]:
            self._memory.give_back(file)
        self._spare.clear()
        self._kept.clear()
