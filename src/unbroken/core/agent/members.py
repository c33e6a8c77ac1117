"""Workers that can leave their training on request, and so can be kept over attempts.

A member is one process. It trains, or waits at the barrier. There it has left its process groups
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
    """Attempt that it trains in, or trained in last."""
    node_rank: int | None
    """Node rank that it trains with, or trained with last; None: it has had none."""
    is_at_barrier: bool = False
    has_passed: bool = False
    """True if it has reported `Passed` since its release, or was never at the barrier."""
    is_recalled: bool = False
    """It received the request to come to the barrier and has not been released since."""


class Members:
    """Members of a node, by local rank."""

    def __init__(self) -> None:
        self._known: dict[int, WorkerProcess] = {}

    def __contains__(self, local_rank: object) -> bool:
        return local_rank in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, local_rank: int, pid: int | None) -> WorkerProcess | None:
        """Return the member, if it is this process."""
        member = self._known.get(local_rank)
        return member if member is not None and pid in (None, member.pid) else None

    def add(self, local_rank: int, member: WorkerProcess) -> None:
        """Add a member; a process that is a member already keeps its record."""
        known = self._known.get(local_rank)
        if known is None or known.pid != member.pid:
            self._known[local_rank] = member

    def drop(self, local_rank: int) -> None:
        """Remove the member: it cannot be kept."""
        self._known.pop(local_rank, None)

    def clear(self) -> None:
        """Remove all members: none can be kept."""
        self._known.clear()

    def ranks(self) -> tuple[int, ...]:
        """Return local ranks, in order."""
        return tuple(sorted(self._known))

    def pid(self, local_rank: int) -> int:
        """Return the pid of a member."""
        return self._known[local_rank].pid

    def absent(self) -> tuple[int, ...]:
        """Return local ranks that are not at the barrier."""
        return tuple(rank for rank in self.ranks() if not self._known[rank].is_at_barrier)

    def oldest(self) -> int | None:
        """Return the attempt of the oldest member."""
        return min((member.attempt for member in self._known.values()), default=None)

    def recall(self) -> tuple[int, ...]:
        """Return local ranks that must now be requested to come to the barrier."""
        fresh = [rank for rank in self.absent() if not self._known[rank].is_recalled]
        for rank in fresh:
            self._known[rank].is_recalled = True
        return tuple(fresh)

    def arrive(self, member: WorkerProcess) -> bool:
        """Note that the member is at the barrier; return False if it reported so before its
        release, or twice."""
        if member.is_at_barrier or not member.has_passed:
            return False
        member.is_at_barrier = True
        return True

    def release(self, ranks: Iterable[int], attempt: int, node_rank: int) -> None:
        """Note that the members leave the barrier."""
        for rank in ranks:
            self._known[rank] = WorkerProcess(self._known[rank].pid, attempt, node_rank)

    def keep_rank(self, node_rank: int) -> bool:
        """Return True if no member trained with another node rank; else remove all members.

        A process has data and state of its rank, and must not continue as another one. With
        `--inprocess-restart` the workers expect any rank, and this is not called.
        """
        is_same = all(one.node_rank in (None, node_rank) for one in self._known.values())
        if not is_same:
            self.clear()
        return is_same
