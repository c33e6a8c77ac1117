"""Limits of a silence before looks end the attempt, by what the looks have shown.

To stop a healthy job costs more than to find a hang late.  So only a rank that others wait for, and
that is named in several looks in a row, is stopped soon. A job without a named rank is stopped soon
only if no rank has done anything since the look before. An evaluation of all ranks works.
"""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.core.diagnosis.rank_activity import (
    GPU,
    WAITING,
    Kind,
    RankActivity,
    activities_of,
)
from unbroken.core.diagnosis.stacks import CERTAIN, LIKELY, Blame, works
from unbroken.wire.observation import Activity, RankEvidence

from .activity import WATCH_SECONDS, is_active, watched_seconds
from .stalls import NOBODY_SECONDS, SPIN_SECONDS
from .still_ranks import LOOKS_MIN, SLOW_SECONDS, functions_of, seconds_given

UNSEEN_SECONDS, BLIND_SECONDS = 80.0, 600.0
"""Silence that is given while some ranks, or all, cannot be looked at.  Their agents say that they
are silent, and looks of a busy machine take up to 16 s."""
WORKING_SECONDS = 1800.0
"""Silence that is given where nobody is named and a rank computes, moves, asks again and again, or
waits for its GPU.  NCCL ends a collective that hangs after 600 s by itself."""
QUIET_LOOKS = 3
"""Looks in a row at which nobody did anything, before that counts: chance shows a rank that works
in the same place twice."""
_ENDED = (Kind.STOPPED, Kind.GONE)


