"""Workers that leave their training when they are told, and so can live on over attempts.

A member is one process.  It trains, or waits at the barrier: there it has left its process groups
and does nothing until it is released.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class WorkerProcess:
    """One process."""

    pid: int
    attempt: int
    """Attempt that it trains in, or has come from."""
    is_at_barrier: bool = False
    has_passed: bool = False
    """Since it was released, or it was never behind the barrier."""
    is_recalled: bool = False
    """It was told to come to the barrier and has yet to be released."""


class Members:
    """Members of a node, by local rank."""

    def __init__(self) -> None:
        self._known: dict[int, WorkerProcess] = {}

    def __contains__(self, local_rank: object) -> bool:
        return local_rank in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, local_rank: int, pid: int | None) -> WorkerProcess | None:
        """The member, where it is this process."""
        member = self._known.get(local_rank)
        return member if member is not None and pid in (None, member.pid) else None

    def add(self, local_rank: int, member: WorkerProcess) -> None:
        """Take one in; a process that is in already stays as it is."""
        known = self._known.get(local_rank)
        if known is None or known.pid != member.pid:
            self._known[local_rank] = member

    def drop(self, local_rank: int) -> None:
        """It cannot live on."""
        self._known.pop(local_rank, None)

    def clear(self) -> None:
        """Nobody can."""
        self._known.clear()

    def ranks(self) -> tuple[int, ...]:
        """Local ranks, in order."""
        return tuple(sorted(self._known))

    def pid(self, local_rank: int) -> int:
        """Pid of a member."""
        return self._known[local_rank].pid

    def absent(self) -> tuple[int, ...]:
        """Local ranks that are not at the barrier."""
        return tuple(rank for rank in self.ranks() if not self._known[rank].is_at_barrier)

    def oldest(self) -> int | None:
        """Attempt of the oldest member."""
        return min((member.attempt for member in self._known.values()), default=None)

    def recall(self) -> tuple[int, ...]:
        """Local ranks that must be told to come to the barrier now."""
        fresh = [rank for rank in self.absent() if not self._known[rank].is_recalled]
        for rank in fresh:
            self._known[rank].is_recalled = True
        return tuple(fresh)

    def arrive(self, member: WorkerProcess) -> bool:
        """It is at the barrier; False: it said so before it was released, or twice."""
        if member.is_at_barrier or not member.has_passed:
            return False
        member.is_at_barrier = True
        return True

    def release(self, ranks: Iterable[int], attempt: int) -> None:
        """They leave the barrier."""
        for rank in ranks:
            self._known[rank] = WorkerProcess(self._known[rank].pid, attempt)
