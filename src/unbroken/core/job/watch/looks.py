"""The looks at one silence: what they show in a row, and how long the silence may last for that.

Each look is compared once with those before it (`Looks.add`), in two ways: which ranks are named,
and which ranks are still, while no rank makes a step. To stop a healthy job costs more than to find
a hang late. So only a rank that others wait for, and that is named in several looks in a row, is
stopped soon. A job without a named rank is stopped soon only if no rank has done anything since the
look before. An evaluation of all ranks works.

A single look cannot distinguish a pause from a hang. Two can, if ranks wait in a collective for
others that are elsewhere. It is a hang if no rank has made a step, and those others are where they
were, and have done nothing since. How long they are given depends on what they wait for: slow
storage and a slow peer look like a hang for a while. If every rank waits in a collective and none
moves, the job hangs as well: a message was lost, or different collectives were called.

Activity between two looks is read from counters of the kernel that looks do not change. A look sees
two moments. An evaluation that waits for a GPU in each batch is in the same place in both. So is a
script that asks every second whether a file has come. A process that hangs gets no processor,
except for threads of libraries that wake up now and then. A process that loops for ever does not
take memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unbroken.core.diagnosis.rank_activity import (
    BUSY_SHARE,
    COLLECTIVE,
    GIL_IDLE_SHARE,
    GPU,
    WAITING,
    Kind,
    RankActivity,
    activities_of,
    explaining_frames,
    parts,
)
from unbroken.core.diagnosis.stacks import CERTAIN, IO_NOISE_BYTES, LIKELY, Blame, spins, works
from unbroken.core.patience import (
    ACTIVE,
    ALL_WAIT,
    ASLEEP,
    BLIND,
    CHECKPOINT,
    COMPILING,
    DIFFERENT,
    IN_STORE,
    NOBODY,
    SLOW,
    SPINNING,
    STUCK,
    UNSEEN,
    WATCH_SECONDS,
    WORKING,
    Allowance,
    longest,
)
from unbroken.wire.observation import Activity, RankEvidence

MAIN_SHARE, MAIN_SECONDS = 0.001, 0.001
"""Cores, and seconds, that a main thread uses which does more than wake up and wait again."""
PROCESS_SHARE, PROCESS_SECONDS = 0.01, 0.05
"""The same of all threads, and of the processes below: idle threads of torch, NCCL and Python stay
below."""
POLLS_PER_SECOND, POLLS_MIN = 0.1, 2
"""Runs of a main thread that sleeps again and again.  The end of a look may make one."""
FAULTS_PER_SECOND, FAULTS_MIN = 50.0, 20
"""Page faults, by its own processor time, of a rank that computes and gets on: what it makes needs
memory."""
COMPUTED_SECONDS = 0.02
"""Processor time without which a rank that computes shows nothing: a busy machine left it none."""
_WAKES_ALONE = (Kind.GIL, Kind.STOPPED, Kind.GONE, Kind.UNKNOWN)
"""A thread that waits for the GIL wakes up 200 times a second."""


def is_active(before: Activity | None, one: RankEvidence, what: RankActivity) -> bool:
    """True if the rank did something between the look that has ended with `before` and this one;
    False also where it was not measured."""
    after = one.activity_before
    if before is None or after is None or what.kind in _WAKES_ALONE:
        return False
    seconds = after.at - before.at
    main, runs = after.main_seconds - before.main_seconds, after.main_runs - before.main_runs
    if seconds <= 0.0 or main < 0.0:
        return False
    if what.kind is Kind.COMPUTE:
        return after.faults - before.faults >= max(FAULTS_PER_SECOND * main, FAULTS_MIN)
    does = main >= max(MAIN_SHARE * seconds, MAIN_SECONDS)
    used = after.cpu_seconds - before.cpu_seconds
    does = does or used >= max(PROCESS_SHARE * seconds, PROCESS_SECONDS)
    polls = runs >= max(POLLS_PER_SECOND * seconds, POLLS_MIN)
    return does or (what.kind is Kind.SLEEP and polls)


def watched_seconds(before: Activity | None, one: RankEvidence, what: RankActivity) -> float:
    """Time for which the rank was watched between two looks; infinite if that would say nothing,
    or its kernel has no counters."""
    after = one.activity_before
    if after is None or what.kind in _WAKES_ALONE:
        return float("inf")
    if before is None:
        return 0.0
    is_starved = after.main_seconds - before.main_seconds < COMPUTED_SECONDS
    return 0.0 if what.kind is Kind.COMPUTE and is_starved else after.at - before.at


_ALLOWANCES: Mapping[Kind, Allowance] = {
    Kind.DATA: SLOW,
    Kind.CHILD: SLOW,
    Kind.FILES: SLOW,
    Kind.NETWORK: SLOW,
    Kind.COMPUTE: SLOW,
    Kind.STUCK: STUCK,
    Kind.CHECKPOINT: CHECKPOINT,
}
"""Allowances for a rank that keeps the others waiting; ASLEEP for what only sleeps, waits for a
lock or holds the GIL."""
_COMPILER = re.compile(r"\b(?:torch/_(?:dynamo|inductor|functorch)|triton)/")


@dataclass(frozen=True, slots=True)
class _Place:
    """Facts that stay the same while a rank does not move."""

    pid: int
    phase: str
    step: int | None
    last_output_at: float | None
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StillRanks:
    """Facts that several looks in a row have shown alike."""

    places: Mapping[int, _Place]
    """Places of the ranks that keep the others waiting, or of all ranks if all wait."""
    steps: Mapping[int, int | None]
    looks: int
    allowance: Allowance
    """Silence that they are given, by what they do; the longest of all looks."""
    is_spinning: bool
    """One of them computes in one place."""
    is_mutual: bool = False
    """Every rank waits for the others, in collectives or in the rendezvous' store."""
    activities: Mapping[int, Activity | None] = field(default_factory=dict)
    """Counters of these ranks at the end of the newest look."""
    watched_seconds: float = 0.0
    """Longest time between two looks in which counters show what they did."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that keep the others waiting; none, if all wait."""
        return () if self.is_mutual else tuple(sorted(self.places))

    def is_certain(self, silent_seconds: float, repeats: float = 1.0) -> bool:
        """True if it is a hang after a silence of so long; `repeats`: the factor of the time that
        is given, after restarts that did not help."""
        is_watched = self.is_mutual or self.watched_seconds >= WATCH_SECONDS
        is_enough = self.looks >= self.allowance.looks and is_watched
        return is_enough and silent_seconds >= self.allowance.after(0.0, repeats)