class Looks:
    """The looks at one silence, in a row."""

    def __init__(self) -> None:
        self._ranks: Mapping[int, RankEvidence] = {}
        """Ranks that the newest look shows."""
        self._known: Mapping[int, RankEvidence] = {}
        """The newest evidence of each rank, to compare the next with."""
        self._activities: Mapping[int, RankActivity] = {}
        self._active: frozenset[int] = frozenset()
        """Ranks that may have done something since the look before."""
        self._moved: frozenset[int] = frozenset()
        """Ranks that surely have, by counters, while the same ranks are named."""
        self._named: tuple[int, ...] = ()
        self._count = self._quiet = 0
        """Looks in a row that name these ranks, or nobody; and at which no rank did anything."""
        self._unanswered = 0
        """Looks in a row that nobody answered."""
        self._watched_seconds = 0.0
        """Longest time between these looks in which counters show what the named ranks did."""

    def add(self, ranks: Mapping[int, RankEvidence], what: Blame) -> None:
        """Compare a look with what is known.

        A look that nobody answered changes nothing of that: the next one is compared with the one
        before it, and counters show what happened between."""
        before, self._known = self._known, {**self._known, **ranks}
        self._ranks, self._activities = ranks, activities_of(ranks)
        self._unanswered = 0 if ranks else self._unanswered + 1
        if self._unanswered:
            return
        self._active = frozenset(
            rank
            for rank, one in ranks.items()
            if _does_something(before.get(rank), one, self._activities[rank])
        )
        moved = frozenset(
            rank
            for rank, one in ranks.items()
            if is_active(_counted(before.get(rank)), one, self._activities[rank])
        )
        is_watched = all(
            what.kind in WAITING or _watched_seconds(before, ranks[rank], what) > 0.0
            for rank, what in self._activities.items()
        )
        # A look of a busy machine that did not end in time says nothing of the time after it.
        self._quiet = 0 if self._active else self._quiet + is_watched
        named = what.ranks if is_named(what) else ()
        self._moved = moved | (self._moved if named == self._named else frozenset())
        if named != self._named:
            self._count, self._watched_seconds = 0, 0.0
        else:
            seconds = [
                _watched_seconds(before, ranks[rank], self._activities[rank]) for rank in named
            ]
            self._watched_seconds = max(self._watched_seconds, min(seconds, default=0.0))
        self._named, self._count = named, self._count + 1

    def clear(self) -> None:
        """Forget a silence that is over."""
        self._ranks, self._known, self._activities = {}, {}, {}
        self._active = self._moved = frozenset()
        self._named, self._count, self._quiet, self._watched_seconds = (), 0, 0, 0.0
        self._unanswered = 0

    def is_enough(self, what: Blame) -> bool:
        """True if so many looks as are needed have named the same ranks as `what`, or nobody as
        it does; one process that does not run needs no second."""
        if self._unanswered:
            return self._unanswered >= LOOKS_MIN
        if self._named != (what.ranks if is_named(what) else ()):
            return False
        if self._named and all(self._activities[rank].kind in _ENDED for rank in self._named):
            return True
        is_watched = not self._named or self._watched_seconds >= WATCH_SECONDS
        return self._count >= LOOKS_MIN and is_watched

    def has_watched(self, ranks: Mapping[int, RankEvidence], what: Blame) -> bool:
        """True if the ranks that a look names did nothing since the look before it."""
        activities = activities_of(ranks)
        return all(
            _watched_seconds(self._known, ranks[rank], activities[rank]) >= WATCH_SECONDS
            and not is_active(_counted(self._known.get(rank)), ranks[rank], activities[rank])
            for rank in what.ranks
        )

    @property
    def is_at_work(self) -> bool:
        """True if a rank that counts did something since the look before."""
        return bool(self._active if len(self._ranks) == 1 else self._active.difference(self._named))

    def seconds(self, what: Blame, world: int, quiet_looks: int = QUIET_LOOKS) -> float:
        """Silence that is given, if so many looks count as quiet."""
        is_quiet = self._quiet >= quiet_looks
        if is_named(what) and (world > 1 or is_quiet):
            return self._named_seconds(what)
        if not self._activities:
            return BLIND_SECONDS
        if not is_quiet:
            return WORKING_SECONDS
        return NOBODY_SECONDS if self.is_whole(world) else UNSEEN_SECONDS

    def is_whole(self, world: int) -> bool:
        """True if the newest look has shown what each rank does."""
        is_known = all(one.kind is not Kind.UNKNOWN for one in self._activities.values())
        return is_known and len(self._activities) >= world

    def _named_seconds(self, what: Blame) -> float:
        given = SPIN_SECONDS if what.is_spinning else 0.0
        # Another fault may have come before the end of the look that names them.
        for rank in self._activities.keys() & what.ranks:
            doing = self._activities[rank]
            if doing.kind in WAITING:
                given = max(given, SLOW_SECONDS)
            elif doing.kind not in _ENDED:
                is_busy = rank in self._moved
                given = max(given, seconds_given(self._ranks[rank], doing, is_active=is_busy))
        return given


def is_named(what: Blame) -> bool:
    """True if ranks are named with more than a guess."""
    return bool(what.ranks) and what.confidence in (CERTAIN, LIKELY)


def _watched_seconds(
    before: Mapping[int, RankEvidence], one: RankEvidence, what: RankActivity
) -> float:
    return watched_seconds(_counted(before.get(one.rank)), one, what)


def _counted(before: RankEvidence | None) -> Activity | None:
    """Counters at the end of a look."""
    return before.activity_after if before is not None else None


def _does_something(before: RankEvidence | None, one: RankEvidence, what: RankActivity) -> bool:
    """True if the rank may get on with something, other than to wait for its peers."""
    if what.kind in (*_ENDED, Kind.UNKNOWN):
        return False
    # It may wait for its GPU, and that for a peer, or compute.
    if what.kind is Kind.COMPUTE or what.words == GPU or one.is_same is False:
        return True
    if before is not None and before.pid == one.pid:
        then, now = functions_of(before), functions_of(one)
        if then and now and then != now:
            return True
    if what.kind in WAITING:
        return False
    return works(one, what) or is_active(_counted(before), one, what)
