"""How far the ranks of the running attempt have come, by what they tell of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import TypedDict

from unbroken.wire.observation import RankWatch

from .events import PodUid

Watched = dict[PodUid, tuple[RankWatch, ...]]


class Before(TypedDict):
    """What an incident keeps of the time before its fault."""

    progress_before: float | None
    step: int | None
    step_seconds: float | None


def before(watched: Watched, now: float) -> Before:
    """How far the job had come; without steps, any sign of life is progress."""
    ranks = _ranks(watched)
    steps = [rank for rank in ranks if rank.step is not None]
    times = [rank.step_at for rank in steps if rank.step_at is not None]
    signs = times or [rank.sign_at for rank in ranks if rank.sign_at is not None]
    paces = [rank.step_seconds for rank in steps if rank.step_seconds is not None]
    return Before(
        # An agent's clock may be wrong.
        progress_before=min(max(signs), now) if signs else None,
        step=max((rank.step for rank in steps if rank.step is not None), default=None),
        step_seconds=median_low(paces) if paces else None,
    )


def first_step(watch: Iterable[RankWatch]) -> tuple[int, float | None] | None:
    """The earliest step that is told, and when it was made; None: none is."""
    told = [
        (rank.step if rank.first_step is None else rank.first_step, rank.step_at)
        for rank in watch
        if rank.step is not None
    ]
    return min(told, key=lambda one: one[0]) if told else None


def _ranks(watched: Watched) -> list[RankWatch]:
    return [rank for watch in watched.values() for rank in watch]