def still_ranks(
    before: StillRanks | None,
    ranks: Mapping[int, RankEvidence],
    activities: Mapping[int, RankActivity],
    world: int,
) -> StillRanks | None:
    """Return the facts on `world` ranks from this look and earlier ones; None: none is certain.

    A rank that could not be read may be the one that works, so that every rank must be known."""
    away = [rank for rank, what in activities.items() if what.kind not in WAITING]
    # One that has ended has its own rules, and one under a debugger is a person's.
    kinds = {what.kind for what in activities.values()}
    is_known = len(ranks) >= world and not kinds & {Kind.UNKNOWN, Kind.GONE}
    is_known = is_known and all(one.state != "t" for one in ranks.values())
    if not is_known or len(away) * 2 > len(ranks):
        return None
    if not away and not _all_idle(ranks, activities):
        return None
    if any(works(ranks[rank], activities[rank]) or not _is_same(ranks[rank]) for rank in away):
        return None
    found = StillRanks(
        {rank: _place(ranks[rank], activities[rank]) for rank in away or ranks},
        {rank: one.step for rank, one in ranks.items()},
        1,
        longest(allowance_of(ranks[rank], activities[rank]) for rank in away)
        if away
        else _mutual(activities),
        any(spins(ranks[rank], activities[rank]) for rank in away),
        is_mutual=not away,
        activities={rank: ranks[rank].activity_after for rank in away},
    )
    if before is None or (before.places, before.steps) != (found.places, found.steps):
        return found
    then = before.activities
    is_busy = any(is_active(then[rank], ranks[rank], activities[rank]) for rank in away)
    seconds = [watched_seconds(then[rank], ranks[rank], activities[rank]) for rank in away]
    return replace(
        found,
        looks=before.looks + 1,
        allowance=longest([found.allowance, before.allowance, *([ACTIVE] if is_busy else ())]),
        is_spinning=found.is_spinning or before.is_spinning,
        watched_seconds=max(before.watched_seconds, min(seconds, default=0.0)),
    )


def _all_idle(ranks: Mapping[int, RankEvidence], activities: Mapping[int, RankActivity]) -> bool:
    """True if all ranks, which wait for each other, idle until the host itself sees the end.

    One that waits for its GPU may wait for what it has given the GPU to do."""
    return len(ranks) > 1 and all(
        activities[rank].words != GPU
        and _is_same(one)
        and one.cpu_share is not None
        and one.cpu_share < BUSY_SHARE
        and (one.io_bytes or 0) <= IO_NOISE_BYTES
        for rank, one in ranks.items()
    )


