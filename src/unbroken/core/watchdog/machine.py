"""Watches the ranks of one agent, for one attempt: what they show, and what each detector finds.

The machine asks for looks at its own deadlines (`Sample`), learns how long each rank is usually
silent in each phase, and raises and clears alarms in its views.  It stops nothing.

- There is no alarm by silence before enough was seen.  Nor is there one in the start-up, in the
  first steps, or in the first visit of a phase.
- Silence is judged only when /proc was read: `Sampled` ends each look that asks for it.
- A caller that comes later than the deadline was paused, perhaps with the whole machine. That time
  counts for no rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from unbroken.core.tick import Tick
from unbroken.spec.job.detectors import Detector, Mode
from unbroken.wire.observation import RankWatch

from .events import (
    Continued,
    Ended,
    Halted,
    PageRead,
    RankStarted,
    Sample,
    Sampled,
    WatchdogEffect,
    WatchdogEvent,
    Wrote,
)
from .rank import RankState
from .rhythm import STEP_FLOOR_SECONDS
from .taught import Taught

STILL_SECONDS = 1.0
"""A driver later than this was paused."""
TOGETHER_SECONDS = 0.1
"""Looks that are due so soon are made with the others."""


class Watchdog:
    """The ranks of one agent.  Events of a rank that does not run are ignored.

    `floor_seconds`: a silence shorter than this is never one; across a network whose links recover
    by themselves give 35 (a link flap takes up to 30).  `taught`: by an attempt before."""

    def __init__(
        self,
        ranks: range,
        modes: Mapping[Detector, Mode],
        floor_seconds: float = STEP_FLOOR_SECONDS,
        taught: Mapping[int, Taught] | None = None,
    ) -> None:
        self._ranks = ranks
        self._modes = frozenset(
            detector for detector in Detector if modes.get(detector) is not Mode.OFF
        )
        self._floor_seconds = floor_seconds
        self._states: dict[int, RankState] = {}
        self._next = math.inf
        self._past = [0, 0]
        """Turns and hits of states that are gone."""
        self._ended: dict[int, RankWatch] = {}
        self._before = dict(taught or {})
        self._taught: dict[int, Taught] = {}
        """By ranks that have ended."""

    @property
    def turns(self) -> int:
        """Raised by what is to be published at once."""
        return self._past[0] + sum(state.turns for state in self._states.values())

    @property
    def hits(self) -> int:
        """Raised by any news."""
        return self._past[1] + sum(state.hits for state in self._states.values())

    def deadline(self) -> float | None:
        """Return when `Tick` is due."""
        return self._next if self._next < math.inf else None

    def views(self) -> tuple[RankWatch, ...]:
        """Every rank that has started, as it stands."""
        states = self._states
        return tuple(
            states[rank].view() if rank in states else self._ended[rank]
            for rank in self._ranks
            if rank in states or rank in self._ended
        )

    def taught(self) -> Mapping[int, Taught]:
        """Return the knowledge of each rank for the watchdog of the next attempt."""
        living = {rank: state.taught() for rank, state in self._states.items()}
        return self._before | self._taught | living

    def step(self, event: WatchdogEvent, now: float) -> list[WatchdogEffect]:
        """Take in an event; what is to be read now."""
        if now > self._next + STILL_SECONDS:
            self._stood_still(now)
        effects: list[WatchdogEffect] = []
        match event:
            case RankStarted():
                self._start(event.rank, now)
            case Tick():
                effects = self._look(now)
            case Ended():
                self._end(event.rank)
            case PageRead() | Wrote():
                # The most frequent: they move no deadline.
                self._feed_rank(event, now)
                return effects
            case _:
                self._feed_rank(event, now)
        self._find_next()
        return effects

    def _find_next(self) -> None:
        self._next = min((state.due_at for state in self._states.values()), default=math.inf)

    def _feed_rank(
        self, event: PageRead | Wrote | Sampled | Halted | Continued, now: float
    ) -> None:
        state = self._states.get(event.rank)
        if state is None:
            return
        match event:
            case PageRead():
                state.read_page(event.page, now)
            case Wrote():
                state.wrote(event)
            case Sampled():
                state.sampled(event, now)
            case Halted():
                state.halted(now)
            case Continued():
                state.continued(now)

    def _start(self, rank: int, now: float) -> None:
        if rank not in self._ranks:
            return
        self._forget(rank)
        self._ended.pop(rank, None)
        self._states[rank] = RankState(
            rank, now, self._modes, self._floor_seconds, self._before.get(rank, Taught())
        )

    def _end(self, rank: int) -> None:
        state = self._forget(rank)
        if state is None:
            return
        self._ended[rank] = state.last_view()
        self._taught[rank] = state.taught()
        for other in self._states.values():
            other.is_ending = True

    def _forget(self, rank: int) -> RankState | None:
        state = self._states.pop(rank, None)
        if state is not None:
            self._past[0] += state.turns + 1
            self._past[1] += state.hits + 1
        return state

    def _look(self, now: float) -> list[WatchdogEffect]:
        deep: list[int] = []
        shallow: list[int] = []
        if now < self._next:
            return []
        for state in self._states.values():
            # A little early, to be read together.
            is_deep = state.look(now, now + TOGETHER_SECONDS)
            if is_deep is not None:
                (deep if is_deep else shallow).append(state.rank)
        wanted = ((deep, True), (shallow, False))
        return [Sample(tuple(ranks), is_deep) for ranks, is_deep in wanted if ranks]

    def _stood_still(self, now: float) -> None:
        for state in self._states.values():
            state.stood_still(now - self._next, now)
        self._find_next()
