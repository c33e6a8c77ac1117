"""The straggler of a job in which all ranks became slow together.

Ranks that train in step have the same step time, whichever rank causes it. But the rank that causes
it does not wait for its peers, while they wait for it in each step. So the stacks of all ranks are
sampled for a while, and the shares of samples in which they wait are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_high

from unbroken.core.job.gang import GangStage
from unbroken.core.job.state import JobState
from unbroken.core.job.transitions import Phase
from unbroken.spec.job.incident import Signal
from unbroken.wire.observation import RankEvidence

from .origins import named
from .questions import Question, ask
from .stalls import Stalls

SURVEY_SECONDS = 20.0
SAMPLES_PER_SECOND = 3
SAMPLES_MIN = 24
"""Samples of each rank: with fewer, chance alone makes ranks differ."""
WAITING_SHARE_MIN = 0.25
"""Share of samples in which the other ranks wait, at least: a rank that takes half as long again
keeps them waiting for a third of each step."""
RATIO_MIN = 4.0
"""The others wait so many times as often as a straggler.  If four equal ranks each wait in a
third of their samples, one of them looks so once in 10,000 surveys of 60 samples."""


class Stragglers:
    """Surveys of one job, of which at most one is made at a time."""

    def __init__(self, state: JobState, stalls: Stalls) -> None:
        self._state = state
        self._stalls = stalls
        self._question: Question | None = None

    def deadline(self) -> float | None:
        """Return when time alone will change something here."""
        return self._question.by if self._question is not None else None

    @property
    def question(self) -> Question | None:
        """The survey that is being made."""
        return self._question

    def advance(self, now: float) -> list[Signal]:
        """Begin a survey where ranks are slow and none is named; return the faults it shows."""
        state = self._state
        is_running = state.phase is Phase.TRAINING and state.gang.stage is not GangStage.HALTED
        if not is_running or self._stalls.unplaced is None:
            self._question = None
            return []
        if self._question is None:
            self._question = ask(state, SURVEY_SECONDS, now, SAMPLES_PER_SECOND)
        if not self._question.is_over(state, now):
            return []
        ranks, self._question = self._question.ranks(), None
        ranks_of_node = max((len(told) for told in state.watched.values()), default=1)
        found = stragglers(ranks, state.nnodes * ranks_of_node)
        return self._stalls.place_slowness(found, _compared(ranks, found), now)


def stragglers(ranks: Mapping[int, RankEvidence], world: int) -> tuple[int, ...]:
    """Return the ranks that nearly never wait, while the others often do; none if they cannot be
    determined.

    A rank of which nothing is known may be the one, so that all of `world` must be sampled."""
    if len(ranks) < world or any(one.samples < SAMPLES_MIN for one in ranks.values()):
        return ()
    shares = {rank: one.waiting / one.samples for rank, one in ranks.items()}
    usual = median_high(shares.values())
    if usual < WAITING_SHARE_MIN:
        return ()
    found = tuple(sorted(rank for rank, share in shares.items() if share * RATIO_MIN <= usual))
    return found if len(found) * 2 <= len(shares) else ()


def _compared(ranks: Mapping[int, RankEvidence], found: tuple[int, ...]) -> str:
    if not found:
        return "no rank differs from the others"
    own = max(ranks[rank].waiting / ranks[rank].samples for rank in found)
    usual = median_high(one.waiting / one.samples for one in ranks.values())
    return (
        f"the other ranks wait for {named(found)}: in {usual:.0%} of {SURVEY_SECONDS:.0f} s, "
        f"it in {own:.0%}"
    )