def _mutual(activities: Mapping[int, RankActivity]) -> Allowance:
    """Silence that ranks are given that all wait for each other."""
    if any(what.kind is Kind.STORE for what in activities.values()):
        return IN_STORE
    names = {what.words for what in activities.values() if what.words != COLLECTIVE}
    return DIFFERENT if len(names) > 1 else ALL_WAIT


def is_unread(one: RankEvidence) -> bool:
    """True if there was no time to read the stack of a process that lives."""
    return not one.threads and one.state not in ("", "Z", "X")


def _is_same(one: RankEvidence) -> bool:
    return one.is_same is True or one.state in ("T", "D")


def _place(one: RankEvidence, what: RankActivity) -> _Place:
    # A client of the store tries to connect, and pauses.
    functions = () if what.kind is Kind.STORE else functions_of(one)
    return _Place(one.pid, one.phase, one.step, one.last_output_at, functions)


def functions_of(one: RankEvidence) -> tuple[str, ...]:
    """Python's functions only: native ones are read where there is time for it."""
    return tuple(
        function
        for function, file in map(parts, explaining_frames(one))
        if ".py:" in file or file.startswith("<")
    )


def allowance_of(one: RankEvidence, what: RankActivity, *, is_active: bool = False) -> Allowance:
    """Silence that is given to a rank that keeps the others waiting."""
    frames = one.threads[0].frames if one.threads else ()
    if any(map(_COMPILER.search, frames)):
        return COMPILING
    is_busy = (one.cpu_share or 0.0) >= GIL_IDLE_SHARE
    given = [_ALLOWANCES.get(what.kind, ASLEEP)]
    return longest([*given, *([SLOW] if is_busy else ()), *([ACTIVE] if is_active else ())])


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
        self.still: StillRanks | None = None
        """Ranks that do not move; None: none is certain."""

    def add(
        self, ranks: Mapping[int, RankEvidence], what: Blame, world: int, *, is_whole: bool
    ) -> StillRanks | None:
        """Compare a look with earlier ones; return the ranks that have not moved since.

        A look that nobody answered changes nothing of that: the next one is compared with the one
        before it, and counters show what happened between. What was known is not forgotten either
        because the machine was too busy for a look at all ranks (`is_whole`)."""
        before, self._known = self._known, {**self._known, **ranks}
        self._ranks, self._activities = ranks, activities_of(ranks)
        still = still_ranks(self.still, ranks, self._activities, world)
        if still is not None or is_whole:
            self.still = still
        self._name(before, ranks, what)
        return still

    def _name(
        self,
        before: Mapping[int, RankEvidence],
        ranks: Mapping[int, RankEvidence],
        what: Blame,
    ) -> None:
        """Count the looks that name the same ranks, and those at which nobody did anything."""
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
        self._unanswered, self.still = 0, None

    def is_enough(self, what: Blame) -> bool:
        """True if so many looks as are needed have named the same ranks as `what`, or nobody as
        it does; one process that does not run needs no second."""
        if self._unanswered:
            return self._unanswered >= BLIND.looks
        if self._named != (what.ranks if is_named(what) else ()):
            return False
        if self._named and all(self._activities[rank].kind in _ENDED for rank in self._named):
            return True
        is_watched = not self._named or self._watched_seconds >= WATCH_SECONDS
        return self._count >= ASLEEP.looks and is_watched

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

    def allowance(self, what: Blame, world: int, quiet_looks: int = NOBODY.looks) -> Allowance:
        """Silence that is given, if so many looks count as quiet: chance shows a rank that works
        in the same place twice."""
        is_quiet = self._quiet >= quiet_looks
        if is_named(what) and (world > 1 or is_quiet):
            return self._named_allowance(what)
        if not self._activities:
            return BLIND
        if not is_quiet:
            return WORKING
        return NOBODY if self.is_whole(world) else UNSEEN

    def is_whole(self, world: int) -> bool:
        """True if the newest look has shown what each rank does."""
        is_known = all(one.kind is not Kind.UNKNOWN for one in self._activities.values())
        return is_known and len(self._activities) >= world

    def _named_allowance(self, what: Blame) -> Allowance:
        given = [SPINNING] if what.is_spinning else []
        # Another fault may have come before the end of the look that names them.
        for rank in self._activities.keys() & what.ranks:
            doing = self._activities[rank]
            if doing.kind in WAITING:
                given.append(SLOW)
            elif doing.kind not in _ENDED:
                is_busy = rank in self._moved
                given.append(allowance_of(self._ranks[rank], doing, is_active=is_busy))
        return longest(given)


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
